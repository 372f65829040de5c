"""Tab completion of commands and options, by shtab."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import ArgumentParser, ParserFound

SHELLS = ("bash", "zsh")


def main(words: Sequence[str], modules: Mapping[str, tuple[str, str]]) -> int:
    """Print a script for a shell; return an exit status.

    words: one of SHELLS. modules: command -> module whose main() parses its options, description. A
    command's options are left out if its module cannot be imported.
    """
    if len(words) != 1 or words[0] not in SHELLS:
        print(
            f"ddpkit: error: --print-completion needs a shell, one of: {', '.join(SHELLS)}",
            file=sys.stderr,
        )
        return 2
    try:
        import shtab
    except ImportError:
        print(
            f"ddpkit: error: {sys.executable} has no shtab, which writes the completion. Install "
            "it there: python -m pip install shtab",
            file=sys.stderr,
        )
        return 1
    root = argparse.ArgumentParser(prog="ddpkit")
    commands = root.add_subparsers()
    for name, (module, description) in modules.items():
        if name != "submit":
            _add(commands, name, description, _parser(module, []))
            continue
        subcommands = commands.add_parser(name, help=description).add_subparsers()
        for subcommand, text in importlib.import_module(module).COMMANDS.items():
            _add(subcommands, subcommand, text, _parser(module, [subcommand]))
    for parser in _all(root):
        for action in parser._actions:
            if action.dest in ("command", "files", "script", "logs") and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, words[0]))
    return 0


def _add(commands: Any, name: str, text: str, parser: argparse.ArgumentParser | None) -> None:
    parents = [parser] if parser else []
    commands.add_parser(name, help=text, parents=parents, add_help=not parents)


def _parser(module: str, words: Sequence[str]) -> argparse.ArgumentParser | None:
    """Return the parser of a command; None if it is unknown."""
    ArgumentParser.is_wanted = True
    try:
        with contextlib.suppress(ImportError, SystemExit):
            importlib.import_module(module).main(words)
    except ParserFound as found:
        return found.parser
    finally:
        ArgumentParser.is_wanted = False
    return None


def _all(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += _all(each)
    return found
