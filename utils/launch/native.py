"""Running the one native command of a plan, srun or an mpiexec: signals passed on as it understands them.

Not here: the command itself (commands.py).
"""
from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from ..schedulers.command import SchedulerError, ask
from . import remote_shell
from .commands import HOST_FILE, REMOTE_SHELL, host_file, native_command, remote_shell_variables
from .outcome import Outcome, in_words, say
from .plan import Plan
from .processes import Processes, Signals

# "srun: error: n2: task 3: Exited with exit code 3", "srun: error: n2: tasks 2-3: Killed"
_SRUN_SAYS = re.compile(rb"^srun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code (\d+)|(\w[\w /-]*\w)(?: \(core "
                        rb"dumped\))?)\s*$")
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


def run_native(plan: Plan, launch_id: str, signals: Signals) -> int:
    """Run the native command that starts the ranks themselves; returns the exit status of the launch."""
    outcome = Outcome()
    with Processes(launch_id) as processes, Native(plan, processes) as native:
        child = native.start(native_command(plan, plan.program), plan.environ,
                             subprocess.PIPE if plan.means == "srun" else None)
        errors = _Errors(child.stderr) if child is not None and child.stderr is not None else None
        status = 0
        stop_at: float | None = None  # when to pass on a SIGTERM
        while processes.running:
            with selectors.DefaultSelector() as selector:
                selector.register(signals, selectors.EVENT_READ)
                if errors is not None and not errors.closed:
                    selector.register(errors, selectors.EVENT_READ)
                now = time.monotonic()
                due = [processes.kill_late(now), None if stop_at is None else max(0.0, stop_at - now)]
                for key, _ in selector.select(min((one for one in due if one is not None), default=None)):
                    if key.fileobj is errors and errors is not None:
                        errors.pass_on()
            for number in signals.take():
                now = time.monotonic()
                if outcome.is_last_stop(number, now):
                    processes.end(now)
                elif errors is not None and number == signal.SIGTERM:
                    stop_at = now + _ABORT_SECONDS
                else:
                    native.signal(number)
            if stop_at is not None and time.monotonic() >= stop_at:
                stop_at = None
                if errors is None or not errors.aborted:  # else Slurm has told the ranks, as it ends the whole job
                    native.signal(signal.SIGTERM)
            status = max([status, *(ended for _, ended in processes.ended())])
        if errors is not None:
            errors.drain()
            status = errors.first_status if status and errors.first_status else status
    if status:
        say(f"{Path(plan.path).name} {in_words(status)}")
    return status


class _Errors:
    """The standard error of srun on its way to ours, read for which task failed first.

    srun itself ends with the highest status, which is that of a task that was killed because another had failed.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        self.closed = False
        self.first_status = 0
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
            if not self.first_status and (found := _SRUN_SAYS.match(line)):
                self.first_status = int(found[1]) if found[1] else _status_of(found[2].decode())

    def drain(self) -> None:
        """Read what srun has written before it ended; what it left behind may hold the stream open."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self.closed and selector.select(0.05):
                self.pass_on()


def _status_of(description: str) -> int:
    """"Segmentation fault" -> 139; 0 where it is no signal's description."""
    return next((128 + number for number in signal.valid_signals() if signal.strsignal(number) == description), 0)
