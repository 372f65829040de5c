"""Report an exception of a rank that has no process group yet, to `ddpkit launch`. No torch."""

from __future__ import annotations

import os
import signal
import socket

from .launch_protocol import EARLY, Failure, describe, send
from .launchers.rank_variables import LAUNCH_RANK

# Of a rank that torchrun has ended, or that has raised an exception, which the rank reports.
_NO_FIRST_ENDS = (0, 1, -signal.SIGTERM)


def report(error: Exception) -> None:
    """Report what has ended this rank, or a rank of this torchrun. Its traceback was printed."""
    if type(error).__name__ == "ChildFailedError":
        _report_rank_of_torchrun(error)
        return
    text, _, _ = os.environ.get("RANK", os.environ.get(LAUNCH_RANK, "")).partition("/")
    if not text.isdecimal():
        return
    rank, host = int(text), socket.gethostname()
    send(
        EARLY,
        os.environ,
        Failure(f"rank {rank} on {host} failed: {describe(error)}", "exception", rank, host),
    )


def _report_rank_of_torchrun(error: Exception) -> None:
    """Report the rank that has ended first, from torch.distributed.elastic's ChildFailedError."""
    failures = getattr(error, "failures", {})  # by rank
    ends = [(each.timestamp, rank, each.exitcode) for rank, each in failures.items()]
    first = [end for end in sorted(ends) if end[2] not in _NO_FIRST_ENDS]
    if not first:
        return
    _, rank, code = first[0]
    how, kind = f"ended with exit status {code}", "status"
    if code < 0:
        how, kind = (
            f"was ended by {signal.Signals(-code).name} (exit status {128 - code})",
            "killed",
        )
    host = socket.gethostname()
    send(EARLY, os.environ, Failure(f"rank {rank} on {host} {how}", kind, rank, host))
