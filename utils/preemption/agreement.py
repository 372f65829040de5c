"""Let all ranks agree on one step boundary at which they stop, without a collective.

Each rank counts the boundaries that its training loop has passed. A stop takes four steps:

1. Any rank proposes a stop in the store of the process group. A thread of every rank looks for a
   proposal a few times a second.
2. That thread holds its rank at the next boundary, p + 1, and reports p + 1 in the store.
3. The last rank to report decides: all ranks stop at S, the greatest of the reported boundaries.
4. Every thread receives S and lets its rank go on to boundary S.

No rank has passed S, because no rank passes the boundary that it reported. Step times and clocks do
not matter. The main threads may wait for each other in collectives, because other threads report.

A rank that fails ends the agreement instead. Launchers then send SIGTERM to the other ranks (srun
at once), which is no preemption. These ranks raise an error, so that nobody requeues the job.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from ..log import get_logger
from ..ranges import name_ranks

if TYPE_CHECKING:
    from ..calls import CallsOfAllRanks
    from ..coordination import StoreCommunicator

_log = get_logger(__name__)
_NO_LIMIT = 1 << 62
_TOPIC = "boundary"
_FAILED = "failed"  # key of a counter: ranks that left with an error
_LEAVE_TIMEOUT = 10.0  # seconds that rank 0, which may serve the store, waits for other ranks
_LEAVE_POLL_SECONDS = 0.005
_DOUBT_POLL_SECONDS = 0.05
_CALL_ALL = (
    "expected a call on all ranks, after every step: a stop cannot be agreed on. Call it on all "
    "ranks, not under `if job.is_main`"
)


class BoundaryReport(TypedDict):
    """The boundary at which a rank is held."""

    boundary: int
    finished: bool  # whether the rank has left its loop without a stop


class _RankFailed(RuntimeError):
    """Another rank has failed before all agreed on a boundary, or does not call should_stop()."""


class StopAgreement:
    """One rank's side of the agreement.

    The main thread calls pass_boundary(). One other thread calls advance(). Any thread and any
    signal handler may call request().

    communicator: connects the ranks; None for a single process.
    wake: called after request(), to wake the thread that calls advance().
    rank_timeout: seconds to wait at a boundary for the reports of all ranks.
    calls: knows which ranks have passed a boundary; None for a single process.
    """

    def __init__(
        self,
        communicator: StoreCommunicator | None,
        wake: Callable[[], None],
        rank_timeout: float,
        calls: CallsOfAllRanks | None = None,
    ) -> None:
        self.reason = ""  # names the source of the request
        self.boundary: int | None = None  # all ranks stop at this boundary
        self.closed = False

        self._communicator = communicator
        self._rank = communicator.rank if communicator else 0
        self._wake = wake
        self._rank_timeout = rank_timeout
        self._calls = calls
        self._absent = ""  # names ranks that do not call should_stop()

        # Reentrant, since a signal handler may call request() in the middle of pass_boundary().
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._passed = 0  # number of boundaries passed
        self._limit = _NO_LIMIT  # boundaries below it are passed without waiting
        self._reported = False
        self._requested_reason = ""  # reason of this rank's own request
        self._error: RuntimeError | None = None  # set once no agreement is possible

    def request(self, reason: str) -> None:
        """Request a stop of all ranks."""
        with self._lock:
            if self.closed:
                return
            if not self._requested_reason:
                self._requested_reason = f"{reason}, rank {self._rank} on {socket.gethostname()}"
            self._limit = 0  # this rank passes no boundary without an agreement
            self._wake()

    def pass_boundary(self) -> bool:
        """Pass the next boundary, or return True if all ranks stop there.

        Raises RuntimeError if the ranks cannot agree on a boundary.
        """
        with self._lock:
            boundary = self._passed + 1
            if boundary < self._limit:
                self._passed = boundary
                return False

            self._changed.wait_for(self._is_over, self._rank_timeout)
            if self.boundary is None and self._reported and not self.closed:
                raise RuntimeError(self._explain_failure()) from self._error
            if self.boundary is not None and boundary >= self.boundary:
                return True

            self._passed = boundary
            return False

    def advance(self) -> None:
        """Agree with the other ranks if a stop has been requested.

        Raises RuntimeError if the store is gone.
        """
        if self._is_over():
            return

        if self._communicator is None:
            if self._requested_reason:
                self.reason = self._requested_reason
                self._stop_at(self._hold())
            return

        if self._requested_reason or self._communicator.is_proposed(_TOPIC):
            self.reason = self._communicator.propose(_TOPIC, self._requested_reason)
            self._report(self._communicator, finished=False)
            self._receive(self._communicator)

    def check_calls(self) -> None:
        """Log once, on rank 0, that some ranks make steps but do not call should_stop()."""
        if self._calls is None or self._absent or self.closed:
            return
        self._calls.report_steps()
        self._absent = self._calls.problem("calls should_stop()", _CALL_ALL)
        if self._absent:
            _log.error("%s", self._absent)

    def fail(self, error: RuntimeError) -> None:
        """Give up, because no agreement is possible."""
        with self._lock:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting. Later requests are ignored."""
        with self._lock:
            self.closed = True
            self._changed.notify_all()
            self._wake()
        if self._communicator is not None:
            self._communicator.cancel()

    def leave(self, orderly: bool) -> bool | None:
        """Let the other ranks agree without this one; rank 0, which may serve the store, goes last.

        orderly: whether this rank has not failed. Returns whether all ranks left in an orderly way;
        None if that is unknown, for example because other ranks have not left yet.
        """
        if self._communicator is None:
            return orderly
        if self._error is not None:
            return None
        with contextlib.suppress(RuntimeError):  # the store may be gone
            return self._leave(self._communicator, orderly)
        return None

    def _is_over(self) -> bool:
        return self.boundary is not None or self._error is not None or self.closed

    def _hold(self) -> int:
        """Hold this rank at its next boundary, and return that boundary."""
        with self._lock:
            self._reported = True
            self._limit = self._passed + 1
            return self._limit

    def _report(self, communicator: StoreCommunicator, finished: bool) -> None:
        report = BoundaryReport(boundary=self._hold(), finished=finished)
        communicator.report(_TOPIC, report, _latest)

    def _receive(self, communicator: StoreCommunicator) -> None:
        try:
            boundary = int(communicator.receive(_TOPIC))
        except RuntimeError:
            if self.closed:
                return
            raise
        while self._calls is not None and self._calls.is_in_doubt and not self.closed:
            time.sleep(_DOUBT_POLL_SECONDS)
            self.check_calls()
            if self._absent:
                break
        if communicator.count(_FAILED, 0):
            self.fail(_RankFailed("another rank has failed. Look for its message"))
        elif self._absent:
            self.fail(_RankFailed(self._absent))
        else:
            self._stop_at(boundary)

    def _stop_at(self, boundary: int) -> None:
        with self._lock:
            self.boundary = self._limit = boundary
            self._changed.notify_all()
        if self._rank == 0:
            _log.info(
                "stop requested (%s): all ranks stop at step boundary %d", self.reason, boundary
            )

    def _leave(self, communicator: StoreCommunicator, orderly: bool) -> bool | None:
        if not orderly:  # counted first, because this rank's report may complete the agreement
            communicator.count(_FAILED)
        if not self._reported:
            self._report(communicator, finished=True)

        left = communicator.count("left")
        waits = orderly and communicator.rank == 0
        deadline = time.monotonic() + (_LEAVE_TIMEOUT if waits else 0)
        while left < communicator.world_size and time.monotonic() < deadline:
            time.sleep(_LEAVE_POLL_SECONDS)
            left = communicator.count("left", 0)

        if left < communicator.world_size:
            return None
        if communicator.rank == 0 and not self._absent:
            _warn_of_unequal_loops(communicator.reports(_TOPIC))
        return communicator.count(_FAILED, 0) == 0

    def _explain_failure(self) -> str:
        problem = f"A stop was requested ({self.reason}), but the ranks could not agree on a step: "
        if isinstance(self._error, _RankFailed):
            return f"{problem}{self._error}"
        if self._error is not None or self._communicator is None:
            return (
                f"{problem}the store that rank 0 or torchrun serves is no longer reachable. "
                "Expected it to stay available until every rank has closed its StopSignal. Look "
                "for the message of rank 0"
            )

        missing: list[int] = []
        with contextlib.suppress(RuntimeError):
            missing = self._communicator.missing(_TOPIC)
        return (
            f"{problem}{len(missing)} of {self._communicator.world_size} ranks did not report "
            f"within {self._rank_timeout:g} s: {name_ranks(missing)}. Expected an open "
            "StopSignal on every rank. Look for the messages of these ranks: they hang or have "
            "ended"
        )


def _latest(reports: list[BoundaryReport]) -> int:
    return max(report["boundary"] for report in reports)


def _warn_of_unequal_loops(reports: list[BoundaryReport]) -> None:
    """Warn if ranks called should_stop() different numbers of times without a stop."""
    if not all(report["finished"] for report in reports):
        return

    calls = [report["boundary"] - 1 for report in reports]
    fewest, most = min(calls), max(calls)
    if fewest == most:
        return
    _log.warning(
        "the ranks called should_stop() different numbers of times: rank %d %d times, rank %d %d "
        "times. A stop would not have been at the same step. Call it equally often on all ranks",
        calls.index(fewest),
        fewest,
        calls.index(most),
        most,
    )
