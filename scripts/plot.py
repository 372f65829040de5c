#!/usr/bin/env python3
"""Draw the logs of training runs as a PNG file; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "plot")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
