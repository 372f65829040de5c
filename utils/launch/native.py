"""Running the one native command of a plan, srun or an mpiexec: signals passed on as it understands them.

Not here: the command itself (commands.py).
"""
from __future__ import annotations

import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from ..schedulers.command import SchedulerError, ask
from . import remote_shell
from .agent import start_words
from .commands import HOST_FILE, REMOTE_SHELL, host_file, native_command, remote_shell_variables
from .files import checksum_of
from .join import JoinServer
from .outcome import Outcome, in_words, say
from .plan import Plan
from .processes import Processes, Signals
from .report import Report

# "srun: error: n2: task 3: Exited with exit code 3", "srun: error: n2: tasks 2-3: Killed"
_SRUN_SAYS = re.compile(rb"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(\w[\w /-]*\w)"
                        rb"(?: \(core dumped\))?)\s*$")
_ABORT_SECONDS = 0.5  # in which srun has said that Slurm ends the step, where a stop is of Slurm's own
_ANSWER_SECONDS = 10.0


class Native:
    """The native command of a plan. A context manager, which removes the files that its words stand for."""

    def __init__(self, plan: Plan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes
        self._pid = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Native:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def start(self, words: Sequence[str], environ: Mapping[str, str],
              stderr: int | None = None) -> subprocess.Popen[bytes] | None:
        """Start it in a session of its own: PBS and a terminal signal a whole session, and it is to get each stop
        once, from here."""
        with tempfile.TemporaryFile() as file:  # nothing is left of it, whatever happens
            file.write(host_file(self._plan).encode())
            file.flush()
            words = [word.replace(HOST_FILE, f"/proc/self/fd/{file.fileno()}") for word in words]
            if REMOTE_SHELL in words:
                self._folder = tempfile.TemporaryDirectory(prefix="launch-")
                script = Path(self._folder.name) / "remote-shell"
                script.write_text(remote_shell.script(self._plan.python))
                script.chmod(0o700)
                words = [str(script) if word == REMOTE_SHELL else word for word in words]
            environ = {**environ, **remote_shell_variables(self._plan)}
            child = self._processes.start(words, environ, stderr=stderr, new_session=True, pass_fds=[file.fileno()])
            self._pid = child.pid if child else 0
            return child

    def signal(self, number: int) -> None:
        """Pass a stop on to the ranks."""
        if self._plan.means == "srun" and number in (signal.SIGTERM, signal.SIGINT):
            # At SIGTERM srun kills its tasks, at SIGINT it only tells how they are.
            step = step_of(self._plan.environ.get("SLURM_JOB_ID", ""), self._pid)
            with suppress(SchedulerError):  # the step has ended meanwhile, or Slurm does not answer
                ask(["scancel", f"--signal={signal.Signals(number).name[3:]}", step], seconds=_ANSWER_SECONDS)
            return
        if self._plan.mpiexec is not None and self._plan.mpiexec.kind == "openmpi" and number == signal.SIGTERM:
            number = signal.SIGUSR1  # at SIGTERM it kills the ranks a second or four later
        self._processes.signal(number)


def step_of(job_id: str, pid: int) -> str:
    """The step that a srun of this host has started, as scancel takes it; where that is not known, the whole job, of
    which a signal reaches all steps but not the batch script."""
    try:
        answer = ask(["scontrol", "--oneliner", "show", "step", job_id], seconds=_ANSWER_SECONDS)
    except SchedulerError:
        return job_id
    for line in answer.splitlines():
        if re.search(rf"\sSrunHost:Pid=[^\s:]*:{pid}(\s|$)", line) and (found := re.match(r"StepId=(\S+)", line)):
            return found[1]
    return job_id


def srun_ports() -> range:
    """The ports of a login host that compute nodes can reach, where the site has set SrunPortRange; else none."""
    with suppress(SchedulerError):
        found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", ask(["scontrol", "show", "config"],
                                                                   seconds=_ANSWER_SECONDS), re.MULTILINE)
        if found and int(found[1]):
            return range(int(found[1]), int(found[2]) + 1)
    return range(0)


def run_native(plan: Plan, launch_id: str, signals: Signals, report: Report) -> int:
    """Run the native command that starts the ranks themselves; returns the exit status of the launch."""
    with Processes(launch_id) as processes, Native(plan, processes) as native:
        return _NativeRun(plan, processes, native, signals, report).run()


