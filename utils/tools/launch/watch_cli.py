"""Watch ranks that another launcher starts: become the launcher's command, or a rank's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ...errors import LaunchError
from ...launch_protocol import HANG_TIMEOUT
from ...launchers.detect import find_launcher
from ..cli.arguments import ArgumentParser
from ..cli.launch_options import add_option
from .rank_environment import unwatched_line, watched, why_unwatched

_DESCRIPTION = """\
Run a command whose ranks are watched: when one fails or hangs, a line says which one, where and
why. The script need not know the kit. Use it in front of what each rank runs, or of torchrun:

  srun ddpkit watch python train.py
  mpiexec -n 8 ddpkit watch python train.py
  ddpkit watch torchrun --nproc-per-node 4 train.py

ddpkit launch watches its ranks by itself.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the command; return an exit status where that is not possible."""
    parser = ArgumentParser(
        prog="ddpkit watch",
        usage="%(prog)s [OPTION ...] COMMAND [ARGUMENT ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_option(parser.add_argument, "hang_timeout")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command is given. Expected one, as in: ddpkit watch python train.py")
    environ = watched(os.environ)
    if args.hang_timeout is not None:
        if not 0 <= args.hang_timeout < 1e6:
            parser.error(f"--hang-timeout is {args.hang_timeout:g}; expected seconds, or 0")
        environ[HANG_TIMEOUT] = f"{args.hang_timeout:g}"
        reason = why_unwatched(command) if args.hang_timeout else None
        if reason is not None and _is_first():
            print(f"ddpkit watch: {unwatched_line(reason)}", file=sys.stderr)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        is_script = command[0].endswith(".py")
        hint = f" Did you mean: ddpkit watch python {command[0]}" if is_script else ""
        print(
            f"ddpkit watch: error: {command[0]} could not be started: {error.strerror}. Expected "
            f"a program.{hint}",
            file=sys.stderr,
        )
        return 127 if isinstance(error, FileNotFoundError) else 126


def _is_first() -> bool:
    """Whether this is rank 0, or the command of torchrun: one line is enough."""
    try:
        return find_launcher().placement.rank == 0
    except LaunchError:  # the script reports it
        return True
