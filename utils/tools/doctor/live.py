"""Run the checks of `doctor` on the ranks of this launch, or on this host alone."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...job import current_allocation, exclude_file
from ...job.allocation import AllocationError
from ...launch_error import LaunchError
from ...launchers.detect import find_launcher
from ...launchers.launcher import shown
from ...launchers.rank_variables import RANK_VARIABLES
from ...log import print_result
from ..launch.child_processes import LAUNCH_VARIABLE
from .check import Check, Finding, Level
from .checks.collective_calls import Collectives
from .checks.connections import Connections
from .checks.equality import Equality
from .checks.gpu_health import Gpus
from .checks.installation import Installation
from .checks.limits import Limits
from .checks.names import Names
from .checks.placement import Placement
from .checks.shared_storage import StorageCheck
from .checks.torch_import import TorchImportCheck
from .doctor_exchange import Rank0Lost
from .join_doctors import EARLIER_SECONDS, Joined, join
from .report import LABELS, Report, fold
from .run_checks import Result, run_check

_LAUNCH = "launch"  # the name of the check that the runner itself does


@dataclass(frozen=True)
class Options:
    """What the command line requests, the same on all ranks.

    only: names of checks; empty: all. expect: bus bandwidth of all-reduces, in bytes per second.
    """

    quick: bool = False
    json: bool = False
    only: tuple[str, ...] = ()
    exclude_file: str | None = None
    checkpoints: str | None = None
    data: str | None = None
    expect: float | None = None
    timeout: float = 40.0


def all_checks(options: Options) -> list[Check[Any]]:
    """Return every check, in the order in which they run."""
    return [
        Placement(),
        Equality(),
        Limits(),
        Installation(options.quick),
        StorageCheck(options.checkpoints, options.data),
        TorchImportCheck(),
        Gpus(),
        Names(),
        Connections(),
        Collectives(options.expect),
    ]


def names() -> list[str]:
    """Return the names of all checks."""
    return [check.name for check in all_checks(Options())]


def main(options: Options) -> int:
    """Run the checks; print the report on rank 0. Return 0 for good, 1 for WARNING, 2 for BAD.

    The other ranks return 0, because rank 0's status is that of the job.
    """
    start = time.monotonic()
    try:
        joined = join(options.timeout)
    except (LaunchError, Rank0Lost) as error:
        return _failed_launch(error, options, start)
    try:
        return _run(joined, options, start)
    except Rank0Lost as error:
        print(f"doctor: {error}", file=sys.stderr, flush=True)
        return int(Level.BAD)


def _run(joined: Joined, options: Options, start: float) -> int:
    results = [_launch_result(joined)]
    missing: set[int] = set()
    for check in all_checks(options):
        if check.name in options.only or (not options.only and (check.quick or not options.quick)):
            result = run_check(check, joined, missing)
            if result.findings:  # otherwise the check does not apply here
                results.append(result)

    status = 0
    if joined.me.rank == 0:
        launcher = _launcher_name(joined.placement.launcher)
        fold(results)
        report = Report(joined.everyone, launcher, results, time.monotonic() - start)
        _print(report, options)
        status = int(report.level)
    joined.gather("end", None, 60.0)
    joined.close()
    if status:
        time.sleep(0.5)  # the other ranks end first: this status would end them
    return status


def _launch_result(joined: Joined) -> Result:
    """Return what the start of the ranks has shown."""
    remedy = "Correct it, or it will slow down or confuse the start of a training"
    notes = [Finding(Level.WARNING, note, remedy) for note in joined.notes]
    ranks, hosts = len(joined.everyone), len({one.node for one in joined.everyone})
    alone = f"no launcher has started this process on {joined.me.host}"
    message = (
        f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} have joined" if ranks > 1 else alone
    )
    return Result(_LAUNCH, notes or [Finding(Level.GOOD, message)])


def _launcher_name(name: str) -> str:
    """Return the name of the launcher for the report; "" without one."""
    if name == "env" and os.environ.get(LAUNCH_VARIABLE):
        return "launch.py"
    return "" if name == "single" else name


def _print(report: Report, options: Options) -> None:
    if options.exclude_file is not None and report.hosts_to_exclude:
        try:
            exclude_file.add(options.exclude_file, report.hosts_to_exclude)
        except OSError as error:
            print(f"doctor: {options.exclude_file}: {error.strerror}", file=sys.stderr, flush=True)
    if options.json:
        text = report.as_json()
    elif options.quick and report.level is Level.GOOD:
        text = report.as_line()
    else:
        text = report.as_text()
    print_result(text)


# A launch that failed -----------------------------------------------------------------------------


def _failed_launch(error: Exception, options: Options, start: float) -> int:
    """Report why the ranks did not join: on rank 0, and on a rank that has not reached it."""
    if getattr(error, "reported_by_rank_0", False):
        time.sleep(EARLIER_SECONDS)  # rank 0 ends first, with its own status
        return int(Level.BAD)
    rank, set_by_hand = _rank()
    message = str(error).rstrip(".")
    if rank and not set_by_hand:
        print(f"doctor: {LABELS[Level.BAD]} {_LAUNCH}: {message}.", file=sys.stderr, flush=True)
        time.sleep(2 * EARLIER_SECONDS)
        return int(Level.BAD)
    hosts = _absent_hosts(message)
    remedy = "Correct what the message names, and run doctor again with the same launcher"
    if hosts:
        message += f". Hosts of the job that this message does not name: {', '.join(hosts)}"
        remedy = (
            f"Log in to {hosts[0]}: does it respond, and can it reach rank 0's host and port? "
            "Exclude it otherwise"
        )
    elif set_by_hand:
        message = f"{set_by_hand} are set, and no launcher has set them: {message}"
        remedy = (
            "If they are left over from another launch or a start-up file of the shell, unset "
            "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT. Otherwise start all ranks"
        )
    finding = Finding(Level.BAD, message, remedy, hosts=tuple(hosts), exclude=True)
    report = Report((), "", [Result(_LAUNCH, [finding])], time.monotonic() - start)
    _print(report, options)
    time.sleep(1)  # the other ranks print what they have seen
    return int(Level.BAD)


def _rank() -> tuple[int | None, str]:
    """Return this process's rank, and the variables that set it if no launcher did.

    The rank is None where that is the problem.
    """
    by_hand = shown(os.environ, RANK_VARIABLES)
    if os.environ.get(LAUNCH_VARIABLE):
        by_hand = ""
    try:
        detection = find_launcher()
    except LaunchError:
        return None, by_hand
    return detection.placement.rank, "" if detection.launcher.starts_processes else by_hand


def _absent_hosts(message: str) -> list[str]:
    """Return the hosts of this job where no rank has joined, as far as the message shows it."""
    if "did not join" not in message or "..." in message:  # not all of them are named
        return []
    try:
        allocation = current_allocation(query=False)
    except AllocationError:
        return []
    words = set(re.findall(r"[\w.-]+", message)) | {socket.gethostname()}
    known = {word.partition(".")[0] for word in words}
    hosts: Sequence[str] = allocation.hosts if allocation else ()
    return [host for host in hosts if host.partition(".")[0] not in known]
