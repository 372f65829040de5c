"""Let DataLoader workers write their stacks when their rank asks; worker_lines.py asks. No torch.

A worker forked by multiprocessing makes faulthandler write its stack to a private file on a signal.
The rank finds that file among the worker's open files; its name contains the signal number. A
process that has become another program, or has closed its files, has no such file and gets no
signal. The handler runs no Python and restarts system calls.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
from multiprocessing import util

from ..host import process
from ..launch_protocol import may_have

_NAME = "ddpkit-stack"
FILE = re.compile(rf"{_NAME}-(\d+)\b")  # matches a link: "/memfd:ddpkit-stack-57 (deleted)"


class _Setup:
    """The object that multiprocessing passes to _begin_worker() in each child that it forks."""

    registered = False
    file = -1  # file descriptor for this process's stack; -1: none


_setup = _Setup()


def register() -> None:
    """Let the workers that this rank forks from now on write their stacks when it asks."""
    if may_have("workers") and not _setup.registered:
        _setup.registered = True
        util.register_after_fork(_setup, _begin_worker)


def _begin_worker(setup: _Setup) -> None:
    with contextlib.suppress(OSError, AttributeError, LookupError, RuntimeError, ValueError):
        number = _unused_signal()
        if setup.file >= 0:  # inherited from the worker that forked this one
            number = int(FILE.findall(os.readlink(f"/proc/self/fd/{setup.file}"))[0])
            os.close(setup.file)
            setup.file = -1
        if number is not None:
            setup.file = _private_file(f"{_NAME}-{number}")
            faulthandler.register(number, file=setup.file, all_threads=False)


def _unused_signal() -> int | None:
    """Return a real-time signal that this process neither handles nor ignores nor blocks."""
    masks = process.status(os.getpid())  # getsignal() does not know the handlers of libraries
    used = 0
    for name in ("SigCgt", "SigIgn", "SigBlk"):
        used |= int(masks[name], 16) if name in masks else -1
    numbers = range(signal.SIGRTMAX - 7, signal.SIGRTMIN + 7, -1)
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


def _private_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # Pythons built for old systems
    file, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    os.unlink(path)
    return file
