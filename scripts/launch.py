#!/usr/bin/env python3
"""Start a training script on every GPU of every host of this job; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "launch")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
