"""docs/cli.md and docs/api.md: the options that `--help` prints, and the public names with their docstrings.

python -m tests.docs.reference --write     write both pages again
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from types import ModuleType
from unittest import mock

from tests.docs.pages import ROOT
from utils import errors
from utils.tools.cli.main import COMMANDS, main

# Subcommands that share an entry share a list.
LISTS = (["launch"], ["watch"], ["submit run"],
         [f"submit {name}" for name in ("status", "list", "logs", "stop", "cancel")],
         ["submit doctor"], ["doctor"], ["doctor logs"], ["plan"], ["bench ddp"], ["bench collectives"], ["sites"],
         ["stage"], ["checkpoints"], ["plot"])
SAME_AS_RUN = "submit doctor"  # its options are those of `submit run`
MODULES = {"": ["Distributed", "LaunchError", "setup_distributed"], "checkpoint": [], "data": [],
           "metrics": ["Metrics"], "preemption": [], "training": []}  # []: what __init__.py imports

CLI_HEAD = """\
# Commands

`ddpkit COMMAND --help` prints this with examples, exit statuses and columns of tables. In a clone,
`python utils COMMAND` is the same. This page is written by `python -m tests.docs.reference --write`.

Tab completion: `python -m pip install shtab`, then `ddpkit --print-completion bash
>~/.local/share/bash-completion/completions/ddpkit`; with `zsh`, into the file `_ddpkit` in a folder of `$fpath`."""
API_HEAD = """\
# Names for training scripts

`ddpkit` is the package where pip has installed it; in a clone it is `utils`. `help(NAME)` prints shapes, units and
errors. This page is written by `python -m tests.docs.reference --write`."""


# Options -------------------------------------------------------------------------------------------------------------

def help_of(command: str) -> str:
    """Return what `--help` prints, on a terminal that breaks no line."""
    wide = mock.patch.dict(os.environ, {"COLUMNS": "1000"})
    with wide, contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return text.getvalue()


def options(command: str) -> dict[str, str]:
    """Return the options of a command, such as "`-n`, `--ntasks N`", and what they mean."""
    names, found = "", {}
    for line in help_of(command).splitlines():
        if option := re.match(r"  (-\S.*?)(?:  +(.*))?$", line):
            names = ", ".join(f"`{name}`" for name in without_repeated_value(option[1]))
            found[names] = option[2] or ""
        elif names and (rest := re.match(r" {20,}(.*)$", line)):
            found[names] += rest[1]
        else:
            names = ""
    found.pop("`-h`, `--help`")
    return found


def without_repeated_value(invocation: str) -> list[str]:
    """Split an option's names; "-n N, --ntasks N" and Python 3.13's "-n, --ntasks N" give the same."""
    *aliases, last = re.split(r", (?=-)", invocation)
    return [*(alias.split()[0] for alias in aliases), last]


def cli_page() -> str:
    lines = [CLI_HEAD]
    for commands in LISTS:
        lines += ["", f"## {commands[0].split()[0]} {', '.join(each.partition(' ')[2] for each in commands)}".rstrip()]
        paragraphs = help_of(commands[0]).strip().split("\n\n")
        if commands == [SAME_AS_RUN]:
            lines += ["", f"{sentence(paragraphs[1])} {paragraphs[-1]}"]
            continue
        if len(commands) == 1:
            lines += ["", sentence(paragraphs[1])]  # a list may follow a paragraph without an empty line
        else:
            lines += [""]
        rows: dict[tuple[str, str], list[str]] = {}
        for command in commands:
            for names, text in options(command).items():
                rows.setdefault((names, text), []).append(command.split()[-1])
        for (names, text), having in rows.items():
            some = f" ({', '.join(having)})" if len(having) < len(commands) else ""
            lines.append(f"- {names}: {text}{some}")
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """Return the first sentence."""
    return re.split(r"(?<=[^.][.])\s(?=[A-Z])", " ".join(text.strip().split("\n\n")[0].split()), maxsplit=1)[0]


# Names ---------------------------------------------------------------------------------------------------------------

def names_of(module: ModuleType, listed: Sequence[str]) -> list[str]:
    defined = [name for name, value in vars(module).items()
               if not name.startswith("_") and getattr(value, "__module__", "").startswith("utils.")]
    return [name for name in listed or defined if callable(getattr(module, name))]


class _Environ:
    def __repr__(self) -> str:
        return "os.environ"


def signature(value: object) -> str:
    """Return the arguments with their defaults, without types and private fields."""
    found = inspect.signature(value)  # type: ignore[arg-type]
    shown = [one.replace(annotation=one.empty, default=_Environ() if one.default is os.environ else one.default)
             for one in found.parameters.values() if one.name != "self" and not one.name.startswith("_")]
    return str(found.replace(parameters=shown, return_annotation=found.empty))


def entries(name: str, value: type) -> Iterator[str]:
    """Yield the line of a function, or of a class, and those of its methods."""
    is_class, is_error = inspect.isclass(value), inspect.isclass(value) and issubclass(value, Exception)
    held = is_class and dataclasses.is_dataclass(value) and name == "Distributed"  # made by setup_distributed() only
    arguments = "" if is_error or held else signature(value)
    yield f"- `{name}{arguments}`: {sentence(value.__doc__ or '')}"
    if held:
        fields = ", ".join(f"`{one.name}`" for one in dataclasses.fields(value) if not one.name.startswith("_"))
        yield f"  - fields: {fields}"
    if not is_class or is_error:
        return
    for attribute, member in vars(value).items():
        text = sentence(inspect.getdoc(member) or "") if not attribute.startswith("_") else ""
        if isinstance(member, property) and text:
            yield f"  - `.{attribute}`: {text}"
        elif inspect.isfunction(member) and text:
            yield f"  - `.{attribute}{signature(member)}`: {text}"


def api_page() -> str:
    lines = [API_HEAD]
    for name, listed in MODULES.items():
        module = importlib.import_module(f"utils.{name}".rstrip("."))
        lines += ["", f"## from ddpkit{'.' * bool(name)}{name} import ...", ""]
        lines += [line for one in names_of(module, listed) for line in entries(one, getattr(module, one))]
    tree = textwrap.dedent(inspect.getdoc(errors) or "").partition("\n\nWrong arguments")[0]
    lines += ["", "## Exceptions", "", tree.partition("\n\n")[0], "", "```", tree[tree.index("RuntimeError"):], "```"]
    return "\n".join(lines) + "\n"


PAGES = {ROOT / "docs" / "cli.md": cli_page, ROOT / "docs" / "api.md": api_page}


def commands_without_list() -> set[str]:
    return set(COMMANDS) - {commands[0].split()[0] for commands in LISTS}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for page, text in PAGES.items():
        page.write_text(text())
