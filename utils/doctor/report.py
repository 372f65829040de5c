"""The results of all checks, as a table, as one line, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .check import Finding, Level, RankPlace
from .run import Result

LABELS = {Level.GOOD: "good", Level.WARNING: "WARNING", Level.BAD: "BAD"}


def causes(results: Sequence[Result]) -> list[tuple[str, Finding, int]]:
    """Return each finding that is not good, with its check, and the index of what explains it.

    That of a finding which no other one explains is its own.
    """
    found = [(one.name, finding) for one in results for finding in one.findings]
    found = [(name, finding) for name, finding in found if finding.level is not Level.GOOD]
    parents = list(range(len(found)))
    for index, (_, finding) in enumerate(found):
        for other, (name, cause) in enumerate(found):
            is_cause = other != index and {name, cause.subject} & set(finding.follows)
            apart = finding.hosts and cause.hosts and not set(finding.hosts) & set(cause.hosts)
            if is_cause and not apart and _root(parents, other) != index:
                parents[index] = other
                break
    return [(*one, _root(parents, index)) for index, one in enumerate(found)]


def _root(parents: Sequence[int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index


@dataclass(frozen=True)
class Report:
    """The results of a run of `doctor`. launcher: its name, or "" without one."""

    everyone: Sequence[RankPlace]
    launcher: str
    results: Sequence[Result]
    seconds: float

    @property
    def level(self) -> Level:
        """That of the most serious finding; it is the exit status."""
        return max((one.level for one in self.results), default=Level.GOOD)

    @property
    def hosts_to_exclude(self) -> dict[str, str]:
        """The hosts that a later job should avoid, each with the first reason."""
        reasons: dict[str, str] = {}
        for index, (name, finding, cause) in enumerate(causes(self.results)):
            for host in finding.hosts if finding.exclude and cause == index else ():
                reasons.setdefault(host, f"{name}: {finding.message}")
        return reasons

    def as_text(self) -> str:
        """Return one line per check, then each cause with its remedy, and what follows from it."""
        lines = [f"doctor: {LABELS[self.level]}: {self._scope()}"]
        width = max((len(one.name) for one in self.results), default=0)
        for one in self.results:
            label, text = LABELS[one.level], _row(one)
            lines.append(f"  {one.name:<{width}}  {label:<7}  {text}".rstrip())
        found = causes(self.results)
        order = sorted(range(len(found)), key=lambda index: -found[index][1].level)
        for index in (one for one in order if found[one][2] == one):
            name, finding, _ = found[index]
            lines += ["", f"{LABELS[finding.level]} {name}: {finding.message}."]
            if finding.remedy:
                lines.append(f"  Remedy: {finding.remedy}.")
            lines += [
                f"  It explains: {LABELS[found[one][1].level]} {found[one][0]}: "
                f"{found[one][1].message}."
                for one in order
                if one != index and found[one][2] == index
            ]
        if self.hosts_to_exclude:
            lines += ["", f"Hosts to exclude: {','.join(self.hosts_to_exclude)}"]
        return "\n".join(lines)

    def as_line(self) -> str:
        """Return one line, for a run without findings."""
        return f"doctor: {LABELS[self.level]}: {self._scope()}, {len(self.results)} checks"

    def as_json(self) -> str:
        """Return the whole report. follows: the message of the finding that explains another."""
        found = causes(self.results)
        explained = {
            id(finding): found[cause][1].message
            for index, (_, finding, cause) in enumerate(found)
            if cause != index
        }
        content: dict[str, Any] = {
            "result": LABELS[self.level].lower(),
            "exit_status": int(self.level),
            "launcher": self.launcher,
            "ranks": [vars(one) for one in self.everyone],
            "seconds": round(self.seconds, 2),
            "exclude": list(self.hosts_to_exclude),
            "checks": [
                {
                    "name": one.name,
                    "result": LABELS[one.level].lower(),
                    "seconds": round(one.seconds, 2),
                    "findings": [
                        {
                            **vars(finding),
                            "level": LABELS[finding.level].lower(),
                            "follows": explained.get(id(finding), ""),
                        }
                        for finding in one.findings
                    ],
                }
                for one in self.results
            ],
        }
        return json.dumps(content, indent=2)

    def _scope(self) -> str:
        ranks, hosts = len(self.everyone), len({one.node for one in self.everyone})
        if not self.everyone:
            return f"the ranks did not join, {self.seconds:.1f} s"
        if not self.launcher:
            return f"one process on {self.everyone[0].host}, {self.seconds:.1f} s"
        counts = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
        return f"{counts}, started by {self.launcher}, {self.seconds:.1f} s"


def _row(result: Result) -> str:
    """Return what the table says about a check."""
    if result.level is Level.GOOD:
        return "; ".join(one.message for one in result.findings)
    count = sum(one.level is not Level.GOOD for one in result.findings)
    return f"{count} finding{'s' * (count > 1)}, see below"
