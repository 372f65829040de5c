"""The parent processes of this one, as /proc tells. Standard library only, no torch.

Not here: which of them is a launcher (launchers.py).
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator


def parent_commands(pids: Iterable[int] | None = None) -> Iterator[str]:
    """Command lines of the parent processes, nearest first, as /proc tells; nothing where there is no /proc.

    pids: those of the parent processes to look at; None for all.
    """
    for pid in parent_pids() if pids is None else pids:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
        except OSError:
            return
        program = os.path.basename(words[0]) if words[0].startswith("/") else words[0]  # a folder may contain spaces
        yield " ".join([program, *words[1:]])


def parent_pids() -> Iterator[int]:
    """Process ids of the parent processes, nearest first."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])  # "12 (a b) S 7 ...": the name may hold anything
        except OSError:
            return


def start_time(pid: int) -> str:
    """When a process was started, in clock ticks since the host's start; "0" where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return "0"
