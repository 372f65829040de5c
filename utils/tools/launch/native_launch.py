"""Run the one command of a native launcher, srun or an mpiexec, that starts all ranks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...monitor.launch_report import ReportListener
from .bootstrap import module_command
from .child_processes import HELD, Processes
from .event_loop import CaughtSignals, EventLoop
from .files import checksum_of
from .join import JoinServer
from .launch_plan import Plan
from .launch_result import LaunchResult, describe_status, print_error, print_status
from .native_command import NativeCommand
from .srun_errors import SrunErrors

_END_SECONDS = 30.0  # after the first failure: ranks and srun itself need up to 20
RETURN_SECONDS = 60.0  # after the end of all ranks
_REPORT_SECONDS = 0.5
_ABORT_SECONDS = 0.5  # srun reports within this time that Slurm itself is ending the step


def run_native_launcher(
    plan: Plan,
    launch_id: str,
    signals: CaughtSignals,
    report: ReportListener,
    result: LaunchResult,
) -> None:
    """Run the plan with the plan's native launcher, and note the result."""
    with (
        Processes(launch_id) as processes,
        NativeCommand(plan, processes) as command,
        EventLoop(signals) as loop,
    ):
        _NativeLaunch(plan, processes, command, report, loop, result).run()


class _NativeLaunch:
    """The command of a native launcher, from its start to its end."""

    def __init__(
        self,
        plan: Plan,
        processes: Processes,
        command: NativeCommand,
        report: ReportListener,
        loop: EventLoop,
        result: LaunchResult,
    ) -> None:
        self._plan, self._processes, self._command = plan, processes, command
        self._report, self._loop = report, loop
        self._program = os.path.basename(plan.method.path)
        self._ranks = JoinServer(plan, report, loop, result)
        self._result = result
        self._errors: SrunErrors | None = None
        self._rank_failed_at: float | None = None
        self._pass_term_at: float | None = None
        self._held: set[int] = set()  # signals for which not all ranks have a handler yet
        self._reported_waiting = self._ending = False

    def run(self) -> None:
        method = self._plan.method
        words = module_command(self._plan.python, "rank_start", rank_arguments(self._plan))
        child = self._command.start(
            method.command(self._plan, words),
            self._plan.environ,
            subprocess.PIPE if method.error_reader else None,
        )
        if child is not None and child.stderr is not None and method.error_reader is not None:
            self._errors = method.error_reader(child.stderr)
            self._loop.add(self._errors, self._read_errors)

        # The command has started: it and the ranks keep the user's limit of open files.
        with _more_open_files(2 * self._plan.world_size + 64):
            status = self._wait_for_end()
            if self._errors is not None:
                self._errors.drain()
            self._receive_last_reports()
            self._ranks.close()

        reason = self._errors.reason() if self._errors is not None else None
        if reason is not None:
            self._result.lost_hosts.update(reason.lost_hosts)
            if reason.lost_hosts or not self._rank_failed_by_itself():
                self._result.reason = f"Slurm has ended the ranks: {reason.text}"
        if self._result.status:  # the reason was printed when it happened
            if self._ranks.lost_rank:  # perhaps because others could not start
                self._print_missing()
            return
        by_signal = child is not None and (child.returncode or 0) < 0
        self._result.status = self._status_of_ranks(status, by_signal)

    def _wait_for_end(self) -> int:
        """Serve until the command has ended; return its exit status."""
        status = 0
        while self._processes.running:
            now = time.monotonic()
            self._loop.run_once(
                self._processes.kill_late(now),
                self._ranks.seconds_left(now),
                None if self._pass_term_at is None else max(0.0, self._pass_term_at - now),
                None if self._rank_failed_at is None and self._ranks.ended_at is None else 1.0,
            )
            self._handle_signals()
            now = time.monotonic()
            self._end_if_failed(now)
            self._end_if_left_behind(now)
            self._ranks.check_time(now)
            if self._ranks.problem and not self._ending:
                self._result.fail(self._ranks.problem, now)
                self._end(now)
            status = max([status, *(ended for _, ended in self._processes.ended())])
        return status

    def _receive_last_reports(self) -> None:
        """Receive what the watch of each host reports at the end of its ranks."""
        limit = time.monotonic() + _REPORT_SECONDS
        while not self._result.status and self._ranks.watched and time.monotonic() < limit:
            self._loop.run_once(limit - time.monotonic())
            self._loop.signals.take()

    def _end_if_failed(self, now: float) -> None:
        """End the command if it still runs long after a rank failed: it waits for a dead host."""
        first = self._errors.first if self._errors is not None else None
        reported = self._report.first_cause  # after an exception, a program may go on or try again
        if self._rank_failed_at is None and (first or reported and reported.is_over):
            self._rank_failed_at = now
        if self._rank_failed_at is None or self._ending:
            return
        if now >= self._result.end_after(self._rank_failed_at, _END_SECONDS):
            self._result.fail(
                f"{self._program} has not ended within {now - self._rank_failed_at:.0f} s of the "
                "first failure: a host may be down, or a rank does not end. "
                f"{self._program} will be ended",
                now,
                first.status if first else 1,
            )
            self._end(now)

    def _end_if_left_behind(self, now: float) -> None:
        """End the command if it runs long after all ranks: srun waits for a lost slurmstepd."""
        ended_at = self._ranks.ended_at
        if ended_at is not None and now >= ended_at + RETURN_SECONDS and not self._ending:
            self._result.fail(
                f"all ranks have ended, but {self._program} has not within {now - ended_at:.0f} s: "
                "a process of the launcher on a host may be lost, and with it the exit status of "
                f"a rank. {self._program} will be ended. Check the hosts",
                now,
            )
            self._end(now)

    def _read_errors(self, events: int) -> None:
        assert self._errors is not None
        self._errors.pass_on()
        if self._errors.waits_for_resources:
            self._ranks.wait_longer(time.monotonic())
            if not self._reported_waiting:
                self._reported_waiting = True
                print_status(
                    f"{self._program} waits for nodes, cores or GPUs that another step of this "
                    "job holds"
                )
        if self._errors.closed:
            self._loop.remove(self._errors)

    def _handle_signals(self) -> None:
        now = time.monotonic()
        for number in self._loop.signals.take():
            if self._result.is_last_stop(number, now):
                self._end(now)
            elif self._errors is not None and number == signal.SIGTERM:
                self._pass_term_at = now + _ABORT_SECONDS
            elif number in HELD:
                self._held.add(number)
            else:
                self._command.signal(number)
        for number in filter(self._ranks.all_handle, list(self._held)):
            self._held.remove(number)
            self._command.signal(number)
        if self._pass_term_at is not None and now >= self._pass_term_at:
            self._pass_term_at = None
            # Slurm has signalled the ranks itself where it ends the whole job.
            if self._errors is None or not self._errors.aborted:
                self._command.signal(signal.SIGTERM)

    def _end(self, now: float) -> None:
        self._ending = True
        self._processes.end(now)

    def _status_of_ranks(self, status: int, by_signal: bool) -> int:
        """Derive the exit status of the launch from that of the command; print the reason.

        by_signal: whether a signal has ended the command itself.
        """
        self._report.receive()
        if self._report.saved or not status and self._ranks.complete:
            return status

        first = self._errors.first if self._errors is not None else None
        if self._result.reason:
            return status or 1
        if not status:  # for example a site's wrapper around the command, which loses the status
            status = 1
            print_error(f"{self._program} ended with exit status 0 before all ranks had joined")
        elif first is not None:
            status = first.status
            who = f"rank {first.ranks}" + (f" on {first.host}" if first.host else "")
            rank = int(first.ranks) if first.ranks.isdecimal() else None
            self._result.process_ended(who, status, time.monotonic(), others=False, rank=rank)
        elif by_signal or status < 128:
            ended = f"{self._program} {describe_status(status)}"
            self._result.fail(ended, time.monotonic(), status)
        else:
            ended = f"{self._program} reports that a rank {describe_status(status)}"
            self._result.fail(ended, time.monotonic(), status)

        if not self._ranks.complete:
            self._print_missing()
        return status

    def _rank_failed_by_itself(self) -> bool:
        first = self._errors.first if self._errors is not None else None
        ended = (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
        return (first.status if first else self._result.status) not in ended

    def _print_missing(self) -> None:
        without = self._ranks.hosts_without_ranks()
        where = f", and none on {', '.join(without)}" if without else ""
        print_error(
            f"{self._ranks.missing()}{where}. See the messages of {self._program} above, and check "
            f"that the folder {os.getcwd()} exists on every host"
        )


def rank_arguments(plan: Plan) -> list[str]:
    """Return the arguments of rank_start.main()."""
    checksum = checksum_of(plan.script) if plan.script else None
    text = "" if checksum is None else str(checksum)
    return [os.getcwd(), plan.script, text, plan.options.output_dir, *plan.program]


@contextmanager
def _more_open_files(count: int) -> Iterator[None]:
    """Raise the limit of open files: each rank holds a connection until all have joined."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
