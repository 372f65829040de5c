#!/usr/bin/env python3
"""List, explain, check and write profiles of clusters; see --help."""

import os.path
import runpy
import sys

sys.argv.insert(1, "sites")
kit = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
runpy.run_path(os.path.join(kit, "utils"), run_name="__main__")
