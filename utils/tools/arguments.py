"""argparse with errors of one line, and suggestions for unknown options."""

from __future__ import annotations

import argparse
import re
from typing import Any, ClassVar, NoReturn


class ParserFound(BaseException):
    """A command has made its parser, and runs no further. No Exception: some commands report it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line, with a suggestion for an unknown option.

    is_wanted: the parser itself is, for tab completion: parsing raises ParserFound.
    for_others: what to do with the options of other programs, appended to the error.
    """

    is_wanted: ClassVar[bool] = False
    for_others: str = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line."""
        if self.is_wanted:
            raise ParserFound(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message as one line; exit with status 2."""
        import difflib  # every launch would notice the time to load it

        if unknown := re.match(r"unrecognized arguments: ([\w-]*)", message):
            name = unknown[1].replace("_", "-")
            options = [word for word in self._option_string_actions if word.startswith("--")]
            longer = [word for word in options if word.startswith(name) and name[2:]]
            near = longer or difflib.get_close_matches(name, options, 1, 0.7)
            hints = [f"Did you mean {near[0]}?"] if near else []
            hints += [self.for_others] if self.for_others else []
            message = f"{message}. {' '.join(hints) or f'Its options: {self.prog} --help'}"
        self.exit(2, f"{self.prog}: error: {message}\n")
