"""Hang a training of 8 ranks on 4 hosts in 26 ways, and check what the kit reports.

python -m tests.faults.hangs                            all kinds, and 20 healthy runs
python -m tests.faults.hangs KIND ... [--limit SECONDS]
python -m tests.faults.hangs cut-host --limit 0         without hang_timeout

Prints for each kind: the seconds after the fault until all processes have ended, those after the limit, and whether
rank, host, source line and collective are right. Healthy runs are trainings that pause two to three times as
long as the limit, or in which one rank of a group or pipeline computes that long.
The hosts are network namespaces (root). Each has one process that imports torch once and forks the ranks.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Hosts, wait_until
from utils.host import process
from utils.job import exclude_file

BAD, BAD_HOST, RANKS, STEPS, FAULT_STEP = 5, "h3", 8, 40, 20
HEALTHY = ("compute", "write", "evaluate", "compile", "busy", "busy-pair-blocked", "busy-three-levels",
           "busy-pipeline", "busy-pipeline-async", "busy-thread")  # busy-KIND: a rank computes, where it blocks in KIND


class Kind(NamedTuple):
    """What a report must contain."""

    cause: str  # regular expression; LINE is the line of this file that ends with "# hang: NAME"
    ranks: tuple[int, ...] = (BAD,)


BEHIND = r"rank 5 on h3 .* did not enter collective \d+, .* It is at LINE.*waits in all_reduce of \[\[16\]\]"
OTHER = r"rank 5 on h3 .* entered another collective \d+: {0} at LINE.*The other ranks entered {1}"
LATE = (r"rank 5 on h3 .* did not enter .*collective \d+ of group .*\(ranks {0}\), in which rank {1} waits.* "
        r"It is at LINE.*Rank \d waits in")
CIRCLE = (r"unknown: .*rank {0} on h\d \S+ \d+\) waits for rank {1} in {2}.* at LINE.*; "
          "rank 5 on h3 .* waits for rank {3}")
KINDS = {
    "skipped-collective": Kind(OTHER.format(r"all_reduce of \[\[16\]\]", "barrier of")),
    "other-shape": Kind(OTHER.format(r"all_reduce of \[\[4000\]\]", r"all_reduce of \[\[16\]\]")),
    "other-order": Kind(OTHER.format(r"all_reduce of \[\[3000\]\]", r"all_reduce of \[\[16\]\]")),
    "stopped": Kind(r"rank 5 on h3 .* does not respond: its process is stopped by a signal .* at LINE.*all_reduce"),
    "cut-host": Kind(r"rank 4 on h3 .* network is cut.* rank 5 on h3 .* network is cut.* at LINE.*all_reduce", (4, 5)),
    "endless-loop": Kind(r"rank 5 on h3 .* is busy \(\d+ % of a core.* at LINE.*\n[^$]*?" + BEHIND),
    "blocked-loader": Kind(BEHIND),
    "blocked-teardown": Kind(r"rank 5 on h3 .* is idle after the other ranks have left. It is at LINE"),
    "swallowed-exception": Kind(OTHER.format(r"barrier of \[\]", r"all_reduce of \[\[16\]\]")),
    "deadlock": Kind(BEHIND),
    "exited": Kind(r"rank 5 on h3 left .*at LINE.* after \d+ collectives, and other ranks need it"),
    "debugger": Kind(BEHIND),
    # In groups
    "group-skipped": Kind(CIRCLE.format(4, 5, "barrier", "4,6-7"), ()),
    "group-crossed": Kind(CIRCLE.format(4, 5, "all_reduce", "4"), ()),
    "group-other": Kind(r"rank 5 on h3 .* entered another collective \d+ of group \S+ \(ranks 4-7\): barrier .*at LINE"
                        r".*The other ranks entered all_reduce of \[\[16\]\] at LINE"),
    "pair-blocked": Kind(LATE.format("4-5", "4")),
    "two-levels": Kind(LATE.format("1,3,5,7", "1,3,7")),
    "three-levels": Kind(LATE.format("4-7", "4,6-7")),
    "hsdp": Kind(LATE.format("4-7", "4,6-7")),
    "recv-unsent": Kind(CIRCLE.format(2, 5, "all_reduce", "2") + " in recv from rank 2 at LINE", ()),
    "pipeline": Kind(r"rank 4 on h3 .* waits in send to rank 5 at .* rank 5 .* does not take part: it is at LINE"),
    "pipeline-async": Kind(r"rank 5 on h3 .* is in no collective or transfer, but rank .* waits in one. It is at LINE"),
    "thread": Kind(LATE.format("0-7", "0-4,6-7")),
    "gil": Kind(r"rank 5 on h3 .* does not respond: its process is in native code. It is at LINE.*waits in all_reduce"),
    "aborted-itself": Kind(r"rank 5 on h3 .* ended without a report.*Rank \d waits in all_reduce of \[\[4000\]\] at .*"
                           "gloo aborts a rank .* that has entered a smaller collective", ()),
    "aborted": Kind(OTHER.format(r"all_reduce of \[\[4000\]\]", r"all_reduce of \[\[16\]\]")),
}
LOST = Kind(r"A host is lost: no response for \d+ s.*\n  rank 4 on h3 .* does not respond to h1: its host is down, .*"
            r"rank 5 on h3 .* does not respond to h1: its host is down", (4, 5))  # cut-host without hang_timeout


# A rank --------------------------------------------------------------------------------------------------------------

def train(kind: str, limit: float, folder: Path, lost_seconds: int | None) -> None:
    import torch
    import torch.distributed as dist

    from utils import setup_distributed
    from utils.monitor import monitor

    monitor.HOST_LOST_SECONDS = lost_seconds or monitor.HOST_LOST_SECONDS
    with setup_distributed("gloo", timeout=60, hang_timeout=limit or None) as job:
        bad = job.rank == BAD
        values = torch.ones(16)
        in_groups = Groups(kind, job.rank, limit)
        for step in range(STEPS):
            now = step == FAULT_STEP
            if now and job.rank == 0:
                (folder / "fault").touch()
            if now and kind in HEALTHY[:5]:
                pause(kind, job, (2 if kind == "busy" else 3) * limit, folder)
            if now and bad:
                go_wrong(kind, folder)
            in_groups.step(now and bad)
            if "pipeline" in kind:
                continue
            if now and kind == "skipped-collective" and not bad:
                dist.barrier()
            if now and kind == "other-shape" and bad:
                dist.all_reduce(torch.ones(4000))  # hang: other-shape
            if now and kind == "other-order":
                first, second = (3000, 16) if bad else (16, 3000)
                dist.all_reduce(torch.ones(first))  # hang: other-order
                dist.all_reduce(torch.ones(second))
            try:
                if now and bad and kind == "swallowed-exception":
                    raise ValueError("a damaged sample")
                dist.all_reduce(values)  # hang: skipped-collective # hang: recv-unsent
            except ValueError:
                continue
            time.sleep(0.01)
        dist.barrier()  # hang: swallowed-exception
        if bad and kind == "blocked-teardown":
            threading.Event().wait()  # hang: blocked-teardown


class Groups:
    """The process groups of one rank, in the kinds that have some."""

    def __init__(self, kind: str, rank: int, limit: float) -> None:
        import torch
        import torch.distributed as dist

        is_healthy, kind = kind.startswith("busy-"), kind.removeprefix("busy-")
        self.kind, self.rank, self.values, self.dist = kind, rank, torch.ones(16), dist
        lock = threading.Lock()
        lock.acquire()
        self.block = partial(compute, 2 * limit) if is_healthy else lock.acquire
        members = {
            "pair": [[0, 1], [2, 3], [4, 5], [6, 7]], "four": [[0, 1, 2, 3], [4, 5, 6, 7]], "odd": [[1, 3, 5, 7]],
            "all": [list(range(RANKS))]}
        needed = {"group-crossed": ("pair", "four"), "pair-blocked": ("pair",), "two-levels": ("pair", "odd"),
                  "three-levels": ("pair", "four"), "thread": ("all",)}
        names = needed.get(kind, ("four",) if kind.startswith("group") else ())
        self.groups = {name: group for name in names for ranks in members[name]
                       for group in [dist.new_group(ranks)] if rank in ranks}
        if kind == "hsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            self.model = fully_shard(torch.nn.Linear(16, 16), mesh=mesh)
        if kind == "thread":
            self.pool = ThreadPoolExecutor(1)

    def step(self, bad: bool) -> None:
        dist, values, rank, kind, block = self.dist, self.values, self.rank, self.kind, self.block
        pair, four, odd = map(self.groups.get, ("pair", "four", "odd"))
        if kind == "group-skipped" and not bad:
            dist.barrier(group=four)  # hang: group-skipped
        elif kind == "group-crossed":
            for group in (four, pair) if bad else (pair, four):
                dist.all_reduce(values, group=group)  # hang: group-crossed
        elif kind == "group-other" and bad:
            dist.barrier(group=four)  # hang: group-other
        elif kind == "group-other":
            dist.all_reduce(values, group=four)  # hang: group-other
        elif kind == "pair-blocked":
            _ = bad and block()  # hang: pair-blocked
            dist.all_reduce(values, group=pair)
        elif kind == "two-levels":
            dist.reduce(values, rank | 1, group=pair)
            if rank % 2:
                _ = bad and block()  # hang: two-levels
                dist.all_reduce(values, group=odd)
            dist.broadcast(values, rank | 1, group=pair)
        elif kind == "three-levels":
            dist.all_reduce(values, group=pair)
            _ = bad and block()  # hang: three-levels
            dist.all_reduce(values, group=four)
        elif kind == "hsdp":
            _ = bad and block()  # hang: hsdp
            self.model(values).sum().backward()
        elif kind == "recv-unsent" and bad:
            dist.recv(values, 2)  # hang: recv-unsent
        elif kind in ("pipeline", "pipeline-async"):
            self.pipeline(bad)
        elif kind == "thread":
            self.pool.submit(self.reduce_in_thread, bad).result()
        elif kind == "gil" and bad:
            import ctypes
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # hang: gil
        elif kind == "aborted-itself":
            self.work = dist.all_reduce(values[:1], async_op=True) if bad else None
            dist.all_reduce(values.repeat(250))
        elif kind == "aborted" and bad:
            self.work = dist.all_reduce(values.repeat(250), async_op=True)  # hang: aborted

    def pipeline(self, bad: bool) -> None:
        dist, values, rank = self.dist, self.values, self.rank
        if self.kind == "pipeline":
            _ = bad and self.block()  # hang: pipeline
            _ = rank > 0 and dist.recv(values, rank - 1)
            _ = rank < RANKS - 1 and dist.send(values, rank + 1)
            return
        _ = rank > 0 and dist.irecv(values, rank - 1).wait()
        _ = bad and self.block()  # hang: pipeline-async
        _ = rank < RANKS - 1 and dist.isend(values, rank + 1).wait()

    def reduce_in_thread(self, bad: bool) -> None:
        _ = bad and self.block()  # hang: thread
        self.dist.all_reduce(self.values, group=self.groups["all"])


def go_wrong(kind: str, folder: Path) -> None:
    if kind in ("stopped", "cut-host"):
        (folder / "ready").write_text(str(os.getpid()))
        time.sleep(3600)  # hang: stopped # hang: cut-host
    if kind == "endless-loop":
        while True: pass  # noqa: E701 # hang: endless-loop
    if kind == "blocked-loader":
        from torch.utils.data import DataLoader
        for _ in DataLoader(Blocked(), num_workers=1):  # hang: blocked-loader
            pass
    if kind == "deadlock":
        lock = threading.Lock()
        with lock:
            lock.acquire()  # hang: deadlock
    if kind == "exited":
        sys.exit(0)  # hang: exited
    if kind == "debugger":
        sys.stdin = os.fdopen(os.pipe()[0])
        breakpoint()  # hang: debugger


class Blocked:
    """A data set on a file system that does not respond."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        return index


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def pause(kind: str, job: object, seconds: float, folder: Path) -> None:
    """Compute or write on all ranks, compile in a child process, or work on rank 0 while the others wait.

    "evaluate" reports its progress, "busy" does not.
    """
    end = time.monotonic() + seconds
    if kind == "compile":  # the rank itself waits
        compiler = ("import time; end = time.monotonic() + {}\n"
                    "while time.monotonic() < end: sum(range(10_000)); time.sleep(0.01)")
        subprocess.run([sys.executable, "-c", compiler.format(seconds)], check=True)
    on_all = kind in ("compute", "write")
    while time.monotonic() < end and (on_all or kind in ("evaluate", "busy") and job.rank == 0):  # type: ignore[attr-defined]
        if kind in ("compute", "busy"):
            sum(range(10_000))
            time.sleep(0.002 if on_all else 0)
        elif kind == "write":
            with open(folder / f"data{job.rank}", "wb") as file:  # type: ignore[attr-defined]
                file.write(b"x" * 2_000_000)
                os.fsync(file.fileno())
            time.sleep(1)
        else:
            time.sleep(0.2)
            job.report_progress()  # type: ignore[attr-defined]


