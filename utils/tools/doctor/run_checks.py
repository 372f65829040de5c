"""Run the checks of `doctor` on the ranks of this launch, or on this host alone.

All ranks collect facts, check by check; rank 0 draws conclusions and prints the report.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import LaunchError
from ...job import exclude_file
from ...launchers.detect import find_launcher
from ...log import print_result
from ...visible_text import visible
from ..launch.child_processes import LAUNCH_VARIABLE
from ..schedulers import current_allocation
from ..schedulers.allocation import AllocationError
from .check import Check, Exchange, Finding, Level, RankPlace, Ranks, Reported
from .checks.collective_calls import Collectives
from .checks.connections import Connections
from .checks.equality import Equality
from .checks.gpu_compute import GpuCompute
from .checks.gpu_health import Gpus
from .checks.installation import Installation
from .checks.limits import Limits
from .checks.placement import PlacementCheck
from .checks.shared_storage import StorageCheck
from .checks.torch_import import TorchImportCheck
from .doctor_exchange import EARLIER_SECONDS, Lead, Rank0Lost, join
from .networking import names_of, show
from .report import LABELS, FindingsOfCheck, Report

_LAUNCH = "launch"  # name of the check that the runner itself makes


@dataclass(frozen=True)
class CheckOptions:
    """The request on the command line, equal on all ranks.

    only: names of checks; empty: all.
    """

    quick: bool = False
    json: bool = False
    only: tuple[str, ...] = ()
    exclude_file: str | None = None
    checkpoints: str | None = None
    timeout: float = 40.0


def all_checks(options: CheckOptions) -> list[Check[Any]]:
    """Return all checks in the order in which they run."""
    return [
        PlacementCheck(),
        Equality(),
        Limits(),
        Installation(options.quick),
        StorageCheck(options.checkpoints),
        TorchImportCheck(),
        Gpus(),
        GpuCompute(),
        Connections(),
        Collectives(),
    ]


def names() -> list[str]:
    """Return the names of all checks."""
    return [check.name for check in all_checks(CheckOptions())]


def main(options: CheckOptions) -> int:
    """Run the checks; print the report on rank 0. Return 0 for good, 1 for WARNING, 2 for BAD.

    The other ranks return 0, because the job's status is rank 0's.
    """
    start = time.monotonic()
    try:
        lead = join(options.timeout, Steps(all_checks(options)).run)
    except LaunchError as error:
        return _failed_launch(error, options, start)
    except Rank0Lost as error:
        print(f"doctor: {error}", file=sys.stderr, flush=True)
        return int(Level.BAD)
    return _lead(lead, options, start) if lead else 0


def _lead(lead: Lead, options: CheckOptions, start: float) -> int:
    results = [_launch_result(lead)]
    missing: set[int] = set()
    for check in all_checks(options):
        if check.name in options.only or (not options.only and (check.quick or not options.quick)):
            result = run_check(check, lead, missing)
            if result.findings:  # otherwise the check does not apply here
                results.append(result)
    launcher = _launcher_name(lead.placement.launcher)
    report = Report(lead.everyone, launcher, results, time.monotonic() - start)
    _print(report, options)
    lead.close()
    if report.level:
        time.sleep(0.5)  # the other ranks end first, because this status would end them
    return int(report.level)


def _launch_result(lead: Lead) -> FindingsOfCheck:
    """Return the findings from the start of the ranks."""
    remedy = "Correct it, or it will slow down or confuse the start of a training"
    notes = [Finding(Level.WARNING, note, remedy) for note in lead.notes]
    ranks, hosts = len(lead.everyone), len({place.node for place in lead.everyone})
    if ranks > 1:
        message = f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} have joined"
    else:
        launcher = _launcher_name(lead.placement.launcher)
        started = f"started by {launcher}" if launcher else "started without a launcher"
        message = f"one rank on {lead.everyone[0].host}, {started}"
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
    print_result(visible(text))


# A launch that failed -----------------------------------------------------------------------------


def _failed_launch(error: Exception, options: CheckOptions, start: float) -> int:
    """Report why the ranks did not join: on rank 0, and on a rank that has not reached rank 0."""
    if getattr(error, "reported_by_rank_0", False):
        time.sleep(EARLIER_SECONDS)  # lets rank 0 end first, with its own status
        return int(Level.BAD)
    message = str(error).rstrip(".")
    if _rank():
        print(f"doctor: {LABELS[Level.BAD]} {_LAUNCH}: {message}.", file=sys.stderr, flush=True)
        time.sleep(2 * EARLIER_SECONDS)
        return int(Level.BAD)
    hosts, job_hosts = _absent_hosts(message)
    remedy = "Correct what the message names, and run doctor again with the same launcher"
    if hosts:
        message += f". Hosts of the job that this message does not name: {', '.join(hosts)}"
        remedy = (
            f"Log in to {hosts[0]}: does it respond, and can it reach rank 0's host and port? "
            "Exclude it otherwise"
        )
    finding = Finding(Level.BAD, message, remedy, hosts=tuple(hosts), exclude=True)
    results = [FindingsOfCheck(_LAUNCH, [finding])]
    report = Report((), "", results, time.monotonic() - start, job_hosts)
    _print(report, options)
    time.sleep(1)  # gives other ranks time to print their results
    return int(Level.BAD)


def _rank() -> int | None:
    """Return this process's rank; None if that is the problem."""
    try:
        return find_launcher().placement.rank
    except LaunchError:
        return None


