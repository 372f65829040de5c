"""One row of the table of causes, and how much it explains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class CauseLevel(IntEnum):
    """How much a line explains. The lowest level in the output decides on the cause.

    Among causes of one level, the earliest decides.
    """

    CAUSE = 0  # explains a failure, even if it is printed late, such as an OOM kill
    FAILURE = 1  # may be the cause, or the consequence of an earlier line
    CONSEQUENCE = 2  # another process has ended
    HINT = 3  # a warning, which also appears in jobs that continue
    EXIT = 4  # a process has failed, nothing more
    WORD = 5  # a word of failure, which also appears in jobs that continue


# Who prints the line: the rank that failed; a rank that waited for it; the scheduler, which ends
# the job on all hosts; or the kit, whose message may name rank and host.
Reporter = Literal["failed", "survivor", "scheduler", "kit"]


@dataclass(frozen=True)
class FailureCause:
    """One row. restart: whether a restart helps; None: the output does not show that.

    explained_by: names of causes that replace this one if the output shows them, too.
    """

    name: str
    restart: bool | None
    level: CauseLevel
    meaning: str
    check: str
    remedy: str
    patterns: tuple[str, ...]
    reporter: Reporter = "failed"
    explained_by: tuple[str, ...] = ()
