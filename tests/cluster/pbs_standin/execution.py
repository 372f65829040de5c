"""A job while it runs: its files, its login shell, signals, the two deadlines, and what is left of it.

What pbs_mom does on the first host, as recorded: signals go to every process of the sessions on the first host, the
login shell dies of them, and then the job ends.
"""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.pbs_standin import messages
from tests.cluster.pbs_standin.jobs import Job, Task, environment
from tests.cluster.pbs_standin.resources import Node, seconds

# Where pbsdsh and pbs_tmrsh report a missing program, real ones print a piece of memory instead of its name.
MISSING_TASK = "P\xf5@\xfa: {reason}\n"
MISSING_PROGRAM = "pbs_mom, exec of {program} failed with error: {reason}\n"
UNDELIVERABLE_SECONDS = 1.0


@dataclass
class Places:
    """How to reach the execution hosts: what is private to each of them lies in a folder of the cluster's."""

    folder: Path
    nodes: dict[str, Node]

    def private(self, host: str, path: str) -> Path:
        """The path, seen from pbs-head, of a file below /var/spool/pbs or /var/tmp of a host."""
        return self.folder / "hosts" / host / path.lstrip("/")

    def socket(self, host: str) -> str:
        return str(self.folder / f"mom.{host}")


def in_sessions(sessions: set[int]) -> list[int]:
    """The processes of these sessions that still live."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) in sessions and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


def send(sessions: set[int], number: int) -> None:
    for pid in in_sessions(sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def sessions(job: Job, host: str | None = None) -> set[int]:
    return {task.pid for task in job.tasks if task.pid is not None and host in (None, task.host)}


def signal_job(job: Job, number: int) -> None:
    """What qsig does: only the first host is reached."""
    send(sessions(job, job.hosts[0]), number)


def begin_to_kill(job: Job, why: str, kill_delay: float | None) -> None:
    """SIGTERM now, SIGKILL after `kill_delay` seconds or at once, and the end when the first session is empty."""
    with job.changed:
        if job.kill_at is None:
            job.ended_by, job.kill_at = why, time.monotonic() + (kill_delay or 0)
            signal_job(job, signal.SIGKILL if kill_delay is None else signal.SIGTERM)
        job.changed.notify_all()


def spawn(job: Job, places: Places, host: str, command: list[str], *, cookie: str, number: int,
          stdin: str | None = None, executable: str | None = None, missing: str | None = None) -> Iterator[Task]:
    """Start a task of the job; yields it when it runs and again when it has ended."""
    request = job.request
    task = Task(host)
    first = job.hosts[0]
    output, error = (str(path) for path in streams(job, places, first))
    requested = {"command": command, "executable": executable, "stdin": stdin, "missing": missing,
             "environment": environment(job, host, number, cookie), "cwd": request["home"],
             "owner": [request["uid"], request["gid"]], "umask": int(request["umask"] or "077", 8),
             "stdout": output, "stderr": error}
    for response in messages.send_request(places.socket(host), requested):
        with job.changed:
            if "pid" in response:
                task.pid = response["pid"]
                job.tasks.append(task)
            else:
                task.status = response["status"]
            job.changed.notify_all()
        yield task


def streams(job: Job, places: Places, first: str) -> tuple[Path, Path]:
    """The files that the job writes to: spooled on its first host, in its home (-k oe), or in place (-k oed)."""
    keep, join = job.request["keep"], job.request["join"]
    paths = {}
    for letter, suffix in (("o", "OU"), ("e", "ER")):
        if letter in keep and "d" in keep:
            paths[letter] = Path(destination(job, letter))
        elif letter in keep:
            paths[letter] = Path(job.request["home"]) / Path(job.output(letter)).name
        else:
            paths[letter] = places.private(first, f"/var/spool/pbs/spool/{job.id}.{suffix}")
    if join in ("oe", "eo"):
        return paths[join[0]], paths[join[0]]
    return paths["o"], paths["e"]


def destination(job: Job, letter: str) -> str:
    path = job.output(letter)
    return f"{path}{job.id}.{'OU' if letter == 'o' else 'ER'}" if path.endswith("/") else path


def prepare(job: Job, places: Places) -> None:
    lines = [places.nodes[part.host].mom for part in job.chunks for _ in range(part.lines)]
    for host in job.hosts:
        node_file = places.private(host, f"/var/spool/pbs/aux/{job.id}")
        node_file.write_text("".join(f"{line}\n" for line in lines))
        node_file.chmod(0o644)
        scratch = places.private(host, f"/var/tmp/pbs.{job.id}")
        scratch.mkdir(mode=0o700, exist_ok=True)
        os.chown(scratch, job.request["uid"], job.request["gid"])
    if "script" in job.request:
        script = places.private(job.hosts[0], f"/var/spool/pbs/mom_priv/jobs/{job.id}.SC")
        script.write_text(job.request["script"], errors="surrogateescape")
        script.chmod(0o700)
        os.chown(script, job.request["uid"], job.request["gid"])


def run(job: Job, places: Places, cookie: str, kill_delay: Callable[[], float],
        started: Callable[[Task], None]) -> int:
    """Run the job to its end; returns its exit status: N, or 256+N where signal N ended the login shell."""
    prepare(job, places)
    request = job.request
    limit = seconds(job.resources["walltime"]) if "walltime" in job.resources else None
    if "script" in request:
        shell = request["shell"].partition(",")[0].partition("@")[0] or request["login_shell"]
        command, executable = [f"-{Path(shell).name}"], shell
        stdin, missing = f"/var/spool/pbs/mom_priv/jobs/{job.id}.SC\n", MISSING_PROGRAM
    else:
        command, executable, stdin, missing = request["command"], None, None, MISSING_PROGRAM
    begin = time.monotonic()
    login = spawn(job, places, job.hosts[0], command, executable=executable, stdin=stdin, missing=missing,
                  cookie=cookie, number=0)
    task = next(login)
    if task.status is None:
        started(task)
        threading.Thread(target=lambda: list(login), daemon=True).start()
        _follow(job, task, places, begin, limit, kill_delay)
    send(sessions(job), signal.SIGKILL)
    with job.changed:
        job.changed.wait_for(lambda: all(each.status is not None for each in job.tasks), timeout=5)
    job.tasks, status = [], task.status if task.status is not None else 256 + signal.SIGKILL
    return -29 if job.ended_by == "walltime" else status


def _follow(job: Job, task: Task, places: Places, begin: float, limit: int | None,
            kill_delay: Callable[[], float]) -> None:
    """Wait until the job has to end."""
    own = {task.pid} if task.pid is not None else set()
    while True:
        with job.changed:
            now = time.monotonic()
            if job.kill_at is None and task.status is not None:
                return
            if job.kill_at is not None and (now >= job.kill_at or task.status is not None and not in_sessions(own)):
                return
            waits = [0.1] if job.kill_at is not None else []
            if limit is not None and job.kill_at is None:
                waits.append(begin + limit + 1 - now)  # its mom looks at the clock now and then
            if not waits or min(waits) > 0:
                job.changed.wait(min(waits) if waits else None)
        if limit is not None and job.kill_at is None and time.monotonic() > begin + limit:
            passed = int(time.monotonic() - begin)
            with streams(job, places, job.hosts[0])[1].open("a") as errors:
                errors.write(f"=>> PBS: job killed: walltime {passed} exceeded limit {limit}\n")
            begin_to_kill(job, "walltime", kill_delay())


def clean_up(job: Job, places: Places) -> None:
    for host in job.hosts:
        shutil.rmtree(places.private(host, f"/var/tmp/pbs.{job.id}"), ignore_errors=True)
        for name in (f"aux/{job.id}", f"mom_priv/jobs/{job.id}.SC"):
            places.private(host, f"/var/spool/pbs/{name}").unlink(missing_ok=True)


def deliver(job: Job, places: Places) -> bool:
    """Copy what the job wrote to where its submitter wants it; False where that folder does not exist."""
    first, delivered = job.hosts[0], True
    for letter, suffix in (("o", "OU"), ("e", "ER")):
        spooled = places.private(first, f"/var/spool/pbs/spool/{job.id}.{suffix}")
        if not spooled.exists():
            continue
        path = Path(destination(job, letter))
        if path.parent.is_dir():
            shutil.copyfile(spooled, path)
            path.chmod(spooled.stat().st_mode & 0o777)
            os.chown(path, job.request["uid"], job.request["gid"])
            spooled.unlink()
        else:
            shutil.move(spooled, places.private(first, f"/var/spool/pbs/undelivered/{spooled.name}"))
            delivered = False
    return delivered
