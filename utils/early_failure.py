"""Report an exception of a rank that has no process group yet, to `ddpkit launch`. No torch."""

from __future__ import annotations

import os
import socket

from .launch_report import EARLY, Failure, send
from .launchers.rank_variables import LAUNCH_RANK


def report(error: Exception) -> None:
    """Report what has ended this rank. Its traceback was printed."""
    text, _, _ = os.environ.get("RANK", os.environ.get(LAUNCH_RANK, "")).partition("/")
    if not text.isdecimal():
        return
    rank, host = int(text), socket.gethostname()
    name, what = type(error).__name__, str(error).strip()
    description = (f"{name}: {what}" if what else name).splitlines()[0][:300]
    send(
        EARLY,
        os.environ,
        Failure(f"rank {rank} on {host} failed: {description}", "exception", rank, host),
    )
