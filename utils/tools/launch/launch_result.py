"""What happens during a launch, until it ends: outcome.py decides what that means."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from ...launch_protocol import EXIT_REQUEUE, Failure, Kind, Unimported
from ...visible_text import visible
from .outcome import Evidence, Loss, Outcome, OutOfMemory, RankEnd, decide, describe_status
from .stopped_ranks import describe as describe_stopped

# Seconds from the first failure until the other ranks are ended: they may report what they know.
END_DELAY = 0.5
# Seconds after a stop. A rank may then end with an exit status of its own while others still write
# their checkpoints.
END_DELAY_AFTER_STOP = 120.0
_REMIND_SECONDS = 5.0  # announces the end of the other ranks if it takes this long
_STOP_SECONDS = 600.0  # a failure later than this after a stop has another cause


def print_status(text: str, *, is_error: bool = False) -> None:
    """Print a line of ddpkit launch on standard error; an error in red in a terminal.

    Control characters, such as in the message of an exception, are shown as their codes.
    """
    line = f"ddpkit launch: {visible(text)}"
    if is_error and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\033[1;31m{line}\033[0m"
    print(line, file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Print why the launch fails: ddpkit doctor logs finds such lines by their first words."""
    print_status(f"error: {text}", is_error=True)


class NativeLauncher:
    """The srun or mpiexec that starts the ranks of a launch; its name is "" if none does.

    status: its exit status. killed: whether a signal ended it. ended_at: when this process began to
    end it, in seconds of time.monotonic(). late: seconds from the first failure until this process
    had to end it.
    """

    def __init__(self) -> None:
        self.name = ""
        self.status: int | None = None
        self.killed = False
        self.ended_at: float | None = None
        self.late: float | None = None