def _absent_hosts(message: str) -> tuple[list[str], int]:
    """Return the hosts of this job where no rank has joined, as far as the message shows it.

    The second item is the number of the job's hosts; 0 if it is unknown.
    """
    if "did not join" not in message or "..." in message:  # the message does not name all of them
        return [], 0
    try:
        allocation = current_allocation(query=False)
    except AllocationError:
        return [], 0
    words = set(re.findall(r"[\w.-]+", message)) | {socket.gethostname()}
    known = {word.partition(".")[0] for word in words}
    hosts: Sequence[str] = allocation.hosts if allocation else ()
    return [host for host in hosts if host.partition(".")[0] not in known], len(set(hosts))


# One check ---------------------------------------------------------------------------------------


class Steps:
    """This rank's part in the checks."""

    def __init__(self, checks: Sequence[Check[Any]]) -> None:
        self._checks = {check.name: check for check in checks}
        self._collecting: Exchange[Any] | None = None

    def run(self, ranks: Ranks, name: str, values: list[Any] | None) -> dict[str, Any]:
        """Run the next step of a check; return its "value" for all ranks, "facts" or "error".

        values: from all ranks; None for the first step.
        """
        try:
            if values is None:
                facts = self._checks[name].collect(ranks)
                if not isinstance(facts, Generator):
                    return {"facts": dataclasses.asdict(facts)}
                self._collecting = facts
                return {"value": next(facts)}
            assert self._collecting is not None
            return {"value": self._collecting.send(values)}
        except StopIteration as end:
            return {"facts": dataclasses.asdict(end.value)}
        except Exception as error:  # a check may raise anything; the others go on
            return {"error": f"{type(error).__name__}: {error}"}


def run_check(check: Check[Any], lead: Lead, missing: set[int]) -> FindingsOfCheck:
    """Run one check on rank 0. missing: ranks reported as ended or hanging; changed here."""
    start = time.monotonic()
    members = {
        place.rank for place in lead.everyone if check.per == "rank" or place.local_rank == 0
    }
    waiting, values = members - missing, None
    reports: dict[int, dict[str, Any]] = {}
    while waiting:
        replies = lead.request(waiting, check.name, values, check.seconds)
        reports |= {rank: reply for rank, reply in replies.items() if "value" not in reply}
        waiting = replies.keys() - reports.keys()
        values = [replies.get(place.rank, {}).get("value") for place in lead.everyone]
    late = {rank for rank in members - missing - reports.keys() if not lead.has_ended(rank)}
    responding = lead.responding(late)
    problems: dict[int, str] = {}
    for place in lead.everyone:
        rank = place.rank
        if rank in responding:
            problems[rank] = f"did not finish within {check.seconds:.0f} s"
        elif rank not in missing and rank not in reports and (rank in late or lead.has_ended(rank)):
            missing.add(rank)
            problems[rank] = "ended" if lead.has_ended(rank) else "did not respond"
    found = _conclude(check, lead.everyone, reports, problems)
    return FindingsOfCheck(check.name, merge(found), time.monotonic() - start)


def _conclude(
    check: Check[Any],
    everyone: Sequence[RankPlace],
    reports: Mapping[int, Mapping[str, Any]],
    problem_of: Mapping[int, str],
) -> Iterator[Finding]:
    reported: list[Reported[Any]] = []
    errors: dict[str, list[RankPlace]] = {}
    problems: dict[str, list[RankPlace]] = {}
    for place in everyone:
        report = reports.get(place.rank, {})
        if place.rank in problem_of:
            problems.setdefault(problem_of[place.rank], []).append(place)
        elif "error" in report:
            errors.setdefault(report["error"], []).append(place)
        elif report:
            try:
                reported.append(Reported(place, check.facts(**report["facts"])))
            except TypeError as error:  # another version of the kit, which equality.py reports
                errors.setdefault(f"its code of the kit differs ({error})", []).append(place)

    nodes = {place.node for place in everyone}
    for problem, places in problems.items():
        few = 2 * len({place.node for place in places}) <= len(nodes)
        yield Finding(
            Level.BAD,
            f"{show(places)} {problem}; expected facts about {check.name}",
            "Log in there: does the host respond, and its file systems? Run doctor without it"
            if few
            else "Find out what is slow on all hosts: the file system, or other programs there?",
            tuple(place.rank for place in places),
            tuple(dict.fromkeys(place.host for place in places)),
            exclude=few,
        )
    for message, places in errors.items():
        yield Finding(
            Level.WARNING,
            f"{show(places)} could not check {check.name}: {message}",
            "Correct what the message names, and run this check again with --only " + check.name,
            tuple(place.rank for place in places),
            tuple(dict.fromkeys(place.host for place in places)),
        )
    yield from _findings(check.name, lambda: check.conclude(reported))


def _findings(name: str, conclude: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from conclude()
    except Exception as error:  # a defect in one check must not hide the others' results
        yield Finding(
            Level.WARNING,
            f"the facts about {name} could not be compared: {type(error).__name__}: {error}",
            "Report this defect of the kit with the output of --json",
        )


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that say the same about one host each."""
    alike: dict[Finding, list[Finding]] = {}
    for finding in findings:
        key = finding
        if len(finding.hosts) == 1:
            name = re.compile(rf"(?<![\w.-]){re.escape(finding.hosts[0])}(?![\w-])")
            message, remedy = (name.sub("{}", text) for text in (finding.message, finding.remedy))
            key = replace(finding, message=message, remedy=remedy, hosts=(), ranks=())
        alike.setdefault(key, []).append(finding)
    return [
        found[0]
        if len(found) == 1
        else replace(
            key,
            message=key.message.replace("{}", names_of([finding.hosts[0] for finding in found])),
            remedy=key.remedy.replace("{}", found[0].hosts[0]),
            hosts=tuple(finding.hosts[0] for finding in found),
            ranks=tuple(rank for finding in found for rank in finding.ranks),
        )
        for key, found in alike.items()
    ]
