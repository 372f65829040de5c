#!/usr/bin/env python3
"""Predict memory, step time and scaling of a training; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "plan")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
