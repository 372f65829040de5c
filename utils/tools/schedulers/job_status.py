"""The status of a job, whatever its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...job.exit_status import EXIT_REQUEUE

# In the order of precedence: the status of several jobs together is the first that one of them has.
State = Literal[
    "running",
    "ending",
    "queued",
    "held",
    "failed",
    "node_fail",
    "timeout",
    "cancelled",
    "never_ran",
    "unknown",
    "stopped",  # ended with EXIT_REQUEUE: it has saved, and another job is to continue it
    "completed",
]
_PRECEDENCE: tuple[State, ...] = get_args(State)
_NOT_ENDED = ("running", "ending", "queued", "held", "unknown")


@dataclass(frozen=True)
class Status:
    """A job at one moment. Only "completed" is success."""

    job_id: str
    state: State
    # Of the job script; 128+N where signal N ended it; None: there is none (yet).
    exit_code: int | None = None
    reason: str = ""  # why the job waits or how it ended
    scheduler_state: str = ""  # "PENDING", "Q"
    position: int | None = None  # among the waiting jobs of its queue, from 1
    hosts: tuple[str, ...] = ()
    queue: str = ""
    output: str | None = None  # path of the log
    restart_count: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has reached its final state."""
        return self.state not in _NOT_ENDED

    @property
    def exit_status(self) -> int:
        """The exit status of a command that follows the job: 0 for success alone."""
        if self.state == "completed":
            return 0
        return self.exit_code if self.exit_code and 0 < self.exit_code < 256 else 1


def state_of_exit(exit_code: int | None) -> State:
    """Return the state of a job that ended by itself; None: its exit code is not known."""
    if exit_code == 0:
        return "completed"
    return "stopped" if exit_code == EXIT_REQUEUE else "failed"


def combine(job_id: str, parts: Sequence[Status]) -> Status:
    """Return one status for the elements of an array or the components of a heterogeneous job."""
    first = min(parts, key=lambda part: _PRECEDENCE.index(part.state))
    if len(parts) == 1:
        return first

    states = [part.state for part in parts]
    counts = [f"{states.count(state)} {state}" for state in _PRECEDENCE if state in states]
    exit_codes = [
        part.exit_code for part in parts if part.state == first.state and part.exit_code is not None
    ]
    return Status(
        job_id,
        first.state,
        max(exit_codes) if exit_codes and first.ended else None,
        reason=", ".join(counts),
        scheduler_state=first.scheduler_state,
        hosts=tuple(dict.fromkeys(host for part in parts for host in part.hosts)),
        queue=first.queue,
        output=first.output,
        restart_count=first.restart_count,
    )