class LaunchResult:
    """What has happened so far: evidence() collects it. Times are values of time.monotonic().

    failed_at: when the first failure was noticed; None if nothing has failed. warning: printed if
    nothing fails. expected: number of processes that should end by themselves with status 0.
    lost_hosts: hosts that do not respond. slurm_reason, slurm_signalled, out_of_memory: what Slurm
    prints. syntax_error: why no rank can run the script. unimported: what the first rank that
    failed cannot import from a copy of --stage.
    """

    def __init__(self, expected: int = 1, hosts: Sequence[str] = (), own_host: str = "") -> None:
        """hosts: hosts of the plan. own_host: host of this process."""
        self.expected, self._hosts, self._own_host = expected, hosts, own_host
        self.failed_at: float | None = None
        self.warning = ""
        self.slurm_reason = ""
        self.slurm_signalled = False
        self.out_of_memory: OutOfMemory | None = None
        self.launcher = NativeLauncher()
        self.syntax_error = ""
        self.unimported: Unimported | None = None
        self._ends: list[RankEnd] = []
        self._problem: Failure | None = None  # first problem that this process noticed
        self._problem_at: float | None = None
        self._problem_status = 1
        self._lost: dict[str, Loss] = {}
        self._gone: dict[str, Loss] = {}
        self._stopped_by = 0  # signal number; 0: none
        self._stopped_at: float | None = None
        self._interrupts = 0
        self._at_once = False
        self._reminder: threading.Timer | None = None

    # What happens --------------------------------------------------------------------------------

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
        by_launch = bool(status) and self._is_ending(now)
        self._ends.append(RankEnd(who, status, now, rank, host, by_launch))
        if status and self.failed_at is None:
            self.failed_at = now
            if others:
                print_later = (f"{who} {describe_status(status)}, the others will be ended",)
                self._reminder = threading.Timer(_REMIND_SECONDS, print_status, print_later)
                self._reminder.daemon = True
                self._reminder.start()

    def note_end(self, rank: int, status: int, host: str | None, now: float) -> None:
        """Note the exit status of a rank as its launcher prints it, if it is not known yet."""
        if not any(end.rank == rank for end in self._ends):
            who = f"rank {rank}" + (f" on {host}" if host else "")
            self._ends.append(RankEnd(who, status, now, rank, host))

    def rank_lost(self, rank: int, host: str, now: float) -> None:
        """Note that the parent of a rank is gone: how the rank has ended is unknown."""
        who = f"rank {rank} on {host}"
        self._ends.append(RankEnd(who, None, now, rank, host, self._is_ending(now)))

    def rank_stopped(
        self, rank: int, host: str, pid: int, why: str, seconds: float, now: float
    ) -> None:
        """Note that a rank has been stopped by a signal for longer than the limit of a hang."""
        text = describe_stopped(rank, host, pid, why, seconds)
        self.fail(text, now, kind="hang", rank=rank, host=host)

    def host_lost(self, host: str, text: str, now: float) -> None:
        """Note that a host does not respond."""
        self._lost.setdefault(host, Loss(host, text, now))

    def launcher_gone(self, host: str, text: str, now: float) -> None:
        """Note that an agent, or a process of the launcher, has ended before its ranks."""
        self._gone.setdefault(host, Loss(host, text, now))

    def fail(
        self,
        message: str,
        now: float,
        status: int = 1,
        *,
        kind: Kind = "launch",
        rank: int | None = None,
        host: str | None = None,
    ) -> None:
        """Note a problem; only the first one counts. kind, rank, host: fields of Failure."""
        if self._problem is None:
            self._problem = Failure(message, kind, rank, host)
            self._problem_at, self._problem_status = now, status
        self.failed_at = now if self.failed_at is None else self.failed_at

    def end_now(self, number: int, now: float) -> None:
        """Note that a signal ends everything at once."""
        self._at_once = True
        name = signal.Signals(number).name
        self.fail(f"{name}: all will be ended", now, 128 + number, kind="stop")

    def is_last_stop(self, number: int, now: float) -> bool:
        """Note a stop signal; return whether it ends everything now.

        The second interrupt (ctrl-C) does, and the loss of the terminal.
        """
        self._stopped_at, self._stopped_by = now, number
        self._interrupts += number == signal.SIGINT
        return number == signal.SIGHUP or self._interrupts > 1

    # What is known -------------------------------------------------------------------------------

    @property
    def lost_hosts(self) -> list[str]:
        return list(self._lost)

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
    def was_stopped(self) -> bool:
        """Whether a stop signal has come."""
        return self._stopped_at is not None

    def _is_ending(self, now: float) -> bool:
        """Whether this process has begun to end the ranks, or the launcher that started them."""
        begins = self.launcher.ended_at if self.launcher.name else self.end_at
        return begins is not None and now >= begins

    def _is_after_stop(self, now: float) -> bool:
        at = self._stopped_at
        return at is not None and at <= now < at + _STOP_SECONDS

    # How it ends ---------------------------------------------------------------------------------

    def evidence(
        self,
        reported: Failure | None = None,
        reported_at: float | None = None,
        saved_at: float | None = None,
    ) -> Evidence:
        """Return all that is known. reported, reported_at, saved_at: from the ranks' reports."""
        after_stop = self.failed_at is not None and self._is_after_stop(self.failed_at)
        return Evidence(
            expected=self.expected,
            ends=tuple(self._ends),
            reported=reported,
            reported_at=reported_at,
            saved_at=saved_at,
            problem=self._problem,
            problem_at=self._problem_at,
            problem_status=self._problem_status,
            lost=tuple(self._lost.values()),
            gone=tuple(self._gone.values()),
            hosts=tuple(self._hosts),
            own_host=self._own_host,
            stopped_by=self._stopped_by if after_stop else 0,
            stopped_at=self._stopped_at or 0.0,
            at_once=self._at_once,
            slurm_reason=self.slurm_reason,
            slurm_signalled=self.slurm_signalled,
            out_of_memory=self.out_of_memory,
            launcher=self.launcher.name,
            launcher_status=self.launcher.status,
            launcher_killed=self.launcher.killed,
            launcher_late=self.launcher.late,
            syntax_error=self.syntax_error,
            unimported=self.unimported,
        )

    def conclude(
        self,
        reported: Failure | None = None,
        reported_at: float | None = None,
        saved_at: float | None = None,
    ) -> Outcome:
        """Decide how the launch has ended. See evidence()."""
        if self._reminder is not None:
            self._reminder.cancel()
        return decide(self.evidence(reported, reported_at, saved_at))


class Ended(NamedTuple):
    """How a start of the ranks has ended.

    warning: printed if the start has not failed. problems: ERRORs of a training that went on; their
    lines may have scrolled away. checkpoint: newest safe step; None if rank 0 has reported none.
    seconds: run time. failed_at: when the failure was noticed, in seconds since 1970. started:
    whether all ranks had started.
    """

    outcome: Outcome
    warning: str = ""
    problems: tuple[str, ...] = ()
    checkpoint: int | None = None
    seconds: float = 0.0
    failed_at: float = 0.0
    started: bool = True

    def report(self) -> Outcome:
        """Print the last line of the launch; return its outcome."""
        outcome, failure = self.outcome, self.outcome.failure
        if outcome.saved:
            print_status(
                "all ranks have saved, and the run can be continued from there (exit status "
                f"{EXIT_REQUEUE})"
            )
        elif failure is not None:
            failure.write()
            if outcome.by_launch:
                print_error(failure.text)
            else:
                print_status(failure.text, is_error=True)
        elif self.warning:
            print_status(self.warning)
        if failure is None and self.problems:
            count = len(self.problems)
            print_error(f"{count} ERROR{'s' * (count > 1)} above: {self.problems[0]}")
        return outcome
