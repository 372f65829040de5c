"""Run checks in order on all ranks, and conclude on rank 0."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .check import Check, Finding, Level, RankPlace, Ranks, Reported
from .doctor_exchange import Gathered
from .join_doctors import Joined
from .peers import names_of, show

_LATE_SECONDS = 3.0  # that the report of a hanging check may take


@dataclass
class Result:
    """The findings of one check; seconds: how long it took."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """That of the most serious finding."""
        return max((one.level for one in self.findings), default=Level.GOOD)


def run_check(check: Check[Any], joined: Joined, missing: set[int]) -> Result:
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
    result = Result(check.name)
    if joined.me.rank == 0:
        members = _members(check, joined.everyone)
        found = _conclude(check, joined.everyone, members, gathered, missing)
        result.findings = merge(found)
    result.seconds = time.monotonic() - start
    return result


def _members(check: Check[Any], everyone: Sequence[RankPlace]) -> list[int]:
    """Return the ranks that collect."""
    return [one.rank for one in everyone if check.per == "rank" or one.local_rank == 0]


def _collect(check: Check[Any], joined: Joined, start: float) -> dict[str, Any]:
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
