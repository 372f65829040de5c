#!/usr/bin/env python3
"""Draw the logs of training runs as a PNG file; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kit
from utils.plot import main

if __name__ == "__main__":
    sys.exit(main())
