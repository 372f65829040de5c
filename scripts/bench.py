#!/usr/bin/env python3
"""Measure collectives, links between hosts, and the scaling of a training; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kit
from utils.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
