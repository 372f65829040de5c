"""The result of a launch: the first failure decides its exit status and when the rest is ended."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import threading
from typing import NamedTuple

from ...launch_report import EXIT_REQUEUE, Failure

# Seconds from the first failure until the other ranks are ended: they may report what they know.
END_DELAY = 0.5
# The same after a stop: a rank that leaves with its own exit status is no failure then, and another
# one may still be writing its checkpoint.
END_DELAY_AFTER_STOP = 120.0
_REMIND_SECONDS = 5.0  # after which the end of others is announced, if it takes so long
_SHOWN = 8  # ranks in a message
_STOP_SECONDS = 600.0  # a failure so long after a stop has another cause
_STOPS: dict[int, str] = {
    signal.SIGTERM: "the job was cancelled, or has reached its time limit",
    signal.SIGINT: "the launch was interrupted",
}


def print_status(text: str, *, is_error: bool = False) -> None:
    """Print a line of ddpkit launch on standard error; an error in red in a terminal."""
    line = f"ddpkit launch: {text}"
    if is_error and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\033[1;31m{line}\033[0m"
    print(line, file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Print why the launch fails: ddpkit doctor logs finds such lines by their first words."""
    print_status(f"error: {text}", is_error=True)


def describe_status(status: int) -> str:
    """Convert 139 to "was ended by SIGSEGV (exit status 139)"."""
    if status > 128:
        try:
            return f"was ended by {signal.Signals(status - 128).name} (exit status {status})"
        except ValueError:
            pass
    return f"ended with exit status {status}"


def _describe_rank(rank: int, host: str | None) -> str:
    return f"rank {rank}" + (f" on {host}" if host else "")


def _end_of(failure: Failure, status: int) -> Failure:
    """Return the failure of a rank that ended without a report, told by its exit status."""
    assert failure.rank is not None
    who = _describe_rank(failure.rank, failure.host)
    if not status:
        text = "ended with exit status 0 before the others: os._exit(0), or the end of its program"
        return failure._replace(text=f"{who} {text}", kind="left")
    if status > 128:
        memory = ", perhaps because its host ran out of memory" * (status == 128 + signal.SIGKILL)
        return failure._replace(text=f"{who} {describe_status(status)}{memory}", kind="status")
    text = f"ended with exit status {status} and without an exception, as by os._exit({status})"
    return failure._replace(text=f"{who} {text}")


