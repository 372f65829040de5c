"""Hold SIGUSR1 and SIGUSR2 from the start of a rank until its StopSignal exists. No torch.

They would end a rank that still imports torch. launch.py blocks them before exec(), so that they
stay pending. The import of this package then installs a handler that remembers them.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from .host import process

HELD = (signal.SIGUSR1, signal.SIGUSR2)
VARIABLE = "DDPKIT_SIGNALS_BLOCKED"  # set by launch.py where it blocks the signals of a rank

_received: list[signal.Signals] = []


def block() -> None:
    """Block HELD right before exec(): they stay pending until hold() in the new program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def hold() -> None:
    """Remember HELD from now on, pending ones included. Other handlers stay as they are."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        return

    for number in HELD:
        if signal.getsignal(number) == signal.SIG_DFL and not _has_handler(number):
            signal.signal(number, remember)
    if os.environ.pop(VARIABLE, None):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def remember(number: int, frame: FrameType | None) -> None:
    """Handle a signal: keep it for the next StopSignal of this process."""
    if signal.Signals(number) not in _received:
        _received.append(signal.Signals(number))


def take() -> list[signal.Signals]:
    """Return the signals held so far, each once."""
    taken, _received[:] = _received[:], []
    return taken


def release() -> None:
    """Give HELD their default action again; those received so far end this process by default."""
    for number in HELD:
        if signal.getsignal(number) == remember:
            signal.signal(number, signal.SIG_DFL)
    for number in take():
        os.kill(os.getpid(), number)


def _has_handler(number: int) -> bool:
    """Return whether a handler is installed, also one unknown to Python, as by faulthandler."""
    return bool(process.caught_signals() >> (number - 1) & 1)
