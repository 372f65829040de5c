"""Run the one command of a native launcher, srun or an mpiexec, that starts all ranks."""

from __future__ import annotations

import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

from ...job.slurm_job import expand_hostlist
from ...launch_report import Failure
from . import remote_shell
from .bootstrap import module_command
from .child_processes import HELD, TERMINATE_SECONDS
from .host_readiness import checksum_of
from .join import JoinServer
from .launch_connection import Launch
from .launch_plan import HOST_FILE, REMOTE_SHELL, Plan
from .launch_result import OutOfMemory, describe_status, print_error, print_status

_END_SECONDS = 30.0  # after the first failure: ranks and srun itself need up to 20
_END_SECONDS_FOR_RESTART = 5.0  # the same where the launch may start again
_END_SECONDS_OF_HANG = (
    1.5  # the same after a hang or a lost host: all ranks that still can have ended
)
RETURN_SECONDS = 60.0  # after the end of all ranks
_RETURN_SECONDS_OF_LOST = 5.0  # the same where it is known to wait for a process or a host
_LAST_SECONDS = 2.0  # before the end of a command: a rank that ended then may be what ended it
_GO_ON_SECONDS = 5.0  # after which a launcher that has lost a process on a host has not ended
_REPORT_SECONDS = 0.5
_ABORT_SECONDS = 0.5  # srun reports within this time that Slurm itself is ending the step


