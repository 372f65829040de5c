#!/usr/bin/env python3
"""Submit a training script as a Slurm or PBS job, and query submitted jobs; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "submit")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