def serve_host() -> None:
    """Fork a rank for each line of standard input, and write its exit status to a file when it has ended."""
    import torch.distributed.fsdp
    import torch.utils.data  # noqa: F401

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


def run_rank(task: dict[str, Any]) -> None:
    folder, rank = Path(task["folder"]), task["env"]["RANK"]
    os.chdir(folder)
    os.environ.update(task["env"])
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    status = 1
    try:
        train(task["kind"], task["limit"], folder, task["lost_seconds"])
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os._exit(status)


# All ranks -----------------------------------------------------------------------------------------------------------

class Result(NamedTuple):
    seconds: float  # from the fault to the end of all ranks
    statuses: list[int | None]  # None: still running
    output: str
    excluded: list[str]  # hosts that a later job avoids
    remaining: list[int]  # processes


class HangLab:
    """Four hosts that fork ranks."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self._runs, self._starting = hosts, 0, threading.Lock()
        command = [sys.executable, __file__, "--serve"]
        environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
        self._servers = {host: hosts.popen(host, command, env=environment, stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE) for host in hosts.hosts}
        for server in self._servers.values():
            assert server.stdout and server.stdout.readline() == "ready\n"

    def run(self, kind: str, limit: float, seconds: float = 60, lost_seconds: int | None = None) -> Result:
        """Start all ranks; return when they have ended, or after so many seconds.

        limit: 0 for none. lost_seconds: until a host counts as lost; None for the kit's own value.
        """
        with self._starting:
            self._runs += 1
            folder = self.hosts.folder / f"{self._runs}-{kind}"
            self._start(kind, limit, folder, 29600 + self._runs, lost_seconds)
        left = [rank for rank in range(RANKS) if limit or kind not in ("stopped", "cut-host") or rank != BAD]
        with contextlib.suppress(RuntimeError):
            wait_until((folder / "fault").exists, "the fault", seconds=60)
        start = time.monotonic()
        if kind in ("stopped", "cut-host"):
            wait_until((folder / "ready").exists, "the fault", seconds=20)
            time.sleep(min(2, 0.4 * limit))  # the fault comes from outside while the rank is at that line
            start = time.monotonic()
            if kind == "stopped":
                os.kill(int((folder / "ready").read_text()), signal.SIGSTOP)
            else:
                self.hosts.set_link(BAD_HOST, "down")
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: all((folder / f"status{rank}").exists() for rank in left), "the end", seconds=seconds)
        took = time.monotonic() - start
        statuses = [status(folder / f"status{rank}") for rank in range(RANKS)]
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: not processes_in(folder), "the end of what the ranks have started", seconds=3)
        remaining = processes_in(folder)
        for pid in remaining:  # for the kinds after this
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "cut-host":
            self.hosts.set_link(BAD_HOST, "up")
        output = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("output*")))
        excluded = [entry.host for entry in exclude_file.read(folder / "bad-hosts")]
        return Result(took, statuses, output, excluded, remaining)

    def pause(self, limit: float, kind: str) -> Result:
        """Run a training with a pause that is no hang."""
        return self.run(kind, limit, 90 + 3 * limit)

    def _start(self, kind: str, limit: float, folder: Path, port: int, lost_seconds: int | None) -> None:
        folder.mkdir()
        for rank in range(RANKS):
            host = self.hosts.hosts[rank // 2]
            env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": self.hosts.address["h1"], "MASTER_PORT": str(port),
                   exclude_file.VARIABLE: str(folder / "bad-hosts")}
            pipe = self._servers[host].stdin
            assert pipe
            task = {"kind": kind, "limit": limit, "folder": str(folder), "env": env, "lost_seconds": lost_seconds}
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


def status(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None


def problem(kind: str, result: Result, limit: float = 1) -> str:
    """Return what is wrong with a report; "" where rank, host, line and collective are right."""
    expected = KINDS[kind] if limit else LOST
    lines = Path(__file__).read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if re.search(rf"# hang: {kind}(?![\w-])", line)]
    marked += [number for number, line in enumerate(lines, 1) if "skipped-collective" in kind and "values)  #" in line]
    place = rf"\S*hangs\.py, line ({'|'.join(map(str, marked))}), in \w+"
    cause = re.search(expected.cause.replace("LINE", place), result.output)
    if cause is None:
        return f"no {expected.cause!r}"
    blames = r"rank (\d) on h\d(?: \(pid \d+\))? (?:did|does|entered|is idle|is in no|left)"
    blamed = {int(rank) for rank in re.findall(blames, lines_of(cause))}
    if blamed != set(expected.ranks):
        return f"ranks {sorted(blamed)} are blamed"
    if limit and (None in result.statuses or not any(result.statuses)):
        return f"exit statuses {result.statuses}"
    return f"processes {result.remaining} remain" if limit and result.remaining else ""


def lines_of(found: re.Match[str]) -> str:
    """Return the whole lines of a match."""
    text = found.string
    return text[text.rfind("\n", 0, found.start()) + 1:text.find("\n", found.end())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--limit", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--healthy", type=int, metavar="N", help="healthy runs (20, or none if KIND is given)")
    parser.add_argument("--at-once", type=int, default=5, metavar="N", help="so many healthy runs side by side")
    parser.add_argument("--show", action="store_true", help="print the output of the ranks")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_host()
        return 0
    kinds = args.kinds or list(KINDS)
    count = args.healthy if args.healthy is not None else 0 if args.kinds else 20
    right = alarms = 0
    with Hosts(4) as hosts:
        lab = HangLab(hosts)
        for kind in kinds:
            result = lab.run(kind, args.limit, 60 if args.limit else 150)
            found = problem(kind, result, args.limit)
            right += not found
            print(f"{kind:20} {result.seconds:5.1f} s, {result.seconds - args.limit:5.1f} s after the limit: "
                  f"{found or 'right'}", flush=True)
            if args.show:
                print(result.output, flush=True)
        healthy = [HEALTHY[number % len(HEALTHY)] for number in range(count)]
        with ThreadPoolExecutor(args.at_once) as pool:  # they mostly wait
            for kind, result in zip(healthy, pool.map(partial(lab.pause, args.limit), healthy), strict=True):
                alarm = any(result.statuses) or None in result.statuses or "The ranks hang" in result.output
                alarms += alarm
                print(f"healthy, {kind:10} {result.seconds:5.1f} s: {'ALARM' if alarm else 'no alarm'}", flush=True)
                if args.show or alarm:
                    print(result.output, flush=True)
    print(f"{right} of {len(kinds)} kinds right, {alarms} alarms in {count} healthy runs")
    return int(right < len(kinds) or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
