"""Make what watches for hangs. Loaded with it, a little after the start: it imports much."""

from __future__ import annotations

import functools
import os

import torch

from ..launch_protocol import notice_after
from ..log import get_logger
from . import collectives
from .hang_report import write_hang_report  # now: the file system may be what fails
from .monitor import OwnRank
from .positions import HangWatch, time_before

_log = get_logger(__name__)


def make_watch(
    own: OwnRank,
    rank: int,
    world_size: int,
    backend: str,
    seconds: float,
    *,
    before_torch: bool = False,
    ends_itself: bool = False,
) -> HangWatch:
    """Return what decides whether the ranks hang, and let `own` write its report.

    seconds: without progress, until a hang. before_torch: they are torch's own time limit, and
    the ranks end before it. ends_itself: see HangWatch.
    """
    own.write_report = functools.partial(write_hang_report, rank)

    has_recorder = collectives.has_recorder()
    if not has_recorder and not before_torch and rank == 0:
        _log.warning(
            f"torch {torch.__version__} does not record the collectives of {backend} "
            f"(TORCH_FR_BUFFER_SIZE={os.environ.get('TORCH_FR_BUFFER_SIZE', '')!r}): the cause "
            "of a hang is then found from stacks and counts of collectives alone. Unset this "
            "variable if it is 0; otherwise use a newer torch"
        )
    return HangWatch(
        time_before(seconds) if before_torch else seconds,
        world_size,
        recorded=has_recorder and backend == "gloo",  # a rank that waits uses no CPU
        before_torch=before_torch,
        ends_itself=ends_itself,
        notice_after=notice_after(),
    )
