#!/usr/bin/env python3
"""Find out what is wrong with a job; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "doctor")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
