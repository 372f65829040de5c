"""When to save: every so many steps, or as often as pays off."""

from __future__ import annotations

import math
import time

from ..log import get_logger

_log = get_logger(__name__)
_FIRST_STEPS = 50  # until the first saves, which measure the cost
_LOGGED_CHANGE = 1.25


def best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    cost: seconds that a save adds. mtbf: mean seconds between failures. Source: J. T. Daly, A
    higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37; its first term is Young's (1974).
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class SaveInterval:
    """Decides after which steps to save, the same on all ranks.

    every: a number of steps, or "auto". mtbf_hours: mean time between failures of the job.
    """

    def __init__(self, every: int | str | None, mtbf_hours: float) -> None:
        is_number = type(every) is int and every > 0
        if not (every is None or every == "auto" or is_number) or not mtbf_hours > 0:
            raise ValueError(
                f"every is {every!r}, mtbf_hours {mtbf_hours!r}; expected a number of steps or "
                '"auto", and hours above 0'
            )
        self._every, self._mtbf = every, 3600 * mtbf_hours
        self._next: int | None = None
        self._last: tuple[int, float] | None = None  # step and end of the last save
        self._cost, self._logged = 0.0, 0
        self.agreed = _FIRST_STEPS  # steps, from rank 0, with the save before

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""
        if self._every is None:
            raise ValueError('is_due() needs Checkpointer(every=...): a number of steps or "auto"')
        if isinstance(self._every, int):
            return step % self._every == 0
        self._next = step + _FIRST_STEPS if self._next is None else self._next
        return step >= self._next

    def begin(self, step: int) -> int:
        """Note that a save begins, and that the one before has ended; return what rank 0 proposes.

        Costs are those of the save before, so that all ranks know the proposal at the next one.
        """
        self._next = step + self.agreed
        if self._every != "auto" or self._last is None or step <= self._last[0]:
            return self.agreed
        last_step, last_end = self._last
        step_seconds = (time.monotonic() - last_end) / (step - last_step)
        seconds = best_interval(self._cost, self._mtbf)
        steps = max(1, round(seconds / max(step_seconds, 1e-9)))
        change = steps / self._logged if self._logged else math.inf
        if not 1 / _LOGGED_CHANGE < change < _LOGGED_CHANGE:
            self._logged = steps
            _log.info(
                "a checkpoint every %d steps, %.0f s: a save adds %.3f s, a failure is expected "
                "every %g hours (Young, Daly)",
                steps,
                seconds,
                self._cost,
                self._mtbf / 3600,
            )
        return steps

    def end(self, step: int, cost: float) -> None:
        """Note the seconds that the training has waited for this save."""
        self._last, self._cost = (step, time.monotonic()), max(cost, 1e-3)
