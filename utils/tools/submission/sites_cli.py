"""`sites`: list the profiles of clusters, and write one for this cluster."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ...job.commands import SchedulerError
from ..arguments import ArgumentParser
from . import profiles
from .new_profile import new_profile
from .profiles import ProfileError

DESCRIPTION = """\
List and write profiles of clusters, for `submit run --site`.

ddpkit sites list                     list the profiles of the kit, and where their values are from
ddpkit sites new --output ours.yaml   write a profile from what the scheduler, the modules and the
                                      hardware report; run it on a node with GPUs
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error.

    words: the command line without the name of the command; None: that of this process.
    """
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if words is None else words)
    if args.output and args.subcommand == "list":
        parser.error("list takes no --output")
    try:
        return _list() if args.subcommand == "list" else _new(args.output)
    except (ProfileError, SchedulerError) as error:
        print(f"ddpkit sites: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ddpkit sites",
        usage="ddpkit sites list | new [--output FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("subcommand", choices=("list", "new"))
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
    print(
        f"{output}: written. Complete it, then look at a job script: "
        f"ddpkit submit run --site ./{output} --dry-run train.py"
    )
    return 0
