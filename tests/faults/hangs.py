"""A training of 8 ranks on 4 hosts that hangs in 18 ways, or pauses longer than the limit, which is no hang.

The hosts are network namespaces (root). One process imports torch and forks the ranks, which enter their hosts.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import CLEAN_ENV, Hosts, wait_until
from utils.host import process

BAD, BAD_HOST, RANKS, STEPS, FAULT_STEP = 5, "h3", 8, 40, 20
ROOT = Path(__file__).resolve().parents[2]
FROM_OUTSIDE = ("stopped", "cut-host")
TOGETHER = ("loaders-all", "polls", "polls-lock")  # of all ranks


# A rank --------------------------------------------------------------------------------------------------------------

def train(kind: str, limit: float, folder: Path, lost_seconds: int | None, unchanged: bool) -> None:
    """Train; in the middle, hang as `kind` says. "busy-KIND": compute there instead, where it is not a hang."""
    import torch
    import torch.distributed as dist

    from utils import setup_distributed
    from utils.monitor import decisions

    if unchanged:
        decisions = prepare_watch(limit)._load("monitor.decisions")
    decisions.HOST_LOST_SECONDS = lost_seconds or decisions.HOST_LOST_SECONDS
    started: Any = unchanged_script()
    if not unchanged:
        started = setup_distributed("gloo", timeout=60, hang_timeout=limit or None)
    block = partial(compute, 2 * limit) if kind.startswith("busy-") else threading.Event().wait
    kind = kind.removeprefix("busy-")
    with started as job:
        rank, values = job.rank, torch.ones(16)
        if kind in ("group-skipped", "killed"):
            half = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][rank // 4]
        if kind == "hsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            model = fully_shard(torch.nn.Linear(16, 16), mesh=mesh)
        if kind == "thread":
            everyone, pool = dist.new_group(list(range(RANKS))), ThreadPoolExecutor(1)

        def reduce_in_thread(bad: bool) -> None:
            _ = bad and block()  # hang: thread
            dist.all_reduce(values, group=everyone)

        for step in range(STEPS):
            now = step == FAULT_STEP
            bad = now and rank == BAD
            if now and rank == 0:
                (folder / "fault").touch()
            if now:
                pause(kind, job, (2 if kind == "busy" else 3) * limit, folder)
            if now and kind in TOGETHER:
                go_wrong_together(kind, folder)
            if bad:
                go_wrong(kind, folder)
            if kind == "pipeline":
                _ = bad and block()  # hang: pipeline
                _ = rank > 0 and dist.recv(values, rank - 1)
                _ = rank < RANKS - 1 and dist.send(values, rank + 1)
                continue
            if kind == "skipped-collective" and now and not bad:
                dist.barrier()
            elif kind == "other-shape" and bad:
                dist.all_reduce(torch.ones(4000))  # hang: other-shape
            elif kind == "group-skipped" and not bad:
                dist.barrier(group=half)  # hang: group-skipped
            elif kind == "killed" and now and rank < 4:  # as in a collective of NCCL, nothing raises here
                _ = rank == 3 and block()
                dist.barrier(group=half)
            elif kind == "hsdp":
                _ = bad and block()  # hang: hsdp
                model(values).sum().backward()
            elif kind == "recv-unsent" and bad:
                dist.recv(values, 2)  # hang: recv-unsent
            elif kind == "thread":
                pool.submit(reduce_in_thread, bad).result()
            elif kind == "aborted-itself" and now:
                work = dist.all_reduce(values[:1], async_op=True) if bad else None  # noqa: F841 - not waited for
                dist.all_reduce(values.repeat(250))
            dist.all_reduce(values)  # hang: skipped-collective
            time.sleep(0.01)
        dist.barrier()
        if rank == BAD and kind == "blocked-teardown":
            threading.Event().wait()  # hang: blocked-teardown


class UnchangedJob(NamedTuple):
    rank: int

    def report_progress(self) -> None:
        """A script that has never heard of the kit reports nothing."""


def prepare_watch(limit: float) -> Any:
    """Let the process group of this rank be watched as by `ddpkit watch`, and return its sitecustomize."""
    import torch.distributed as dist

    os.environ.update({"DDPKIT_WATCH": str(ROOT / "utils"), "DDPKIT_HANG_TIMEOUT": str(limit)})
    file = ROOT / "utils" / "tools" / "launch" / "rank_site" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("sitecustomize", file)
    assert spec and spec.loader
    watch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    watch._wrap(dist.distributed_c10d)  # the rank was forked from a process that had imported it before
    for name in ("init_process_group", "destroy_process_group"):
        setattr(dist, name, getattr(dist.distributed_c10d, name))
    return watch


@contextlib.contextmanager
def unchanged_script() -> Iterator[UnchangedJob]:
    """Start the process group as a script does that has never heard of the kit."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield UnchangedJob(dist.get_rank())
    dist.destroy_process_group()


