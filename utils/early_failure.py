"""Report an exception of a rank that has no process group yet, to `ddpkit launch`. No torch."""

from __future__ import annotations

import os
import socket

from .launch_report import EARLY, Failure, describe, send
from .launchers.rank_variables import LAUNCH_RANK


def report(error: Exception) -> None:
    """Report what has ended this rank. Its traceback was printed."""
    text, _, _ = os.environ.get("RANK", os.environ.get(LAUNCH_RANK, "")).partition("/")
    if not text.isdecimal():
        return
    rank, host = int(text), socket.gethostname()
    send(
        EARLY,
        os.environ,
        Failure(f"rank {rank} on {host} failed: {describe(error)}", "exception", rank, host),
    )
