"""Run a command of the kit: `python -m utils launch ...`, or `python PATH/TO/utils launch ...`.

Jobs start the folder by its path, with any Python since 3.6.
"""

import importlib
import os
import sys

PACKAGE = os.path.dirname(os.path.realpath(__file__))

if sys.version_info < (3, 10):  # too old for the rest of the package
    sys.path.insert(0, os.path.join(PACKAGE, "tools", "cli"))
    importlib.import_module("interpreter").restart_under_newer_python()

if not __package__:  # the folder was started by its path
    sys.path[0] = os.path.dirname(PACKAGE)
command = importlib.import_module((__package__ or os.path.basename(PACKAGE)) + ".tools.cli.main")
if (
    not __package__ and os.path.basename(PACKAGE) != "utils"
):  # installed, perhaps for another Python
    sys.path.append(sys.path.pop(0))  # this Python's own packages come first

if __name__ == "__main__":
    sys.exit(command.main())
