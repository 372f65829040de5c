"""Judge a hang again from the positions that rank 0 has written.

python -m tests.faults.replay hang-20261128-113205/positions.json
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from utils.monitor.hangs.hang_cause import at_fault, describe, describe_idle, summary, unreported, waits
from utils.monitor.hangs.positions import Group, Position, Stay, Work


def load(path: Path) -> tuple[dict[int, str], dict[int, str], dict[int, Position]]:
    """Return the hosts, the ranks that had left and why, and the positions."""
    saved: dict[str, Any] = json.loads(path.read_text())
    positions = {}
    for rank, (entered, location, last, work, groups, workers, stay) in saved["positions"].items():
        positions[int(rank)] = Position(entered, location, tuple(last), Work(*work),
                                        {name: Group(*group) for name, group in groups.items()}, tuple(workers),
                                        Stay(*stay))
    hosts, departed = ({int(rank): text for rank, text in saved[name].items()} for name in ("hosts", "departed"))
    return hosts, departed, positions


def judge(path: Path) -> tuple[str, set[int]]:
    """Return the cause, and the ranks at fault."""
    hosts, departed, positions = load(path)
    running = [rank for rank in sorted(hosts) if rank not in departed]
    if not waits(positions, running) and not unreported(positions, running):
        return describe_idle(positions, hosts, departed), set(positions) if departed else set()
    return describe(positions, hosts, running), at_fault(positions, running)


if __name__ == "__main__":
    found_hosts, _, found = load(Path(sys.argv[1]))
    cause, ranks = judge(Path(sys.argv[1]))
    print(f"{cause}\nAt fault: {sorted(ranks)}\n{summary(found, found_hosts)}", end="")
