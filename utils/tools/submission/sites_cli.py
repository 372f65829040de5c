"""`sites`: list the profiles of clusters, write one for this cluster, print and trust defaults."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...job.commands import SchedulerError
from ...visible_text import visible
from ..cli import defaults
from ..cli.arguments import ArgumentParser
from ..cli.defaults import DefaultsError
from . import profiles
from .new_profile import new_profile
from .profiles import ProfileError

DESCRIPTION = """\
List and write profiles of clusters, for `submit run --site`.

ddpkit sites list                     list the profiles of the kit, and where their values are from
ddpkit sites new --output ours.yaml   write a profile from what the scheduler, the modules and the
                                      hardware report; run it on a node with GPUs
ddpkit sites config                   print the defaults of options, and the file each is from
ddpkit sites config FILE              check a file of defaults before users read it: status 1, and a
                                      line for each mistake
ddpkit sites trust [FILE]             let site, python and stage-dir of this project's
                                      pyproject.toml count while its content stays as it is
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error.

    words: arguments after the name of the command; None: sys.argv[1:].
    """
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if words is None else words)
    if args.output and args.subcommand != "new":
        parser.error(f"{args.subcommand} takes no --output")
    if args.file and args.subcommand not in ("config", "trust"):
        parser.error(f"{args.subcommand} takes no FILE")
    try:
        if args.subcommand == "trust":
            return _trust(args.file or defaults.project_file())
        if args.subcommand == "config":
            return _check_defaults(args.file) if args.file else _print_defaults()
        return _list() if args.subcommand == "list" else _new(args.output)
    except (DefaultsError, ProfileError, SchedulerError) as error:
        print(f"ddpkit sites: error: {visible(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ddpkit sites",
        usage="ddpkit sites list | new [--output FILE] | config [FILE] | trust [FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("subcommand", choices=("list", "new", "config", "trust"))
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="of config and trust: a file of defaults"
    )
    group = parser.add_argument_group("new").add_argument
    group("--output", type=Path, metavar="FILE", help="a new file (default: standard output)")
    return parser


def _list() -> int:
    names = profiles.names()
    width = max(map(len, names))
    for name in names:
        profile = profiles.load(name)
        origin = f"; {profile.origin}" if profile.origin else ""
        print(f"{name:<{width}}  {profile.title}{origin}")
    return 0


def _print_defaults() -> int:
    found = defaults.load()
    rows = [
        (name, *found.get(name, (setting.default, "not set")))
        for name, setting in defaults.SETTINGS.items()
    ]
    width = max(len(str(value)) for _, value, _ in rows)
    for name, value, origin in rows:
        print(visible(f"{name:<14}  {value:<{width}}  {origin}"))
    print("\nThe command line wins, then variables, then these files:")
    for path in defaults.files():
        print(f"  {path}{'' if os.path.exists(path) else ' (does not exist)'}")
    return 0


def _check_defaults(path: str) -> int:
    values, mistakes = defaults.mistakes_in(path)
    site, python = values.get("site"), values.get("python")
    if site is not None:
        try:
            profiles.load(site.value)
        except ProfileError as error:
            mistakes.append(f"{site.origin}: site is {site.value!r}. {error}")
    if python is not None and shutil.which(python.value) is None:
        mistakes.append(
            f"{python.origin}: python is {python.value!r}, which is no program on this host. "
            "Expected the path of a Python"
        )
    for name, value in values.items():
        print(f"{name:<14}  {visible(value.value)}")
    for mistake in mistakes:
        print(f"ddpkit sites: error: {visible(mistake)}", file=sys.stderr)
    if not mistakes:
        print(f"{path}: no mistake found")
    return int(bool(mistakes))


def _trust(path: str) -> int:
    for name, value in defaults.trust(path).items():
        print(f"{name:<14}  {visible(value.value)}")
    print(f"{path}: trusted until its content changes")
    return 0


def _new(output: Path | None) -> int:
    text = new_profile()
    if output is None:
        print(text, end="")
        return 0
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ProfileError(
            f"{output} cannot be written: {error.strerror}. Give the name of a new file."
        ) from None
    path = output if output.is_absolute() else f"./{output}"
    print(
        f"{output}: written. Complete it, then look at a job script: "
        f"ddpkit submit run --site {path} --dry-run train.py"
    )
    return 0
