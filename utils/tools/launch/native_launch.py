"""Run the one command of a native launcher, srun or an mpiexec, that starts all ranks."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import LaunchError
from ...host.trust import may_trust
from ...launch_protocol import Kind
from . import remote_shell
from .bootstrap import module_command
from .child_processes import HELD, TERMINATE_SECONDS
from .host_readiness import checksum_of
from .join import JoinServer
from .launch_connection import Launch
from .launch_plan import HOST_FILE, REMOTE_SHELL, Plan
from .launch_result import print_status
from .launcher_lines import LauncherErrors
from .outcome import describe_status

# Seconds from the first failure until the launcher is ended. srun itself ends the other ranks
# within about 7 seconds, Open MPI within 4; Hydra lets them run.
_END_SECONDS = 10.0
_END_SECONDS_FOR_RESTART = 5.0  # shorter if the launch may start again
_END_SECONDS_OF_HANG = 1.5  # hang or lost host: ranks that can end have ended by then
RETURN_SECONDS = 60.0  # ends a launcher that still runs this long after all ranks
_RETURN_SECONDS_OF_LOST = 5.0  # ends it earlier if it waits for a lost process or host
_GO_ON_SECONDS = 5.0  # waits before it reports that ranks without their launcher go on
_REPORT_SECONDS = 0.5  # limit for last reports after the launcher has ended
_ABORT_SECONDS = 0.5  # srun reports within this time that Slurm itself is ending the step


class NativeLaunch:
    """The command of a native launcher, from its start to its end."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._plan, self._result = launch, launch.plan, launch.result
        self._processes, self._notices, self._loop = launch.processes, launch.notices, launch.loop
        self._program = os.path.basename(launch.plan.method.path)
        self._ranks = JoinServer(launch.plan, launch.id, launch.notices, launch.loop, launch.result)
        self._errors = LauncherErrors(None)
        self._restarts = launch.plan.options.spare or launch.plan.options.max_restarts
        self._held: set[int] = set()  # signals for which not all ranks have a handler yet
        self._orphans: dict[str, str] = {}  # JoinServer.orphaned, if no failure came first
        self._orphaned_at = math.inf
        self._reported_waiting = self._ending = self._said_going_on = False
        self._probed = False  # whether the hosts were probed after a failure

    def run(self) -> None:
        method, result = self._plan.method, self._result
        result.launcher.name = self._program
        words = module_command(self._plan.python, "rank_start", rank_arguments(self._plan))
        child = start_command(
            self._launch,
            method.command(self._plan, words),
            self._plan.environ,
            subprocess.PIPE if method.reports_errors else None,
        )
        self._pid = self._ranks.command_pid = child.pid if child else 0
        if child is not None and child.stderr is not None:
            self._errors = LauncherErrors(child.stderr)
            self._loop.add(self._errors, self._read_errors)

        # The command has started: it and the ranks keep the user's limit of open files.
        with more_open_files(2 * self._plan.world_size + 64):
            result.launcher.status = self._wait_for_end()
            self._errors.drain()
            self._receive_last_reports()
            self._ranks.note_unresponsive()
            self._handle_orphans(time.monotonic())
            self._ranks.close()
        result.launcher.killed = child is not None and (child.returncode or 0) < 0
        self._note_errors()
        if not self._ranks.complete:
            self._note_missing()

    def _note_errors(self) -> None:
        """Note what the launcher has printed: ends of ranks, and why Slurm has ended them."""
        errors, result, hosts = self._errors, self._result, self._plan.hosts
        now = time.monotonic()
        for rank, (status, host) in errors.failed.items():
            result.note_end(rank, status, host or None, now)
        ended_by_us = result.was_stopped or self._ending
        reason, failed_hosts = errors.reason(stopped=ended_by_us)
        for failed in failed_hosts:
            result.host_lost(failed, f"Slurm has ended the ranks: {reason}", errors.failed_at)
        for lost in errors.daemons_lost if not ended_by_us else ():
            text = f"{self._program} has lost its daemon on {lost}, and ended the ranks"
            result.launcher_gone(lost, text, now)
        if errors.out_of_memory is not None:
            only = hosts[0] if len(hosts) == 1 else None
            memory = errors.out_of_memory
            result.out_of_memory = memory._replace(host=memory.host or only)
        result.slurm_reason = reason
        result.slurm_signalled = errors.signalled_before

    def _note_missing(self) -> None:
        """Note which ranks have not joined; the first problem counts."""
        without = self._ranks.hosts_without_ranks()
        where = f", and none on {', '.join(without)}" if without else ""
        ended = describe_status(self._result.launcher.status or 0)
        kind: Kind = "refused" if self._errors.refused else "launch"
        self._result.fail(
            f"{self._program} {ended} before all ranks had joined. {self._ranks.missing()}{where}. "
            f"See the messages of {self._program} above, and check that the folder {os.getcwd()} "
            "exists on every host",
            time.monotonic(),
            self._result.launcher.status or 1,
            kind=kind,
        )

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
            if self._ranks.problem and not self._ending:
                without = self._ranks.hosts_without_ranks()
                host = without[0] if len(without) == 1 else None
                self._result.fail(self._ranks.problem, now, host=host)
                self._end(now)
            status = max([status, *(ended for _, ended in self._processes.ended())])
        return status

    def _receive_last_reports(self) -> None:
        """Receive the last reports of the ranks' parents."""
        limit = time.monotonic() + _REPORT_SECONDS
        while self._ranks.complete and self._ranks.running and time.monotonic() < limit:
            self._loop.run_once(limit - time.monotonic())
            self._loop.take_signals()

    def _end_if_failed(self, now: float) -> None:
        """End the command if it still runs long after a rank failed.

        Hydra waits for the other ranks, and srun for a host that is down.
        """
        result, reported = self._result, self._notices.first_cause
        # A program may go on or try again after an exception that it has reported.
        is_over = reported is not None and reported.is_over
        if result.failed_at is None and (self._errors.first or is_over):
            result.failed_at = now
        if result.failed_at is None or self._ending:
            return
        if not self._probed:
            self._probed = True
            self._ranks.probe()
        seconds = _END_SECONDS_FOR_RESTART if self._restarts else _END_SECONDS
        if self._restarts and is_over:
            seconds = _END_SECONDS_OF_HANG
        if now >= result.end_after(result.failed_at, seconds):
            result.launcher.late = now - result.failed_at
            self._ranks.note_unresponsive()
            self._end(now, min(seconds, TERMINATE_SECONDS))

    def _end_if_left_behind(self, now: float) -> None:
        """End the command if it runs long after all ranks: it waits for a lost process or host."""
        ended_at = self._ranks.ended_at
        is_lost = self._orphans or self._result.lost_hosts
        seconds = _RETURN_SECONDS_OF_LOST if is_lost else RETURN_SECONDS
        if ended_at is None or self._ending or now < ended_at + seconds:
            return
        print_status(
            f"all ranks have ended, but {self._program} has not within {now - ended_at:.0f} s: a "
            "host, or a process of the launcher there, may be lost. It will be ended"
        )
        self._end(now)

    def _handle_orphans(self, now: float) -> None:
        """Replace a host on which a process of the launcher was killed by a spare, or report it.

        Losses after a failure or a stop are consequences.
        """
        result = self._result
        if not self._orphans and self._ranks.orphaned:
            if not (self._ending or result.failed_at or result.was_stopped):
                self._orphans, self._orphaned_at = dict(self._ranks.orphaned), now
        for host, text in self._orphans.items():
            result.launcher_gone(host, text, self._orphaned_at)
            if self._plan.spares and not self._ending:
                self._end(now, _END_SECONDS_OF_HANG)
            elif not self._said_going_on and now >= self._orphaned_at + _GO_ON_SECONDS:
                self._said_going_on = True
                print_status(f"{text}. They go on")

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
                self._result.end_now(number, now)
                self._end(now)
            elif self._plan.method.scheduler == "slurm" and number == signal.SIGTERM:
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
        self._result.launcher.ended_at = now
        self._processes.end(now, seconds)


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


