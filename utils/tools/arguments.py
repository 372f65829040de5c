"""argparse with suggestions for unknown options."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with a suggestion for an unknown option."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with status 2."""
        import difflib  # every launch would notice the time to load it

        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = [word for word in self._option_string_actions if word.startswith("--")]
        near = difflib.get_close_matches(unknown[1], options, 1) if unknown else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)
