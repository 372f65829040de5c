"""The command line of `doctor`: the checks, and the subcommand `logs`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from ...launch_error import LaunchError
from ...launchers.detect import detect
from .. import interpreter
from ..arguments import ArgumentParser
from . import doctor_cli as cli
from . import live

_EXIT_SECONDS = 5.0
_DESCRIPTION = """\
Find out what is wrong with a cluster, a job or a launch.

doctor.py                              check a login node or laptop
launch.py scripts/doctor.py            check all hosts of a job; also under srun, mpiexec, torchrun
launch.py scripts/doctor.py --quick    the same in seconds, at the top of a job script
submit.py doctor --nodes 2             submit these checks as a job
doctor.py logs slurm-4711.out          find out why a job failed; see doctor.py logs --help

Exit status of the checks: 0 good, 1 warning, 2 bad, others: doctor itself failed. Each finding is
printed with its remedy.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks, or `logs`; return an exit status.

    words: the command line without the command; None: that of this process.
    """
    words = sys.argv[1:] if words is None else list(words)
    try:
        if words[:1] == ["logs"]:
            return cli.main(words)
        options = _parse(words)
        _restart_where_torch_is_installed()
        status = live.main(options)
    except Exception:  # Python's own status, 1, would read as a warning or a cause
        traceback.print_exc()
        status = os.EX_SOFTWARE
    # A check that hangs must not keep this process. Otherwise it ends as usual, since a launcher's
    # name service has to be closed.
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()
    return status


def _restart_where_torch_is_installed() -> None:
    """Restart under the Python that launch.py would choose, if no launcher has chosen this one."""
    if importlib.util.find_spec("torch") is not None or interpreter.STARTED_BY in os.environ:
        return
    try:
        if detect().launcher == "single":
            interpreter.restart(interpreter.choose(os.environ).path)
    except (LaunchError, interpreter.InterpreterError):
        return  # the checks report it


def _parse(words: Sequence[str]) -> live.Options:
    parser = ArgumentParser(
        prog="doctor.py",
        usage="%(prog)s [OPTION ...]\n       %(prog)s logs [OPTION ...] FILE ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to check").add_argument
    add("--quick", action="store_true", help="only what takes a few seconds, for a job script")
    names = live.names()
    add("--only", metavar="CHECK,...", help=f"only these checks: {', '.join(names)}")
    add("--checkpoints", metavar="FOLDER", help="where the job will write its checkpoints")
    add("--data", metavar="FOLDER", help="where the training data are")
    help_expect = "bus bandwidth that all-reduces should reach; below half of it is a warning"
    add("--expect", type=float, metavar="GB/S", help=help_expect)
    seconds = live.Options.timeout
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
    if args.expect is not None and not args.expect > 0:
        parser.error(f"--expect is {args.expect:g}. Expected a bus bandwidth in GB/s above 0")
    return live.Options(
        quick=args.quick,
        json=args.json,
        only=only,
        exclude_file=args.exclude_file,
        checkpoints=args.checkpoints,
        data=args.data,
        expect=args.expect * 1e9 if args.expect else None,
        timeout=args.timeout,
    )
