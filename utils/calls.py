"""Notice that other ranks go on training without a call that all have to make.

As of save() or should_stop() under `if job.is_main`.
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

_STEPS = 2  # of the optimizer, each with a collective, that show that all ranks have gone on
_GRACE_SECONDS = 2.0  # then, for a rank that only now comes to its call


class CallsOfAllRanks:
    """Which ranks have made a call, and whether the others still can.

    Each rank reports its call before that returns. Once rank 0 has ended two more steps with
    collectives in them, all ranks are past the place of that call. On a GPU, an event tells when
    a step has ended.
    """

    def __init__(self, ranks: StoreCommunicator, *, of_steps: bool = False) -> None:
        """of_steps: every step has the call, and a rank without a batch has neither.

        Then all ranks call report_steps() again and again, from any thread.
        """
        self._ranks = ranks
        self._of_steps = of_steps
        self._first_step = _steps_of_optimizers()
        self._has_stepped = False  # and has reported it
        self._stepping = 0  # number of ranks that have reported it
        self._cleared = 0  # that number when all of them had called
        self._topic = ""  # of the last call
        self._is_open = False  # whether a rank may not have called
        self._entered = 0  # collectives of the default group, at the last step
        self._steps: list[torch.Event | None] = []  # since the call; None: ended
        self._shown_at: float | None = None  # time.monotonic() when the steps had ended

    def call(self, turn: int) -> None:
        """Report this rank's call, in the main thread. turn: the same number on all ranks."""
        if self._ranks.world_size == 1:
            return
        self._topic, self._steps, self._shown_at = f"call {turn}", [], None
        self._entered = entered_collectives() or 0
        with contextlib.suppress(CoordinationError):  # what has called this finds out
            self._ranks.report(self._topic, True, len)
        self._is_open = self._ranks.rank == 0
        watch = training_watch.watch
        if self._is_open and watch is not None and self._stepped not in watch.on_step:
            watch.on_step.append(self._stepped)

    def close(self, *, reports: bool) -> None:
        """End the watch. reports: tell rank 0 that this rank makes no more calls."""
        watch = training_watch.watch
        if watch is not None and self._stepped in watch.on_step:
            watch.on_step.remove(self._stepped)
        if reports and self._ranks.rank and torch.distributed.is_initialized():
            with contextlib.suppress(CoordinationError):
                self._ranks.report("closed", True, len)

    def report_steps(self) -> None:
        """Report once that this rank makes steps, so that it has to call."""
        if self._ranks.rank == 0 or self._has_stepped or self._topic:
            return
        if _steps_of_optimizers() - self._first_step >= _STEPS:
            self._has_stepped = True
            self._ranks.report("stepped", True, len)

    def forget(self) -> None:
        """Delete the reports, on rank 0, once all ranks are known to have called."""
        self._is_open = False
        if self._topic:
            self._ranks.forget_reports(self._topic)

    def problem(self, call: str, remedy: str) -> str:
        """Return that other ranks do not make the call of rank 0; "" where none is known.

        On rank 0, from any thread. call: "calls save() at step 5". remedy: begins with "expected".
        """
        ranks = self._absent()
        if not ranks:
            return ""
        verb = "does" if len(ranks) == 1 else "do"
        return f"rank 0 {call}, {name_ranks(ranks)} {verb} not; {remedy}"

    @property
    def is_in_doubt(self) -> bool:
        """Whether rank 0 has gone on, and waits a moment for a rank that only now calls."""
        if self._absent():
            return True
        return self._is_open and self._shown_at is not None and not self._is_late

    @property
    def _is_late(self) -> bool:
        """Whether a rank that now comes to its call would have called."""
        return self._shown_at is not None and time.monotonic() - self._shown_at > _GRACE_SECONDS

    def _absent(self) -> Sequence[int]:
        """Return the ranks that do not make the call any more."""
        ranks = self._ranks
        if not self._is_open:
            return []
        closed: set[int] = set()
        if ranks.count("closed/reports", 0):  # read before the calls, which come before it
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