class NativeLaunch:
    """The command of a native launcher, from its start to its end."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._plan, self._result = launch, launch.plan, launch.result
        self._processes, self._notices, self._loop = launch.processes, launch.notices, launch.loop
        self._program = os.path.basename(launch.plan.method.path)
        self._ranks = JoinServer(launch.plan, launch.id, launch.notices, launch.loop, launch.result)
        self._errors = SrunErrors(None)
        self._restarts = launch.plan.options.spare or launch.plan.options.max_restarts
        self._rank_failed_at: float | None = None
        self._held: set[int] = set()  # signals for which not all ranks have a handler yet
        self._orphans: dict[str, str] = {}  # of the JoinServer, if they came first
        self._orphaned_at = math.inf
        self._reported_waiting = self._ending = False

    def run(self) -> None:
        method = self._plan.method
        words = module_command(self._plan.python, "rank_start", rank_arguments(self._plan))
        child = start_command(
            self._launch,
            method.command(self._plan, words),
            self._plan.environ,
            subprocess.PIPE if method.reports_errors else None,
        )
        self._pid = self._ranks.command_pid = child.pid if child else 0
        if child is not None and child.stderr is not None:
            self._errors = SrunErrors(child.stderr)
            self._loop.add(self._errors, self._read_errors)

        # The command has started: it and the ranks keep the user's limit of open files.
        with more_open_files(2 * self._plan.world_size + 64):
            status = self._wait_for_end()
            self._errors.drain()
            self._receive_last_reports()
            self._note_orphans(status)
            self._ranks.close()

        self._note_reason()
        self._note_end_of_first()
        if self._result.status:  # the reason was printed when it happened
            if self._ranks.lost_rank:  # perhaps because others could not start
                self._print_missing()
            return
        by_signal = child is not None and (child.returncode or 0) < 0
        self._result.status = self._status_of_ranks(status, by_signal)

    def _note_reason(self) -> None:
        """Note why Slurm has ended the ranks, if it has."""
        errors, result, hosts = self._errors, self._result, self._plan.hosts
        ended_by_us = result.was_stopped or bool(result.status)
        reason, lost_hosts = errors.reason(stopped=ended_by_us)
        result.lost_hosts.update(lost_hosts)
        if errors.out_of_memory is not None:
            host = errors.out_of_memory.host or (hosts[0] if len(hosts) == 1 else None)
            result.out_of_memory = errors.out_of_memory._replace(host=host)
        if lost_hosts or not self._rank_failed_by_itself():
            if result.out_of_memory is not None and not lost_hosts:
                reason, result.reason_host = str(result.out_of_memory), result.out_of_memory.host
            if lost_hosts:
                result.reason_host = lost_hosts[0]
            if reason:
                result.reason = f"Slurm has ended the ranks: {reason}"

    def _note_end_of_first(self) -> None:
        """Note how the rank ended that failed first. srun reports each task that fails."""
        first = self._notices.first_cause
        if first is None or first.rank is None or not self._plan.method.reports_errors:
            return
        failed = self._errors.failed.get(first.rank)
        if failed is not None or self._ranks.complete:
            status, host = failed or (0, first.host or "")
            self._result.note_end(first.rank, status, host or None)

    def _wait_for_end(self) -> int:
        """Serve until the command has ended; return its exit status."""
        status = 0
        while self._processes.running:
            self._loop.run_once(1.0, self._processes.kill_late(time.monotonic()))
            self._handle_signals()
            now = time.monotonic()
            self._end_if_failed(now)
            self._end_if_left_behind(now)
            self._handle_orphans(now)
            self._ranks.check_time(now)
            if self._ranks.problem:
                without = self._ranks.hosts_without_ranks()
                host = without[0] if len(without) == 1 else None
                self._give_up(self._ranks.problem, now, host=host)
            status = max([status, *(ended for _, ended in self._processes.ended())])
        return status

    def _receive_last_reports(self) -> None:
        """Receive what the watch of each host reports at the end of its ranks."""
        limit = time.monotonic() + _REPORT_SECONDS
        while not self._result.status and self._ranks.watched and time.monotonic() < limit:
            self._loop.run_once(limit - time.monotonic())
            self._loop.take_signals()

    def _end_if_failed(self, now: float) -> None:
        """End the command if it still runs long after a rank failed: it waits for a dead host."""
        first = self._errors.first
        reported = self._notices.first_cause  # after an exception, a program may go on or try again
        if self._rank_failed_at is None and (first or reported and reported.is_over):
            self._rank_failed_at = now
        failed_at = self._rank_failed_at
        seconds = _END_SECONDS_FOR_RESTART if self._restarts else _END_SECONDS
        if self._restarts and reported is not None and reported.is_over:
            seconds = _END_SECONDS_OF_HANG
        if failed_at is not None and now >= self._result.end_after(failed_at, seconds):
            self._give_up(
                f"{self._program} has not ended within {now - failed_at:.0f} s of the "
                "first failure: a host may be down, or a rank does not end. "
                f"{self._program} will be ended",
                now,
                first.status if first else 1,
                end_seconds=min(seconds, TERMINATE_SECONDS),
            )

    def _end_if_left_behind(self, now: float) -> None:
        """End the command if it runs long after all ranks: it waits for a lost process or host."""
        ended_at, lost = self._ranks.ended_at, sorted(self._result.lost_hosts)
        seconds = _RETURN_SECONDS_OF_LOST if self._orphans or lost else RETURN_SECONDS
        if ended_at is None or now < ended_at + seconds:
            return
        problem = (
            f"the connection to {', '.join(lost)} was lost: the host or its network has failed. "
            f"The other ranks have ended, but {self._program} has not. It will be ended"
        )
        if not lost:
            problem = (
                f"all ranks have ended, but {self._program} has not within {now - ended_at:.0f} s: "
                "a process of the launcher on a host may be lost, and with it the exit status of "
                f"a rank. {self._program} will be ended. Check the hosts"
            )
        self._give_up(problem, now, host=lost[0] if lost else None)

    def _handle_orphans(self, now: float) -> None:
        """Leave out a host on which a process of the launcher was killed, for a spare; or say it.

        What happens after a failure or a stop is no cause.
        """
        result, first = self._result, self._notices.first_cause
        if not self._orphans and self._ranks.orphaned:
            known = first is not None and first.kind != "killed"
            if not (known or self._ending or result.status or result.was_stopped):
                self._orphans, self._orphaned_at = dict(self._ranks.orphaned), now
        for host, text in self._orphans.items():
            if self._plan.spares:
                self._give_up(text, now, host=host, end_seconds=_END_SECONDS_OF_HANG)
            elif now >= self._orphaned_at + _GO_ON_SECONDS:
                self._orphaned_at = math.inf
                print_status(f"{text}. They go on")

    def _note_orphans(self, status: int) -> None:
        """Note that hosts have failed, whatever their ranks or the command have reported then."""
        self._handle_orphans(time.monotonic())
        if self._orphans and not self._result.was_stopped:
            host, *more = self._ranks.orphaned
            text = self._ranks.orphaned[host] + f". The same on {', '.join(more)}" * bool(more)
            self._notices.first_cause = Failure(text, "launch", None, host)
            self._result.fail(text, time.monotonic(), status or 1, host=host)

    def _read_errors(self, events: int) -> None:
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
        for number in self._loop.take_signals():
            if self._result.is_last_stop(number, now):
                self._end(now)
            elif self._plan.method.reports_errors and number == signal.SIGTERM:
                self._loop.after(_ABORT_SECONDS, self._pass_term)
            elif number in HELD:
                self._held.add(number)
            else:
                self._signal(number)
        for number in filter(self._ranks.all_handle, list(self._held)):
            self._held.remove(number)
            self._signal(number)

    def _pass_term(self) -> None:
        """Pass SIGTERM on, unless Slurm has sent it itself, as it ends the whole job."""
        if not self._errors.aborted:
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        self._plan.method.send_signal(number, self._pid, self._plan, self._processes)

    def _end(self, now: float, seconds: float = TERMINATE_SECONDS) -> None:
        self._ending = True
        self._processes.end(now, seconds)

    def _give_up(
        self,
        problem: str,
        now: float,
        status: int = 1,
        host: str | None = None,
        end_seconds: float = TERMINATE_SECONDS,
    ) -> None:
        """End the command because of a problem, unless it is being ended."""
        if not self._ending:
            self._result.fail(problem, now, status, host=host)
            self._end(now, end_seconds)

    def _status_of_ranks(self, status: int, by_signal: bool) -> int:
        """Derive the exit status of the launch from that of the command; print the reason.

        by_signal: whether a signal has ended the command itself.
        """
        if self._notices.saved or not status and self._ranks.complete:
            return status

        first = self._errors.first
        if self._result.reason:
            return status or 1
        if not status:  # for example a site's wrapper around the command, which loses the status
            status = 1
            print_error(f"{self._program} ended with exit status 0 before all ranks had joined")
        elif first is not None:
            status = first.status
            rank = int(first.ranks) if first.ranks.isdecimal() else None
            who = f"each of ranks {first.ranks}" if rank is None else f"rank {rank}"
            who += f" on {first.host}" if first.host else ""
            self._result.process_ended(
                who, status, time.monotonic(), others=False, rank=rank, host=first.host or None
            )
        else:
            who = "" if by_signal or status < 128 else "reports that a rank "
            self._note_first_end(f"{self._program} {who}{describe_status(status)}", status)

        if not self._ranks.complete:
            self._print_missing()
        return status

    def _note_first_end(self, text: str, status: int) -> None:
        """Note that the command has failed, and which rank was the first to end just before.

        Hydra kills the other ranks before one of them can report that it has lost the first.
        """
        now = time.monotonic()
        late = [end for end in self._ranks.ends if end[0] > now - _LAST_SECONDS]
        if not late or not self._ranks.complete:
            self._result.fail(text, now, status)
            return
        _, rank, host = late[0]
        text += f". The first to end was rank {rank} on {host}"
        kind = "killed" if status >= 128 else "status"
        self._result.fail(text, now, status, kind=kind, rank=rank, host=host)

    def _rank_failed_by_itself(self) -> bool:
        first = self._errors.first
        result = self._result
        if self._errors.signalled_before and not result.was_stopped and not result.status:
            return False
        ended = (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
        return (first.status if first else result.status) not in ended

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
    words = [*plan.starter, *plan.program]
    return [os.getcwd(), plan.script, text, plan.options.output_dir, *words]


@contextmanager
def more_open_files(count: int) -> Iterator[None]:
    """Raise the limit of open files for a while: each rank or agent holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_command(
    launch: Launch, words: Sequence[str], environ: Mapping[str, str], stderr: int | None = None
) -> subprocess.Popen[bytes] | None:
    """Start srun or an mpiexec; None where that is not possible."""
    plan = launch.plan
    with tempfile.TemporaryFile() as file:  # has no name, so nothing of it can be left
        file.write(plan.method.host_file(plan).encode())
        file.flush()
        words = [word.replace(HOST_FILE, f"/proc/self/fd/{file.fileno()}") for word in words]
        if REMOTE_SHELL in words:
            script = Path(
                launch.files.enter_context(TemporaryDirectory(prefix="launch-")), "remote-shell"
            )
            script.write_text(remote_shell.script(plan.python))
            script.chmod(0o700)
            words = [str(script) if word == REMOTE_SHELL else word for word in words]
        return launch.processes.start(
            words,
            {**environ, **plan.method.variables(plan)},
            stderr=stderr,
            stdin=0 if plan.options.input else b"",
            pass_fds=[file.fileno()],
        )


