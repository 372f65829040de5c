"""The results of all checks, as a table, as one line, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .check import Finding, Level, RankPlace

LABELS = {Level.GOOD: "good", Level.WARNING: "WARNING", Level.BAD: "BAD"}


@dataclass
class FindingsOfCheck:
    """The findings of one check; seconds: how long it took."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """That of the most serious finding."""
        return max((one.level for one in self.findings), default=Level.GOOD)


@dataclass(frozen=True)
class Report:
    """The results of a run of `doctor`. launcher: its name, or "" without one."""

    everyone: Sequence[RankPlace]
    launcher: str
    results: Sequence[FindingsOfCheck]
    seconds: float

    @property
    def level(self) -> Level:
        """That of the most serious finding; it is the exit status."""
        return max((one.level for one in self.results), default=Level.GOOD)

    @property
    def hosts_to_exclude(self) -> dict[str, str]:
        """The hosts that a later job should avoid, each with the first reason."""
        reasons: dict[str, str] = {}
        for one in self.results:
            for finding in one.findings:
                for host in finding.hosts if finding.exclude and finding.level is Level.BAD else ():
                    reasons.setdefault(host, f"{one.name}: {finding.message}")
        return reasons

    def as_text(self) -> str:
        """Return one line per check, then each finding with its remedy."""
        lines = [f"doctor: {LABELS[self.level]}: {self._scope()}"]
        width = max((len(one.name) for one in self.results), default=0)
        for one in self.results:
            label, text = LABELS[one.level], _row(one)
            lines.append(f"  {one.name:<{width}}  {label:<7}  {text}".rstrip())
        findings = [(one.name, finding) for one in self.results for finding in one.findings]
        for name, finding in sorted(findings, key=lambda pair: -pair[1].level):
            if finding.level is Level.GOOD:
                continue
            lines += ["", f"{LABELS[finding.level]} {name}: {finding.message}."]
            if finding.remedy:
                lines.append(f"  Remedy: {finding.remedy}.")
        if self.hosts_to_exclude:
            lines += ["", f"Hosts to exclude: {','.join(self.hosts_to_exclude)}"]
        return "\n".join(lines)

    def as_line(self) -> str:
        """Return one line, for a run without findings."""
        return f"doctor: {LABELS[self.level]}: {self._scope()}, {len(self.results)} checks"

    def as_json(self) -> str:
        """Return the whole report."""
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
                    "findings": [_as_dict(finding) for finding in one.findings],
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


def _row(result: FindingsOfCheck) -> str:
    """Return what the table says about a check."""
    if result.level is Level.GOOD:
        return "; ".join(one.message for one in result.findings)
    count = sum(one.level is not Level.GOOD for one in result.findings)
    return f"{count} finding{'s' * (count > 1)}, see below"


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {**vars(finding), "level": LABELS[finding.level].lower()}
