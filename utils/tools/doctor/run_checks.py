"""Run the checks of `doctor` on the ranks of this launch, or on this host alone.

All ranks collect facts, check by check; rank 0 concludes and prints the report.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...job import exclude_file
from ...launch_error import LaunchError
from ...launchers.detect import find_launcher
from ...launchers.launcher import shown
from ...launchers.rank_variables import RANK_VARIABLES
from ...log import print_result
from ..launch.child_processes import LAUNCH_VARIABLE
from ..schedulers import current_allocation
from ..schedulers.allocation import AllocationError
from .check import Check, Finding, Level, RankPlace, Ranks, Reported
from .checks.collective_calls import Collectives
from .checks.connections import Connections
from .checks.equality import Equality
from .checks.gpu_health import Gpus
from .checks.installation import Installation
from .checks.limits import Limits
from .checks.names import Names
from .checks.placement import PlacementCheck
from .checks.shared_storage import StorageCheck
from .checks.torch_import import TorchImportCheck
from .doctor_exchange import EARLIER_SECONDS, Gathered, JoinedDoctor, Rank0Lost, join
from .peers import names_of, show
from .report import LABELS, FindingsOfCheck, Report, fold

_LAUNCH = "launch"  # the name of the check that the runner itself does
_LATE_SECONDS = 3.0  # that the report of a hanging check may take


@dataclass(frozen=True)
class CheckOptions:
    """What the command line requests, the same on all ranks.

    only: names of checks; empty: all.
    """

    quick: bool = False
    json: bool = False
    only: tuple[str, ...] = ()
    exclude_file: str | None = None
    checkpoints: str | None = None
    data: str | None = None
    timeout: float = 40.0


def all_checks(options: CheckOptions) -> list[Check[Any]]:
    """Return every check, in the order in which they run."""
    return [
        PlacementCheck(),
        Equality(),
        Limits(),
        Installation(options.quick),
        StorageCheck(options.checkpoints, options.data),
        TorchImportCheck(),
        Gpus(),
        Names(),
        Connections(),
        Collectives(),
    ]


def names() -> list[str]:
    """Return the names of all checks."""
    return [check.name for check in all_checks(CheckOptions())]


def main(options: CheckOptions) -> int:
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


def _run(joined: JoinedDoctor, options: CheckOptions, start: float) -> int:
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


def _launch_result(joined: JoinedDoctor) -> FindingsOfCheck:
    """Return what the start of the ranks has shown."""
    remedy = "Correct it, or it will slow down or confuse the start of a training"
    notes = [Finding(Level.WARNING, note, remedy) for note in joined.notes]
    ranks, hosts = len(joined.everyone), len({one.node for one in joined.everyone})
    alone = f"no launcher has started this process on {joined.me.host}"
    message = (
        f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} have joined" if ranks > 1 else alone
    )
    return FindingsOfCheck(_LAUNCH, notes or [Finding(Level.GOOD, message)])


def _launcher_name(name: str) -> str:
    """Return the name of the launcher for the report; "" without one."""
    if name == "env" and os.environ.get(LAUNCH_VARIABLE):
        return "ddpkit launch"
    return "" if name == "single" else name


def _print(report: Report, options: CheckOptions) -> None:
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


def _failed_launch(error: Exception, options: CheckOptions, start: float) -> int:
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
    report = Report((), "", [FindingsOfCheck(_LAUNCH, [finding])], time.monotonic() - start)
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


# One check ---------------------------------------------------------------------------------------


def run_check(check: Check[Any], joined: JoinedDoctor, missing: set[int]) -> FindingsOfCheck:
    """Run one check. The result has findings on rank 0 only. Raises Rank0Lost.

    missing: ranks that an earlier check has reported as ended or hanging; changed.
    """
    start = time.monotonic()
    report = None
    if check.per == "rank" or joined.me.local_rank == 0:
        report = _collect(check, joined, start)
    # Ranks without a part in the check wait, too: the next one may measure something.
    seconds = max(0.0, start + check.seconds - time.monotonic()) + _LATE_SECONDS
    gathered = joined.gather(f"{check.name}/end", {"report": report}, seconds)
    result = FindingsOfCheck(check.name)
    if joined.me.rank == 0:
        members = _members(check, joined.everyone)
        found = _conclude(check, joined.everyone, members, gathered, missing)
        result.findings = merge(found)
    result.seconds = time.monotonic() - start
    return result


def _members(check: Check[Any], everyone: Sequence[RankPlace]) -> list[int]:
    """Return the ranks that collect."""
    return [one.rank for one in everyone if check.per == "rank" or one.local_rank == 0]


def _collect(check: Check[Any], joined: JoinedDoctor, start: float) -> dict[str, Any]:
    """Return this rank's report: {"facts": ...}, {"error": ...}, or {} if collect() hangs."""
    members = _members(check, joined.everyone) if check.per == "host" else None
    report: dict[str, Any] = {}

    def all_gather(topic: str, value: Any) -> list[Any]:
        left = max(0.5, start + check.seconds - time.monotonic())
        # A part of the time: this rank needs the rest to finish without the missing ranks.
        return joined.gather(f"{check.name}/{topic}", value, 0.7 * left, members).values

    def collect() -> None:
        try:
            facts = check.collect(Ranks(joined.me, joined.everyone, all_gather, joined.address))
            report["facts"] = dataclasses.asdict(facts)
        except Exception as error:  # of any check: the others go on
            report["error"] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=collect, daemon=True, name=f"check {check.name}")
    thread.start()
    thread.join(check.seconds)
    return dict(report)


