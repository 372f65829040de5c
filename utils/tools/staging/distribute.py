"""Bring the archive to the nodes of a launch: by sbcast, by MPI, or by reading it on each node."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ...job import exclude_file
from ...job.notation import same_host
from ...launch_protocol import FAILURE_FILE
from ..cli.interpreter import import_path
from . import RECEIVED, Archive, StagingError
from .archive import get_archive
from .broadcast import FAILED, NOT_WRITTEN
from .kept import cleanup_at_signals
from .node_copy import candidates, is_kept
from .packages import find_environment
from .room import free_bytes, needed_bytes

_PROBE_SECONDS = 60.0
MPI_SECONDS = 60.0  # seconds to start a process on each node; the archive gets more time:
_SLOW_BYTES_PER_SECOND = 25e6
END_SECONDS = 10.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SHOWN = 8  # nodes in a message
_NOT_OF_RANKS = (FAILURE_FILE, exclude_file.VARIABLE)  # not for spares: no ranks fail there


def stage(
    python: str,
    hosts: Sequence[str],
    own_host: str,
    environ: Mapping[str, str],
    *,
    spares: int,
    one_per_host: Sequence[str],
    stage_dir: str,
    also: Sequence[str],
    note: Callable[[str], None],
) -> list[str]:
    """Return the command line prefix of each rank, which stages the packages of its Python.

    It is empty if staging is not possible; note() then prints why.

    hosts: hosts of the ranks; own_host: this one. environ: variables of the ranks. spares: number
    of further hosts. one_per_host: command line prefix that lets mpiexec start one process on each
    host; --python may follow it.
    """
    began = time.monotonic()
    try:
        environment = find_environment(python, also)
        if problem := environment.shared_torch:
            note(f"staging: {problem}")
        archive = get_archive(environment, note)
    except (StagingError, OSError) as error:
        note(f"warning: the packages are not staged: {error}. The ranks use the shared ones")
        return []
    received = ""
    folders = candidates(stage_dir, environ)
    # Later jobs find copies on most nodes; a node without a copy reads the archive itself.
    if not stage_dir and _ends_with_job(folders[0], environ) and not is_kept(archive.key, folders):
        note(
            f"staging: $TMPDIR, {folders[0]}, is removed with the job, and the copy with it. To "
            "keep it for the next job, name a local folder that stays: --stage-dir"
        )
    all_hosts = len(hosts) + spares
    is_own_kept = is_kept(archive.key, folders) and any(same_host(own_host, host) for host in hosts)
    if all_hosts > 1 and not is_own_kept:
        target = os.path.join(folders[0], RECEIVED.format(os.urandom(8).hex()))
        if environ.get("SLURM_JOB_ID"):
            received = _send_by_sbcast(archive, target, all_hosts, note)
        elif len(hosts) > 1 and (
            mpi4py := next(filter(_has_mpi4py, dict.fromkeys((python, sys.executable))), "")
        ):
            words = [*one_per_host, "--python", mpi4py, "--", "python", "-c"]
            _send_by_mpi(archive, target, len(hosts), stage_dir, words, note)
            received = target  # a node uses the part of it that has arrived
    order = {
        "archive": tuple(archive),
        "python": python,
        "stage_dir": stage_dir,
        "received": received,
        "seconds": time.monotonic() - began,
        "launch": f"{os.getpid()}-{os.urandom(6).hex()}",
    }
    code = _code(f"start import main; sys.exit(main({order!a}, sys.argv[1:]))")
    return [python, "-I", "-S", "-c", code]


@contextmanager
def on_spares(
    words: Sequence[str], starter: Sequence[str], variables: Mapping[str, str]
) -> Iterator[None]:
    """Meanwhile make the copy on spare hosts, too, so that a restart has it at once.

    words: start a program on each spare host. starter: result of stage(). variables: set for the
    process that starts ranks.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_OF_RANKS}
    environ |= variables
    process = subprocess.Popen(
        [*words, "--", *starter, "true"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_ends_with_parent(),
    )
    try:
        yield
    finally:
        _end(process)


def _ends_with_job(folder: str, environ: Mapping[str, str]) -> bool:
    """Whether a folder's name contains the job's number, as $TMPDIR does in PBS."""
    ids = (environ.get(name, "").partition(".")[0] for name in ("PBS_JOBID", "SLURM_JOB_ID"))
    names = re.split(r"[^0-9A-Za-z]+", folder)
    return any(job_id and job_id.partition("[")[0] in names for job_id in ids)


def _code(what: str) -> str:
    """Return code that imports from a module of this folder without site-packages."""
    root, name = import_path(__name__, __file__)
    return f"import sys; sys.path.insert(0, {root!a}); from {name.rpartition('.')[0]}.{what}"


def _has_mpi4py(python: str) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        words = [python, "-c", "import mpi4py"]
        done = subprocess.run(words, capture_output=True, timeout=_PROBE_SECONDS)
        return done.returncode == 0
    return False


def _send_by_mpi(
    archive: Archive,
    target: str,
    hosts: int,
    stage_dir: str,
    words: Sequence[str],
    note: Callable[[str], None],
) -> None:
    """Run broadcast.main() on all hosts. If it fails, nodes lack the file or its end.

    words: command line prefix for the Python code.
    """
    start, seconds = time.monotonic(), MPI_SECONDS + archive.size / _SLOW_BYTES_PER_SECOND
    order = {
        "archive": tuple(archive),
        "target": target,
        "stage_dir": stage_dir,
        "hosts": hosts,
        "seconds": seconds,
    }
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_OF_RANKS}
    words = [*words, _code(f"broadcast import main; main({order!a})")]
    try:
        with (
            cleanup_at_signals(),
            subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_ends_with_parent(),
            ) as process,
        ):
            try:
                output, problem = _read_output(process, start + seconds)
            finally:
                _end(process)
        if not problem and process.returncode:
            problem = (output.splitlines() or [f"exit status {process.returncode}"])[-1]
    except OSError as error:
        output, problem = "", str(error)
    if problem:
        here = f"Each node reads {archive.path} itself"
        note(f"staging: the MPI broadcast failed ({problem}). {here}")
        return
    without = re.findall(f"{NOT_WRITTEN}(.*)", output)
    skipped = f"; not written on {', '.join(without[:_SHOWN])}" if without else ""
    taken = time.monotonic() - start
    note(f"staging: MPI has sent the archive to {hosts} nodes, {taken:.1f} s{skipped}")