def _folder_for_programs() -> str:
    """Return the first folder in which nobody else can exchange a program: $TMPDIR, /tmp, home.

    Raises LaunchError where there is none.
    """
    remedy = "set TMPDIR to a folder that is yours alone"
    problem = ""
    for folder in (tempfile.gettempdir(), "/tmp", os.path.expanduser("~")):
        try:
            os.close(may_trust(folder, remedy, is_parent=True))
            return folder
        except OSError as error:
            problem = problem or str(error)
    raise LaunchError(f"no folder for the remote shell of mpiexec: {problem}")


def start_command(
    launch: Launch, words: Sequence[str], environ: Mapping[str, str], stderr: int | None = None
) -> subprocess.Popen[bytes] | None:
    """Start srun or an mpiexec; None where that is not possible."""
    plan = launch.plan
    with tempfile.TemporaryFile() as file:  # has no name, so it cannot be left behind
        file.write(plan.method.host_file(plan).encode())
        file.flush()
        words = [word.replace(HOST_FILE, f"/proc/self/fd/{file.fileno()}") for word in words]
        if REMOTE_SHELL in words:
            folder = tempfile.TemporaryDirectory(prefix="launch-", dir=_folder_for_programs())
            script = Path(launch.files.enter_context(folder), "remote-shell")
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
