"""The error of a launch that cannot start."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """This process cannot start as part of its launch. The message gives cause and remedy.

    rank, host: at fault; None where it is not one, or unknown. reported_by_rank_0: rank 0 reports
    the same error, so that this rank need not print it.
    """

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.host = rank, host
        self.reported_by_rank_0 = False
