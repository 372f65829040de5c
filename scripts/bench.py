#!/usr/bin/env python3
"""Measure collectives, links between hosts, and the scaling of a training; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "bench")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