def _conclude(
    check: Check[Any],
    everyone: Sequence[RankPlace],
    members: Sequence[int],
    gathered: Gathered,
    missing: set[int],
) -> Iterator[Finding]:
    reported: list[Reported[Any]] = []
    errors: dict[str, list[RankPlace]] = {}
    problems: dict[str, list[RankPlace]] = {}
    for place in everyone:
        value = gathered.values[place.rank]
        if value is None and place.rank in missing:
            continue
        if value is None:
            missing.add(place.rank)
            problem = "ended" if place.rank in gathered.ended else "did not respond"
            problems.setdefault(problem, []).append(place)
        elif place.rank not in members:
            continue
        elif "facts" in value["report"]:
            try:
                reported.append(Reported(place, check.facts(**value["report"]["facts"])))
            except TypeError as error:  # other code of the kit, which equality.py reports
                errors.setdefault(f"its code of the kit differs ({error})", []).append(place)
        elif "error" in value["report"]:
            errors.setdefault(value["report"]["error"], []).append(place)
        else:
            problem = f"did not finish within {check.seconds:.0f} s"
            problems.setdefault(problem, []).append(place)

    nodes = {place.node for place in everyone}
    for problem, places in problems.items():
        few = 2 * len({one.node for one in places}) <= len(nodes)
        yield Finding(
            Level.BAD,
            f"{show(places)} {problem}; expected facts about {check.name}",
            "Log in there: does the host respond, and its file systems? Run doctor without it"
            if few
            else "Find out what is slow on all hosts: the file system, or other programs there?",
            tuple(one.rank for one in places),
            tuple(dict.fromkeys(one.host for one in places)),
            exclude=few,
        )
    for message, places in errors.items():
        yield Finding(
            Level.WARNING,
            f"{show(places)} could not check {check.name}: {message}",
            "Correct what the message names, and run this check again with --only " + check.name,
            tuple(one.rank for one in places),
            tuple(dict.fromkeys(one.host for one in places)),
        )
    yield from _findings(check.name, lambda: check.conclude(reported))


def _findings(name: str, conclude: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from conclude()
    except Exception as error:  # a defect of one check must not hide the results of the others
        yield Finding(
            Level.WARNING,
            f"the facts about {name} could not be compared: {type(error).__name__}: {error}",
            "Report this defect of the kit with the output of --json",
        )


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that say the same of one host each."""
    alike: dict[Finding, list[Finding]] = {}
    for one in findings:
        key = one
        if len(one.hosts) == 1:
            name = re.compile(rf"(?<![\w.-]){re.escape(one.hosts[0])}(?![\w-])")
            message, remedy = (name.sub("{}", text) for text in (one.message, one.remedy))
            key = replace(one, message=message, remedy=remedy, hosts=(), ranks=())
        alike.setdefault(key, []).append(one)
    return [
        found[0]
        if len(found) == 1
        else replace(
            key,
            message=key.message.replace("{}", names_of([one.hosts[0] for one in found])),
            remedy=key.remedy.replace("{}", found[0].hosts[0]),
            hosts=tuple(one.hosts[0] for one in found),
            ranks=tuple(rank for one in found for rank in one.ranks),
        )
        for key, found in alike.items()
    ]
