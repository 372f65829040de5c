"""The command line of `doctor`: the checks, and the subcommand `logs`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from ...errors import LaunchError
from ...launchers.detect import detect
from ...log import print_result
from ...visible_text import visible
from ..cli import interpreter
from ..cli.arguments import ArgumentParser
from ..cli.missing_files import no_such_file
from . import logs, run_checks

_EXIT_SECONDS = 5.0
_EXIT_WRONG_USE = 2  # like argparse, because a mistyped file name is no diagnosis
_LOGS_EPILOG = """\
exit status:
  0  no failure was found, and the output shows the end of the job
  1  a cause was found; a restart may help
  2  the command line is wrong, or a file cannot be read
  3  a cause was found; a restart does not help
  4  the output does not show why the job failed, or whether it has ended
"""
_DESCRIPTION = """\
Find out what is wrong with a cluster, a job or a launch.

ddpkit doctor                              check a login node or laptop
ddpkit launch -m ddpkit doctor             check all hosts of a job; also under srun and mpiexec
ddpkit launch -m ddpkit doctor --quick     the same in seconds, at the top of a job script
ddpkit submit doctor --nodes 2             submit these checks as a job
ddpkit doctor logs slurm-4711.out          find out why a job failed

Exit status of the checks: 0 good, 1 warning, 2 bad, others: doctor itself failed. Each finding is
printed with its remedy.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks, or `logs`; return an exit status.

    words: the command line without the command; None: from this process.
    """
    words = sys.argv[1:] if words is None else list(words)
    try:
        if words[:1] == ["logs"]:
            return _logs(words[1:])
        options = _parse(words)
        _restart_where_torch_is_installed()
        status = run_checks.main(options)
    except Exception:  # Python's own status 1 would look like a warning or a cause
        traceback.print_exc()
        status = os.EX_SOFTWARE
    # A hanging check must not keep this process. Otherwise the process ends as usual, since a
    # launcher's name service has to be closed.
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()
    return status


def _restart_where_torch_is_installed() -> None:
    """Restart under the Python of ddpkit launch, if no launcher has chosen this one."""
    if importlib.util.find_spec("torch") is not None or interpreter.STARTED_BY in os.environ:
        return
    try:
        if detect().launcher == "single":
            interpreter.restart(interpreter.choose(os.environ).path)
    except (LaunchError, interpreter.InterpreterError):
        return  # the checks report it


def _parse(words: Sequence[str]) -> run_checks.CheckOptions:
    parser = ArgumentParser(
        prog="ddpkit doctor",
        usage="%(prog)s [OPTION ...]\n       %(prog)s logs [OPTION ...] FILE ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.for_others = "To read the output of a job: ddpkit doctor logs FILE"
    add = parser.add_argument_group("what to check").add_argument
    add("--quick", action="store_true", help="only what takes a few seconds, for a job script")
    names = run_checks.names()
    add("--only", metavar="CHECK,...", help=f"only these checks: {', '.join(names)}")
    add("--checkpoints", metavar="FOLDER", help="where the job will write its checkpoints")
    seconds = run_checks.CheckOptions.timeout
    help_timeout = f"until a rank that does not join is an error (default: {seconds:.0f})"
    add("--timeout", type=float, default=seconds, metavar="SECONDS", help=help_timeout)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print the result as JSON")
    add("--exclude-file", metavar="FILE", help="write hosts that later jobs should avoid")

    args = parser.parse_args(words)
    only = tuple(args.only.split(",")) if args.only else ()
    unknown = [name for name in only if name not in names]
    if unknown:
        parser.error(
            f"--only: there is no check {unknown[0]!r}. Expected some of {', '.join(names)}"
        )
    if args.timeout <= 0:
        parser.error(f"--timeout is {args.timeout:g}. Expected a number of seconds above 0")
    return run_checks.CheckOptions(
        quick=args.quick,
        json=args.json,
        only=only,
        exclude_file=args.exclude_file,
        checkpoints=args.checkpoints,
        timeout=args.timeout,
    )


def _logs(words: Sequence[str]) -> int:
    """Run the subcommand `logs`; return an exit status."""
    parser = ArgumentParser(
        prog="ddpkit doctor logs",
        description="Find in the output of a job which rank failed first, on which host, what "
        "that usually means, what to do, and whether a restart helps.",
        epilog=_LOGS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="output of one job: one file, or one per rank or host; - is standard input",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(words)
    if "-" in args.files and sys.stdin is None:
        parser.error("standard input is closed. Expected the output of a job there, or its file")
    try:
        with contextlib.ExitStack() as stack:
            found = logs.diagnose(
                [
                    (sys.stdin.buffer, "standard input")
                    if name == "-"
                    else (stack.enter_context(open(name, "rb")), name)
                    for name in args.files
                ]
            )
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}. Expected the output of a job"
        if isinstance(error, FileNotFoundError):
            problem = no_such_file(error.filename, "Expected the output file of a job")
        print(f"ddpkit doctor: error: {problem}", file=sys.stderr)
        return _EXIT_WRONG_USE
    text = json.dumps(logs.as_dict(found), indent=2) if args.json else logs.describe(found)
    print_result(visible(text))
    return logs.exit_status(found)