def go_wrong(kind: str, folder: Path) -> None:
    if kind in FROM_OUTSIDE:
        (folder / "ready").write_text(str(os.getpid()))
        time.sleep(3600)  # hang: stopped # hang: cut-host
    if kind == "endless-loop":
        while True: pass  # noqa: E701 # hang: endless-loop
    if kind == "blocked-loader":
        from torch.utils.data import DataLoader
        for _ in DataLoader([0], num_workers=1, collate_fn=never_return):  # hang: blocked-loader
            pass
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exited":
        sys.exit(0)  # hang: exited
    if kind == "gil":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # hang: gil


def go_wrong_together(kind: str, folder: Path) -> None:
    """As go_wrong(), on all ranks."""
    if kind == "loaders-all":
        from torch.utils.data import DataLoader
        for _ in DataLoader([0, 1], num_workers=2, collate_fn=never_return):
            pass
    while kind == "polls" and not (folder / "never").exists():
        time.sleep(0.05)  # hang: polls
    if kind == "polls-lock":
        mine, taken = (os.open(folder, os.O_RDONLY) for _ in range(2))
        with contextlib.suppress(BlockingIOError):  # another rank has it: none of them releases it
            fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
        take(mine)


def take(file: int) -> None:
    """Take a lock that is never released, as libraries do that look for it again and again."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # hang: polls-lock


def never_return(_: Any) -> None:
    """As from a file system that does not respond."""
    threading.Event().wait()  # hang: loaders-all


def compute(seconds: float, share: float = 0.4) -> None:
    """Compute for so long, on so much of a core: a rank is busy from 0.2, and idle below 0.01 and 0.05 s."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        while time.monotonic() < now + 0.02:
            sum(range(10_000))
        time.sleep(0.02 / share - 0.02)