class _NativeRun:
    """One native command from its start to its end."""

    def __init__(self, plan: Plan, processes: Processes, native: Native, signals: Signals, report: Report) -> None:
        self._plan, self._processes, self._native = plan, processes, native
        self._signals, self._report = signals, report
        self._name = Path(plan.path).name
        self._outcome = Outcome()
        self._stop_at: float | None = None  # when to pass on a SIGTERM
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._ranks = JoinServer(plan, report, self._selector)
        self._errors: SrunErrors | None = None
        self._ending = self._waiting_was_said = False

    def run(self) -> int:
        words = start_words(self._plan.python, "rank_start", rank_arguments(self._plan))
        child = self._native.start(native_command(self._plan, words), self._plan.environ,
                                   subprocess.PIPE if self._plan.means == "srun" else None)
        if child is not None and child.stderr is not None:
            self._errors = SrunErrors(child.stderr)
            self._selector.register(self._errors, selectors.EVENT_READ)
        with _more_open_files(2 * self._plan.world_size + 64):  # the child, and so the ranks, keep the user's limit
            return self._serve(child)

    def _serve(self, child: subprocess.Popen[bytes] | None) -> int:
        status = 0
        while self._processes.running:
            self._wait()
            self._handle_signals()
            now = time.monotonic()
            self._ranks.check_time(now)
            if self._ranks.problem and not self._ending:
                self._outcome.fail(self._ranks.problem, now)
                self._end(now)
            status = max([status, *(ended for _, ended in self._processes.ended())])
        if self._errors is not None:
            self._errors.drain()
        self._ranks.close()
        self._selector.close()
        if self._outcome.status:  # it was said when it happened
            return self._outcome.status
        return self._status_of_ranks(status, child is not None and (child.returncode or 0) < 0)

    def _wait(self) -> None:
        now = time.monotonic()
        due = [self._processes.kill_late(now), self._ranks.seconds_left(now),
               None if self._stop_at is None else max(0.0, self._stop_at - now)]
        for key, events in self._selector.select(min((one for one in due if one is not None), default=None)):
            if key.fileobj is self._errors and self._errors is not None:
                self._errors.pass_on()
                if self._errors.waits_for_resources:
                    self._ranks.wait_longer(now)
                    if not self._waiting_was_said:
                        self._waiting_was_said = True
                        say("srun waits for nodes, cores or GPUs that another step of this job holds")
                if self._errors.closed:
                    self._selector.unregister(self._errors)
            else:
                self._ranks.handle(key.fileobj, events)

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            now = time.monotonic()
            if self._outcome.is_last_stop(number, now):
                self._end(now)
            elif self._errors is not None and number == signal.SIGTERM:
                self._stop_at = now + _ABORT_SECONDS
            else:
                self._native.signal(number)
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop_at = None
            if self._errors is None or not self._errors.aborted:  # else Slurm has told the ranks: it ends the whole job
                self._native.signal(signal.SIGTERM)

    def _end(self, now: float) -> None:
        self._ending = True
        self._processes.end(now)

    def _status_of_ranks(self, status: int, by_signal: bool) -> int:
        """The status of the launch out of that of the native command, and what ended in words."""
        first = self._errors.first if self._errors is not None else None
        if self._report.saved() or not status and self._ranks.complete:
            return status
        if not status:  # a site's own wrapper around it, for example, that loses the status
            status = 1
            say(f"{self._name} ended with exit status 0 before all ranks had joined")
        elif first is not None:
            status = first.status
            where = f" on {first.host}" if first.host else ""
            say(f"rank {first.ranks}{where} {in_words(status)}")
        elif by_signal or status < 128:
            say(f"{self._name} {in_words(status)}")
        else:
            say(f"{self._name} reports that a rank {in_words(status)}")
        if not self._ranks.complete:
            without = self._ranks.hosts_without_ranks()
            where = f", and none on {', '.join(without)}" if without else ""
            say(f"{self._ranks.missing()}{where}. See the messages of {self._name} above, and check that the folder "
                f"{os.getcwd()} is there on every host")
        return status


def rank_arguments(plan: Plan) -> list[str]:
    """What rank_start.main() is given."""
    checksum = checksum_of(plan.script) if plan.script else None
    return [os.getcwd(), plan.script, "" if checksum is None else str(checksum), plan.options.output_dir, *plan.program]


@contextmanager
def _more_open_files(count: int) -> Iterator[None]:
    """Raise the limit of open files meanwhile, if possible: each rank holds a connection until all have joined."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(frozen=True)
class Failure:
    """The first task that failed, as srun tells it."""

    status: int
    host: str
    ranks: str  # "2" or "2-3"


class SrunErrors:
    """The standard error of srun on its way to ours, read for which task failed first.

    srun itself ends with the highest status, which is that of a task that was killed because another had failed.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        self.closed = False
        self.first: Failure | None = None
        self.waits_for_resources = False
        self.aborted = False  # whether Slurm itself is ending the step
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def pass_on(self) -> None:
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self.closed = not chunk
        with suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            self.aborted = self.aborted or line.startswith(b"srun: Job step aborted")
            self.waits_for_resources = self.waits_for_resources or b"step creation temporarily disabled" in line
            if self.first is None and (found := _SRUN_SAYS.match(line)):
                status = int(found[3]) if found[3] else _status_of(found[4].decode())
                if status:
                    self.first = Failure(status, found[1].decode(), found[2].decode())

    def drain(self) -> None:
        """Read what srun has written before it ended; what it left behind may hold the stream open."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self.closed and selector.select(0.05):
                self.pass_on()


def _status_of(description: str) -> int:
    """"Segmentation fault" -> 139; 0 where it is no signal's description."""
    return next((128 + number for number in signal.valid_signals() if signal.strsignal(number) == description), 0)