# "srun: error: n2: task 3: Exited with exit code 3", "srun: error: n2: tasks 2-3: Killed"
_TASK_FAILED = re.compile(
    rb"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(\w[\w /-]*\w)"
    rb"(?: \(core dumped\))?)\s*$"
)
# Why Slurm ends a step: "srun: error: Node failure on n2", "slurmstepd-n1: error: *** STEP 7.0 ON
# n1 CANCELLED AT 2026-11-21T04:04:15 DUE TO TIME LIMIT ***". srun itself ends one without a reason,
# or since 26.05 DUE TO TASK FAILURE. A line of 26.05 begins "[2026-11-28T08:43:46.113] error: ".
_NODE_FAILED = re.compile(rb"^srun: error: Node failure on (\S+)\s*$")
_BY_SLURM = rb"^(?:slurmstepd(?:-(\S+))?:|\[\d{4}-\d\d-\d\dT[\d:.]+\]) error: "
_CANCELLED = re.compile(
    _BY_SLURM + rb"\*{3} (?:JOB \S+ ON \S+ CANCELLED AT"
    rb"|STEP .* CANCELLED AT .* DUE TO (?!TASK FAILURE))"
)
# A signal from outside: a preemption, scancel, ddpkit launch itself. Before 26.05 the line has no
# reason, and srun causes the same one after a task has failed.
_SIGNALLED = re.compile(_BY_SLURM + rb"\*{3} STEP .* CANCELLED AT (?:\S+ \*{3}|.* DUE to SIGNAL )")
# Of the accounting of jobs: "StepId=41.0 exceeded memory limit (2092810240 > 629145600), being
# killed" on the host, then "Exceeded job memory limit" on any. Of a cgroup: "Detected 1 oom_kill
# event in StepId=41.0. Some of the step tasks have been OOM Killed."
_OUT_OF_MEMORY = re.compile(
    _BY_SLURM + rb"(\S+ exceeded memory limit .*|Exceeded \w+ memory limit.*"
    rb"|Detected \d+ oom[-_]kill event.*)"
)
_KILLED_FOR_MEMORY = "Out Of Memory"  # srun's description of a task