def pause(kind: str, job: Any, seconds: float, folder: Path) -> None:
    """Write on all ranks, or work on one: while the others wait for it in a collective, or while they are idle.

    "evaluate" reports its progress, "busy" does not. "compile" computes in a child process.
    """
    if kind == "busy" and job.rank == 0:
        compute(seconds)
    if kind in ("compute", "compile"):
        compiler = f"from tests.faults.hangs import compute; compute({seconds}, 0.2)"
        if job.rank != BAD:
            time.sleep(seconds)
        elif kind == "compute":
            compute(seconds, 0.2)
        else:  # the rank itself waits
            subprocess.run([sys.executable, "-c", compiler], check=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end and (kind == "write" or kind == "evaluate" and job.rank == 0):
        if kind == "write":
            with open(folder / f"data{job.rank}", "wb") as file:
                file.write(b"x" * 2_000_000)
                os.fsync(file.fileno())
            time.sleep(1)
        else:
            time.sleep(0.2)
            job.report_progress()


def serve_host() -> None:
    """Fork a rank for each line of standard input, and write its exit status to a file when it has ended."""
    from tests.faults import quick_imports

    # isort: split
    import torch._dynamo  # by fully_shard()
    import torch.distributed.fsdp
    import torch.utils.data  # noqa: F401

    quick_imports.done()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        task = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                run_rank(task)
            _, status = os.waitpid(pid, 0)
            partial = Path(task["folder"]) / f"partial{task['env']['RANK']}"
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(partial.with_name(partial.name.replace("partial", "status")))
            os._exit(0)


def enter_host(holder: int) -> None:
    """Enter the namespaces of a host. os.setns() is in Python from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{holder}/ns/{kind}") as file:
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns() to {file.name}")


def run_rank(task: dict[str, Any]) -> None:
    folder, rank = Path(task["folder"]), task["env"]["RANK"]
    enter_host(task["holder"])
    os.chdir(folder)
    os.environ.update(task["env"])
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    status = 1
    try:
        train(task["kind"], task["limit"], folder, task["lost_seconds"], task["unchanged"])
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    if task["unchanged"]:
        atexit._run_exitfuncs()
    os._exit(status)


# All ranks -----------------------------------------------------------------------------------------------------------

class Result(NamedTuple):
    statuses: list[int | None]  # None: still running
    output: str
    remaining: list[int]  # processes
    folder: Path


class HangLab:
    """Four hosts with the ranks that a process forks for them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self._runs, self._starting = hosts, 0, threading.Lock()
        environment = {**CLEAN_ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen([sys.executable, __file__], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdout and self._server.stdout.readline() == "ready\n"

    def close(self) -> None:
        with self._server:
            self._server.kill()

    def run(self, kind: str, limit: float, seconds: float = 60, lost_seconds: int | None = None,
            unchanged: bool = False) -> Result:
        """Start all ranks; return when they have ended, or after so many seconds.

        limit: 0 for none. lost_seconds: until a host counts as lost; None for the kit's own value.
        unchanged: the script knows nothing of the kit, and is watched.
        """
        with self._starting:
            self._runs += 1
            folder = self.hosts.folder / f"{self._runs}-{kind}"
            self._start(kind, limit, folder, 29600 + self._runs, lost_seconds, unchanged)
        # What started a stopped rank ends it, and here that is the test.
        left = [rank for rank in range(RANKS) if rank != BAD or kind not in ("stopped", "" if limit else "cut-host")]
        with contextlib.suppress(RuntimeError):
            wait_until((folder / "fault").exists, "the fault", seconds=60)
        if kind in FROM_OUTSIDE:
            ready = folder / "ready"
            wait_until(lambda: ready.exists() and ready.read_text(), "the fault", seconds=20)
            time.sleep(min(2, 0.4 * limit))  # the fault comes from outside while the rank is at that line
            if kind != "cut-host":
                os.kill(int((folder / "ready").read_text()), signal.SIGSTOP)
            else:
                self.hosts.set_link(BAD_HOST, "down")
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: all((folder / f"status{rank}").exists() for rank in left), "the end", seconds=seconds)
        files = [folder / f"status{rank}" for rank in range(RANKS)]
        statuses = [int(file.read_text()) if file.exists() else None for file in files]
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: not processes_in(folder), "the end of what the ranks have started", seconds=3)
        remaining = processes_in(folder)
        for pid in remaining:  # for the kinds after this
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "cut-host":
            self.hosts.set_link(BAD_HOST, "up")
        output = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("output*")))
        return Result(statuses, output, remaining, folder)

    def _start(self, kind: str, limit: float, folder: Path, port: int, lost_seconds: int | None,
               unchanged: bool) -> None:
        folder.mkdir()
        for rank in range(RANKS):
            host = self.hosts.hosts[rank // 2]
            env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": self.hosts.address["h1"], "MASTER_PORT": str(port),
                   "DDPKIT_FAILURE_FILE": str(folder / "output-failures")}
            pipe = self._server.stdin
            assert pipe
            task = {"kind": kind, "limit": limit, "folder": str(folder), "env": env, "lost_seconds": lost_seconds,
                    "holder": self.hosts.pid(host), "unchanged": unchanged}
            pipe.write(json.dumps(task) + "\n")
            pipe.flush()


def processes_in(folder: Path) -> list[int]:
    """Return the processes that were started in a folder."""
    found = []
    for pid in process.process_ids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
    return found


if __name__ == "__main__":
    serve_host()
