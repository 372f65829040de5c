#!/usr/bin/env python3
"""Find the settings of DistributedDataParallel that are fastest for a script here; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kit
from utils.bench.tune import main

if __name__ == "__main__":
    sys.exit(main())
