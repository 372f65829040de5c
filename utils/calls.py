"""Notice that other ranks go on training without a call that all have to make.

For example save() or should_stop() under `if job.is_main`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from .consistency import training_watch
from .coordination import CoordinationError, StoreCommunicator
from .monitor.counts import entered_collectives
from .ranges import name_ranks

_STEPS = 2  # optimizer steps with a collective: after so many, all ranks have gone on
_GRACE_SECONDS = 2.0  # seconds that a rank which calls late is waited for


class CallsOfAllRanks:
    """Which ranks have made a call, and whether the others still can.

    Each rank reports its call before the call returns. Once rank 0 has ended two more steps with
    collectives in them, all ranks are past the place of that call. On a GPU, an event shows when
    a step has ended.
    """

    def __init__(self, ranks: StoreCommunicator, *, of_steps: bool = False) -> None:
        """of_steps: the call belongs to every step; a rank without a batch has neither of them.

        Then all ranks call report_steps() again and again, from any thread.
        """
        self._ranks = ranks
        self._of_steps = of_steps
        self._first_step = _steps_of_optimizers()
        self._has_stepped = False  # whether this rank has reported steps
        self._stepping = 0  # number of ranks that have reported steps
        self._cleared = 0  # value of _stepping when all of these ranks had called
        self._topic = ""  # topic of the last call
        self._is_open = False  # whether some rank may not have called
        self._entered = 0  # collectives of the default group entered until the last step
        self._steps: list[torch.Event | None] = []  # ends of steps since the call; None: ended
        self._shown_at: float | None = None  # time.monotonic() when these steps had ended

    def call(self, turn: int) -> None:
        """Report this rank's call, in the main thread. turn: its number, equal on all ranks."""
        if self._ranks.world_size == 1:
            return
        self._topic, self._steps, self._shown_at = f"call {turn}", [], None
        self._entered = entered_collectives() or 0
        with contextlib.suppress(CoordinationError):  # the caller will notice
            self._ranks.report(self._topic, True, len)
        self._is_open = self._ranks.rank == 0
        watch = training_watch.watch
        if self._is_open and watch is not None and self._stepped not in watch.on_step:
            watch.on_step.append(self._stepped)

    def close(self, *, reports: bool) -> None:
        """End the watch. reports: whether to tell rank 0 that this rank makes no more calls."""
        watch = training_watch.watch
        if watch is not None and self._stepped in watch.on_step:
            watch.on_step.remove(self._stepped)
        if reports and self._ranks.rank and torch.distributed.is_initialized():
            with contextlib.suppress(CoordinationError):
                self._ranks.report("closed", True, len)

    def report_steps(self) -> None:
        """Report once that this rank makes steps, and therefore has to call."""
        if self._ranks.rank == 0 or self._has_stepped or self._topic:
            return
        if _steps_of_optimizers() - self._first_step >= _STEPS:
            self._has_stepped = True
            self._ranks.report("stepped", True, len)

    def forget(self) -> None:
        """Delete the reports, on rank 0, once it is known that all ranks have called."""
        self._is_open = False
        if self._topic:
            self._ranks.forget_reports(self._topic)

    def problem(self, call: str, remedy: str) -> str:
        """Return a message about ranks that do not make rank 0's call; "" if none is known.

        On rank 0, from any thread. call: "calls save() at step 5". remedy: begins with "expected".
        """
        ranks = self._absent()
        if not ranks:
            return ""
        verb = "does" if len(ranks) == 1 else "do"
        return f"rank 0 {call}, {name_ranks(ranks)} {verb} not; {remedy}"

    @property
    def is_in_doubt(self) -> bool:
        """Whether rank 0 has gone on, and briefly waits for a rank that calls late."""
        if self._absent():
            return True
        return self._is_open and self._shown_at is not None and not self._is_late

    @property
    def _is_late(self) -> bool:
        """Whether the time for late calls is over."""
        return self._shown_at is not None and time.monotonic() - self._shown_at > _GRACE_SECONDS

    def _absent(self) -> Sequence[int]:
        """Return the ranks that no longer make the call."""
        ranks = self._ranks
        if not self._is_open:
            return []
        closed: set[int] = set()
        if ranks.count("closed/reports", 0):  # read first: a rank calls before it closes
            closed = set(range(1, ranks.world_size)).difference(ranks.missing("closed"))
        if ranks.count(f"{self._topic}/reports", 0) == ranks.world_size:
            self._is_open = False
            return []
        if closed and (absent := sorted(closed.intersection(ranks.missing(self._topic)))):
            return absent
        if len(self._steps) < _STEPS or not all(
            event is None or event.query() for event in self._steps
        ):
            return []
        stepping = ranks.count("stepped/reports", 0) if self._of_steps else 0
        if self._shown_at is None or stepping != self._stepping:
            self._shown_at, self._stepping = time.monotonic(), stepping
        if not self._is_late or self._of_steps and stepping == self._cleared:
            return []
        absent = ranks.missing(self._topic)
        if self._of_steps and absent:
            idle = ranks.missing("stepped")
            absent = [rank for rank in absent if rank not in idle]
            self._cleared = self._cleared if absent else stepping
        return absent

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_open or len(self._steps) >= _STEPS:
            return
        entered = entered_collectives() or 0
        if entered == self._entered:
            return
        self._entered = entered
        parameters: list[Any] = optimizer.param_groups[0]["params"]
        device = parameters[0].device if parameters else torch.device("cpu")
        if device.type == "cpu":
            self._steps.append(None)
        elif device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._steps.append(torch.cuda.current_stream(device).record_event())


def _steps_of_optimizers() -> int:
    return training_watch.watch.steps if training_watch.watch is not None else 0
