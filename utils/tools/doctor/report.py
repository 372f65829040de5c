"""The results of all checks, as a table, a single line, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...launchers.detect import LAUNCHERS
from .check import Finding, Level, RankPlace

LABELS = {Level.GOOD: "good", Level.WARNING: "WARNING", Level.BAD: "BAD"}


@dataclass
class FindingsOfCheck:
    """The findings of one check. seconds: how long it took."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """The level of the most serious finding."""
        return max((finding.level for finding in self.findings), default=Level.GOOD)


@dataclass(frozen=True)
class Report:
    """The results of a run of `doctor`.

    launcher: its name, or "" without one. job_hosts: number of the job's hosts, if some have not
    joined; 0: only the ranks' hosts count.
    """

    everyone: Sequence[RankPlace]
    launcher: str
    results: Sequence[FindingsOfCheck]
    seconds: float
    job_hosts: int = 0

    @property
    def level(self) -> Level:
        """The level of the most serious finding, which is also the exit status."""
        return max((result.level for result in self.results), default=Level.GOOD)

    @property
    def hosts_to_exclude(self) -> dict[str, str]:
        """The hosts that a later job should avoid, each with the first reason.

        Empty if most hosts of a job are bad. They then share a cause, such as the file system or
        the environment, and the next job would have no better hosts.
        """
        return {} if self._most_are_bad else self.bad_hosts

    @property
    def _most_are_bad(self) -> bool:
        hosts = self.job_hosts or len({place.node for place in self.everyone})
        return hosts > 1 and 2 * len(self.bad_hosts) > hosts

    @property
    def bad_hosts(self) -> dict[str, str]:
        """The hosts that a check found bad, each with the first reason."""
        reasons: dict[str, str] = {}
        for result in self.results:
            for finding in result.findings:
                for host in finding.hosts if finding.exclude and finding.level is Level.BAD else ():
                    reasons.setdefault(host, f"{result.name}: {finding.message}")
        return reasons

    def as_text(self) -> str:
        """Return one line per check, then each finding with its remedy."""
        lines = [f"doctor: {LABELS[self.level]}: {self._scope()}"]
        width = max((len(result.name) for result in self.results), default=0)
        for result in self.results:
            label, text = LABELS[result.level], _row(result)
            lines.append(f"  {result.name:<{width}}  {label:<7}  {text}".rstrip())
        findings = [
            (result.name, finding) for result in self.results for finding in result.findings
        ]
        for name, finding in sorted(findings, key=lambda pair: -pair[1].level):
            if finding.level is Level.GOOD:
                continue
            lines += ["", f"{LABELS[finding.level]} {name}: {finding.message}."]
            if finding.remedy:
                lines.append(f"  Remedy: {finding.remedy}.")
        if self.hosts_to_exclude:
            lines += ["", f"Hosts to exclude: {','.join(self.hosts_to_exclude)}"]
        elif self._most_are_bad:
            lines += [
                "",
                f"No host is excluded: {len(self.bad_hosts)} are bad, most of the job. Look for a "
                "cause that they have in common: a file system, the network, the environment.",
            ]
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
            "ranks": [vars(place) for place in self.everyone],
            "seconds": round(self.seconds, 2),
            "exclude": list(self.hosts_to_exclude),
            "checks": [
                {
                    "name": result.name,
                    "result": LABELS[result.level].lower(),
                    "seconds": round(result.seconds, 2),
                    "findings": [_as_dict(finding) for finding in result.findings],
                }
                for result in self.results
            ],
        }
        return json.dumps(content, indent=2)

    def _scope(self) -> str:
        ranks, hosts = len(self.everyone), len({place.node for place in self.everyone})
        if not self.everyone:
            return f"the ranks did not join, {self.seconds:.1f} s"
        if not self.launcher:
            return f"one process on {self.everyone[0].host}, {self.seconds:.1f} s"
        counts = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
        commands = {each.name: each.command for each in LAUNCHERS}
        command = commands.get(self.launcher) or self.launcher
        return f"{counts}, started by {command}, {self.seconds:.1f} s"


def _row(result: FindingsOfCheck) -> str:
    """Return the table's text about a check."""
    if result.level is Level.GOOD:
        return "; ".join(finding.message for finding in result.findings)
    count = sum(finding.level is not Level.GOOD for finding in result.findings)
    return f"{count} finding{'s' * (count > 1)}, see below"


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {**vars(finding), "level": LABELS[finding.level].lower()}
