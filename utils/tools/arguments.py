"""argparse with the name by which the command was called, and suggestions for unknown options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with a suggestion for an unknown option.

    prog: such as "launch.py"; it becomes "ddpkit launch" where that command was called.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        if prog and os.path.basename(sys.argv[0]) == "ddpkit":
            prog = re.sub(r"^(\w+)\.py", r"ddpkit \1", prog)
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with status 2."""
        import difflib  # every launch would notice the time to load it

        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = [word for word in self._option_string_actions if word.startswith("--")]
        near = difflib.get_close_matches(unknown[1], options, 1) if unknown else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)