class OutOfMemory(NamedTuple):
    """What a scheduler has printed about a process that it ended for its memory."""

    text: str
    host: str | None = None  # None: the line does not name it

    def __str__(self) -> str:
        return "out of memory" + (f" on {self.host}" if self.host else "") + f": {self.text}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class LaunchResult:
    """What has happened so far. Times are those of time.monotonic().

    status: of the first process that failed; 0 while none has. failed_at: when that was.
    warning: to be printed if nothing fails. reason: what has ended the ranks, where it was none of
    them; reason_host: where. lost_hosts: those that have failed. out_of_memory: what Slurm reports.
    syntax_error: of the script, which then no rank can run.
    """

    def __init__(self) -> None:
        self.status = 0
        self.failed_at: float | None = None
        self.warning = ""
        self.lost_hosts: set[str] = set()
        self.reason = self._stop_reason = ""
        self.reason_host: str | None = None
        self.out_of_memory: OutOfMemory | None = None
        self.syntax_error = ""
        self._stopped_by = 0  # the signal
        # Ranks that ended by themselves, in order: name, exit status, host.
        self._ended: dict[int, tuple[str, int, str | None]] = {}
        self._interrupts = 0
        self._at_once = False
        self._stopped_at: float | None = None
        self._failure: Failure | None = None  # the first one that launch.py itself has seen
        self._reminder: threading.Timer | None = None

    def process_ended(
        self,
        who: str,
        status: int,
        now: float,
        *,
        others: bool,
        rank: int | None = None,
        host: str | None = None,
    ) -> None:
        """Note the end of a process. others: whether more are running. rank: None for torchrun."""
        by_itself = not status or self.end_at is None or now < self.end_at
        if rank is not None and by_itself:
            self._ended[rank] = who, status, host
        if status and self.failed_at is None:
            message = f"{who} {describe_status(status)}"
            self.fail(message, now, status, kind="status", rank=rank, host=host)
            if others:
                print_later = (f"{message}, the others will be ended",)
                self._reminder = threading.Timer(_REMIND_SECONDS, print_status, print_later)
                self._reminder.daemon = True
                self._reminder.start()

    def note_end(self, rank: int, status: int, host: str | None) -> None:
        """Note the exit status of a rank, of which its launcher knows only now."""
        self._ended.setdefault(rank, (_describe_rank(rank, host), status, host))

    def fail(
        self,
        message: str,
        now: float,
        status: int = 1,
        *,
        kind: str = "launch",
        rank: int | None = None,
        host: str | None = None,
    ) -> None:
        """Note a failure; only the first one counts. kind, rank, host: of Failure.

        After a stop that ends the ranks, none of them is to blame for its end by a signal.
        """
        if self.failed_at is not None:
            return
        self.status, self.failed_at = status, now
        if self._stopped_by in _STOPS and self._is_after_stop(now) and not self._at_once:
            self._stop_reason = (
                f"{signal.Signals(self._stopped_by).name}: ddpkit launch has received it: "
                f"{_STOPS[self._stopped_by]}"
            )
            if status in (128 + self._stopped_by, 128 + signal.SIGTERM, 128 + signal.SIGKILL):
                self.reason = self._stop_reason
                return
        self._failure = Failure(message, kind, rank, host)

    def conclude(self, first: Failure | None) -> Failure | None:
        """Decide what has failed first; set the status that belongs to it. None if nothing has.

        Where a stop came first, that is it. first: what the ranks have reported.
        """
        if self._reminder is not None:
            self._reminder.cancel()
        if not self.status:
            return None
        if reason := self.reason or self._stop_reason:
            return Failure(reason, "stop", host=self.reason_host)
        return self._failure if self._at_once else self._first(first)

    def report(self, failure: Failure | None, first: Failure | None) -> None:
        """Print the warning; or one line, the last one, that says what has failed.

        failure: of conclude(first).
        """
        if not self.status:
            if self.warning and not self.reason:
                print_status(self.warning)
        elif failure is not None:
            failure.write()
            reason = self.reason or self._stop_reason
            is_of_rank = first is not None and not reason and not self._at_once
            show = functools.partial(print_status, is_error=True) if is_of_rank else print_error
            show(failure.text)

    def _first(self, first: Failure | None) -> Failure | None:
        """Return what has failed first. first: what the ranks have reported."""
        if first is not None:
            ended = None if first.rank is None else self._ended.get(first.rank)
            if ended is not None:
                _, status, host = ended
                self.status = status or self.status
                first = first._replace(host=first.host or host, text=first.text.rstrip("."))
                if first.kind == "killed" and status != 128 + signal.SIGABRT:
                    first = _end_of(first, status)
                elif status > 1:  # 1 is the status of every exception
                    which = f"Rank {first.rank} {describe_status(status)}"
                    first = first._replace(text=f"{first.text}. {which}")
            if self.out_of_memory is not None:
                text = f"{first.text.rstrip('.')}. Slurm reports: {self.out_of_memory}"
                first = first._replace(text=text)
            return first._replace(text=first.text.rstrip("."))
        if self.syntax_error:
            return Failure(self.syntax_error, "exception")

        seen = self._failure
        left = list(itertools.takewhile(lambda item: not item[1][1], self._ended.items()))
        failed = [who for who, status, _ in self._ended.values() if status]
        if left and seen:
            rank, (_, _, host) = left[0]
            names = _some([who for _, (who, _, _) in left])
            text = f"{names} had ended with exit status 0 before {seen.text}"
            return Failure(text, "left", rank, host)
        if len(failed) > 1 and seen:
            text = (
                f"{seen.text}. {_some(failed[1:])} failed, too, before the others were ended. The "
                "first to end need not be the first that failed: see the tracebacks"
            )
            return seen._replace(text=text)
        return seen

    def end_now(self, number: int, now: float) -> None:
        """Note that a signal ends everything at once."""
        self._at_once = True
        name = signal.Signals(number).name
        self.fail(f"{name}: all will be ended", now, 128 + number, kind="stop")

    @property
    def end_at(self) -> float | None:
        """When the other ranks are to be ended; None while nothing has failed."""
        if self.failed_at is None or self._at_once:
            return self.failed_at
        return self.end_after(self.failed_at, END_DELAY)

    def end_after(self, failed_at: float, seconds: float) -> float:
        """Return when the others are to be ended, some seconds after the first failure."""
        return failed_at + (END_DELAY_AFTER_STOP if self._is_after_stop(failed_at) else seconds)

    @property
    def at_once(self) -> bool:
        """Whether a signal has ended everything at once."""
        return self._at_once

    @property
    def was_stopped(self) -> bool:
        """Whether a stop signal has come."""
        return self._stopped_at is not None

    def _is_after_stop(self, now: float) -> bool:
        return self._stopped_at is not None and now < self._stopped_at + _STOP_SECONDS

    def is_last_stop(self, number: int, now: float) -> bool:
        """Note a stop signal; return whether it ends everything now.

        The second interrupt (ctrl-C) does, and the loss of the terminal.
        """
        self._stopped_at, self._stopped_by = now, number
        self._interrupts += number == signal.SIGINT
        return number == signal.SIGHUP or self._interrupts > 1


class Ended(NamedTuple):
    """How a start of the ranks has ended.

    first: what the ranks have reported. failure: what has failed first; None if nothing has.
    checkpoint: the newest step that is safe, where rank 0 has reported one. seconds: it has run.
    failed_at: when the failure was noticed, in seconds since 1970.
    """

    result: LaunchResult
    saved: bool = False
    first: Failure | None = None
    failure: Failure | None = None
    checkpoint: int | None = None
    seconds: float = 0.0
    failed_at: float = 0.0

    def report(self) -> int:
        """Print the last line of the launch; return its exit status."""
        if self.saved:
            print_status(
                "all ranks have saved, and the run can be continued from there (exit status "
                f"{EXIT_REQUEUE})"
            )
            return EXIT_REQUEUE
        self.result.report(self.failure, self.first)
        return self.result.status
