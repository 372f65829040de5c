"""argparse with one-line errors, and suggestions for unknown options."""

from __future__ import annotations

import argparse
import re
from typing import Any, ClassVar, NoReturn

from .missing_files import closest

_CHOICE = re.compile(  # "argument subcommand: invalid choice: 'lsit' (choose from list, new)"
    r"argument (?P<name>\S+): invalid choice: '?(?P<found>[^']*)'? \(choose from (?P<choices>.*)\)"
)


class ParserFound(BaseException):
    """Carry a command's parser to its caller. Not an Exception: some commands report those."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line, with a suggestion for an unknown option.

    is_wanted: tab completion needs the parser itself, so parsing raises ParserFound.
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
        if unknown := re.match(r"unrecognized arguments: ([\w-]*)", message):
            name = unknown[1].replace("_", "-")
            options = [word for word in self._option_string_actions if word.startswith("--")]
            longer = [word for word in options if word.startswith(name) and name[2:]]
            near = longer[0] if longer else closest(name, options)
            hints = [f"Did you mean {near}?"] if near else []
            hints += [self.for_others] if self.for_others else []
            message = f"{message}. {' '.join(hints) or f'Its options: {self.prog} --help'}"
        elif wrong := _CHOICE.match(message):
            choices = [choice.strip("' ") for choice in wrong["choices"].split(",")]
            near = closest(wrong["found"], choices)
            hint = f"Did you mean {near}?" if near else f"See: {self.prog} --help"
            option = f"{wrong['name']}: " if wrong["name"].startswith("-") else ""
            message = f"{option}there is no {wrong['found']!r}. Expected one of: "
            message += f"{', '.join(choices)}. {hint}"
        self.exit(2, f"{self.prog}: error: {message}\n")