class TaskFailure(NamedTuple):
    """A task that failed, as srun reports it."""

    status: int  # as of a shell: 139 for a segmentation fault
    host: str
    ranks: str  # "2" or "2-3"


class SrunErrors:
    """The standard error of srun.

    srun itself ends with the highest status: that of a task killed because another had failed.
    first: the first task that failed before Slurm ended the step. failed: status and host of each
    rank that failed. out_of_memory: what Slurm says first about memory. signalled_before: something
    outside had signalled the step before the first task failed. aborted: Slurm itself is ending the
    step. waits_for_resources: another step of the job holds them.
    """

    def __init__(self, pipe: IO[bytes] | None) -> None:
        """pipe: None for a launcher that is not srun, whose errors are not read."""
        self._descriptor = -1 if pipe is None else pipe.fileno()
        self._rest = b""
        self.closed = pipe is None
        self.first: TaskFailure | None = None
        self.failed: dict[int, tuple[int, str]] = {}
        self.out_of_memory: OutOfMemory | None = None
        self.waits_for_resources = False
        self.aborted = False
        self._by_slurm: list[bytes] = []  # lines that say why Slurm ends the step
        self.signalled_before = False
        self._signalled = b""  # the line that says that something outside has signalled the step
        if pipe is not None:
            os.set_blocking(self._descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def pass_on(self) -> None:
        """Write what srun has written so far to our standard error."""
        try:
            chunk = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return
        self.closed = not chunk
        with suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            self._note(line)

    def drain(self) -> None:
        """Read what srun wrote before it ended; a surviving child may hold the stream open."""
        while not self.closed and select.select([self], [], [], 0.05)[0]:
            self.pass_on()

    def reason(self, *, stopped: bool) -> tuple[str, list[str]]:
        """Return why Slurm has ended the step, in its own words, or ""; and the failed hosts.

        stopped: whether ddpkit launch itself has signalled or ended the step.
        """
        lost = [found for line in self._by_slurm if (found := _NODE_FAILED.match(line))]
        signalled = b"" if stopped else self._signalled
        line = lost[0][0] if lost else next(iter(self._by_slurm), signalled)
        return line.decode(errors="replace").rstrip(), [found[1].decode() for found in lost]

    def _note(self, line: bytes) -> None:
        if line.startswith(b"srun: Job step aborted"):
            self.aborted = True
        if b"step creation temporarily disabled" in line:
            self.waits_for_resources = True
        if _NODE_FAILED.match(line) or _CANCELLED.match(line):
            self._by_slurm.append(line)
        if _SIGNALLED.match(line) and (self.first is None or b" DUE " in line):
            self._signalled = self._signalled or line
        if self.out_of_memory is None and (memory := _OUT_OF_MEMORY.match(line)):
            host = memory[1].decode() if memory[1] else None
            self.out_of_memory = OutOfMemory(memory[2].decode(errors="replace").rstrip(), host)
        if found := _TASK_FAILED.match(line):
            self._note_task(found)

    def _note_task(self, found: re.Match[bytes]) -> None:
        host, ranks = found[1].decode(), found[2].decode()
        description = found[4].decode() if found[4] else ""
        status = int(found[3]) if found[3] else _status_of(description)
        if not status:
            return
        with suppress(ValueError):
            for rank in expand_hostlist(f"[{ranks}]"):
                self.failed.setdefault(int(rank), (status, host))
        by_memory = description == _KILLED_FOR_MEMORY
        if by_memory and self.out_of_memory is not None and self.out_of_memory.host is None:
            self.out_of_memory = self.out_of_memory._replace(host=host)
        if self.first is None and (by_memory or not self._by_slurm and not self.out_of_memory):
            self.first = TaskFailure(status, host, ranks)
            self.signalled_before = bool(self._signalled)


def _status_of(description: str) -> int:
    """Convert "Segmentation fault" to 139; 0 where no signal has this description."""
    if description == _KILLED_FOR_MEMORY:
        return 128 + signal.SIGKILL
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return 128 + number
    return 0
