"""The error of a launch that cannot start."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """This process cannot start as part of its launch. The message gives cause and remedy."""

    # Whether rank 0 reports the same error, so that this rank need not print it.
    reported_by_rank_0 = False
