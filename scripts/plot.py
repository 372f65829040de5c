#!/usr/bin/env python3
"""Draw the logs of training runs as a PNG file; see --help."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # the kit

if sys.version_info < (3, 10):  # too old for the kit: interpreter.py starts this again
    sys.path.insert(0, os.path.join(sys.path[0], "utils", "launch"))
    import interpreter

    interpreter.restart_under_newer_python()

from utils import cli

if __name__ == "__main__":
    sys.exit(cli.main(["plot", *sys.argv[1:]]))
