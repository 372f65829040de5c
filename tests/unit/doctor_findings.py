"""What the checks of `doctor` conclude from given facts."""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from utils.tools.doctor.check import Check, Exchange, Finding, Level, RankPlace, Reported


def places(*hosts: str) -> list[RankPlace]:
    """The ranks 0, 1, ... on these hosts."""
    nodes = list(dict.fromkeys(hosts))
    return [RankPlace(rank, host, nodes.index(host), hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def conclude(check: Check[Any], facts: Sequence[Any], where: Sequence[RankPlace] = ()) -> list[Finding]:
    """What rank 0 concludes when the facts have travelled as JSON, by default of one rank on each of h1, h2, ..."""
    where = where or places(*(f"h{number}" for number in range(1, len(facts) + 1)))
    travelled = [check.facts(**json.loads(json.dumps(asdict(one)))) for one in facts]
    return list(check.conclude([Reported(place, one) for place, one in zip(where, travelled, strict=True)]))


def problems(check: Check[Any], facts: Sequence[Any], where: Sequence[RankPlace] = ()) -> list[Finding]:
    return [finding for finding in conclude(check, facts, where) if finding.level is not Level.GOOD]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def exchanged(runs: Sequence[Exchange[Any]],
              during: Callable[[list[Any]], list[Any]] = lambda values: values) -> list[Any]:
    """What these generators return, one for each rank. during: what each yield returns, given the values of all."""
    values = [next(run) for run in runs]
    found: list[Any] = []
    while not found:
        sent, values = during(values), []
        for run in runs:
            try:
                values.append(run.send(sent))
            except StopIteration as end:
                found.append(end.value)
    return found
