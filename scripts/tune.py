#!/usr/bin/env python3
"""Find the settings of DistributedDataParallel that are fastest for a script here; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "tune")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
