"""The parent processes of this one, as /proc tells. Standard library only, no torch.

Not here: which of them is a launcher (launchers.py).
"""
from __future__ import annotations

import os
from collections.abc import Iterator


def parent_commands() -> Iterator[str]:
    """Command lines of the parent processes, nearest first, as /proc tells; nothing where there is no /proc."""
    for pid in parent_pids():
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
