"""argparse with suggestions for unknown options."""

from __future__ import annotations

import argparse
import re
from typing import Any, ClassVar, NoReturn


class ParserFound(BaseException):
    """A command has made its parser, and runs no further. No Exception: some commands report it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with a suggestion for an unknown option.

    is_wanted: the parser itself is, for tab completion: parsing raises ParserFound.
    """

    is_wanted: ClassVar[bool] = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line."""
        if self.is_wanted:
            raise ParserFound(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with status 2."""
        import difflib  # every launch would notice the time to load it

        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = [word for word in self._option_string_actions if word.startswith("--")]
        near = difflib.get_close_matches(unknown[1], options, 1) if unknown else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)