def _ends_with_parent() -> Callable[[], None]:
    """Return a function for a child: it gets SIGTERM when this process ends, even by SIGKILL."""
    import ctypes  # slow to load, and seldom needed

    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # macOS has no prctl()

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return end_with_parent


def _read_output(process: subprocess.Popen[bytes], limit: float) -> tuple[str, str]:
    """Read until the processes have ended or one has failed; return the output and the problem."""
    assert process.stdout is not None
    output = ""
    while select.select([process.stdout], [], [], max(0.0, limit - time.monotonic()))[0]:
        if not (found := os.read(process.stdout.fileno(), 1 << 16)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
                return output, ""
            break
        output += found.decode(errors="replace")
        if failed := re.search(f"{FAILED}(.*)\n", output):
            return output, failed[1]
    return output, "it took too long"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch and its processes on all hosts. If it must be killed, its reaper ends them."""
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


def _send_by_sbcast(
    archive: Archive,
    target: str,
    hosts: int,
    note: Callable[[str], None],
) -> str:
    """Send the archive to all nodes of a Slurm job; return its path there, or "".

    Slurm sends to every node of a job. Nodes outside the launch would keep the file, so all nodes
    have to be in it.
    """
    program = shutil.which("sbcast")
    if program is None or os.environ.get("SLURM_JOB_NUM_NODES") != str(hosts):
        return ""
    with suppress(OSError):  # the folder may exist on other nodes only; sbcast then reports it
        if free_bytes(os.path.dirname(target)) < archive.size + needed_bytes(archive):
            note(f"staging: no room for sbcast's file. Each node reads {archive.path} itself")
            return ""
    start = time.monotonic()
    # Each block reaches all nodes before the next one is sent. That takes FANOUT * log(hosts) /
    # log(FANOUT) times as long as over one link, which is least for 3. Slurm's default is 8 or
    # more.
    words = [program, "--force", "--fanout=3", archive.path, target]
    try:
        done = subprocess.run(words, capture_output=True, text=True, preexec_fn=_ends_with_parent())
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except OSError as error:
        done, problem = None, str(error)
    if done is None or done.returncode:
        note(f"staging: sbcast failed ({problem}). Each node reads {archive.path} itself")
        return ""
    note(f"staging: sbcast has sent the archive to {hosts} nodes, {time.monotonic() - start:.1f} s")
    return target
