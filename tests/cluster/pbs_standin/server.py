"""The stand-in's server: it queues jobs, and runs them as pbs_mom does on their hosts.

As recorded, signals go to every process of a job's sessions on its first host, the login shell dies of them, and then
the job ends.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.pbs_standin import commands
from tests.cluster.pbs_standin.jobs import CAPACITY, DOMAIN, FINISHED, SERVER, UID, Job, Refused, chunks, placed

KILL_DELAY = 30.0  # seconds from SIGTERM to SIGKILL; 10 in PBS, too few for a save on a busy machine of two cores
# What a task runs on its host: become the user, and execute the program.
START = """\
import os, sys
uid, program, *words = sys.argv[1:]
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
os.umask(0o077)
os.chdir(os.environ["HOME"])
try:
    os.execvp(program, words)
except OSError as error:
    os.write(2, f"{program}: {error.strerror}\\n".encode())
    os._exit(254)
"""


class Server:
    """The queue of jobs, and their files in `spool`.

    enter: returns the words that run a command on a host. local: returns where this machine has a path of the hosts.
    """

    def __init__(self, hosts: Sequence[str], spool: Path, enter: Callable[[str], list[str]],
                 local: Callable[[str], Path]) -> None:
        self.hosts, self.spool, self.enter, self.local = hosts, spool, enter, local
        self.jobs: dict[str, Job] = {}
        self.numbers = itertools.count()
        self.cookie = uuid.uuid4().hex.upper()
        self.lock = threading.RLock()

    def serve(self, path: Path) -> None:
        """Respond to commands at this socket, in threads of this process."""
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(BrokenPipeError):  # the command was killed; what it started continues
                    self.request.sendall(str(server.respond(self.request)).encode())

        listener = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        listener.daemon_threads = True
        path.chmod(0o666)
        threading.Thread(target=listener.serve_forever, daemon=True).start()

    def respond(self, connection: socket.socket) -> int:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        with (open(descriptors[0], "w") as out, open(descriptors[1], "w") as errors,
              connection.makefile("rb") as lines):
            name, words, environment = json.loads(lines.readline())
            return commands.run(self, name, commands.Call(words, environment, out, errors))

    def submit(self, request: dict[str, Any]) -> str:
        if request["queue"] != "workq":
            raise Refused(170, "Unknown queue")
        with self.lock:
            number = next(self.numbers)
            waits_for = [other.id for other in map(self.find, request["after"]) if other.state != FINISHED]
            state = "B" if request["array"] else "H" if waits_for else "Q"
            job = Job(f"{number}{'[]' if request['array'] else ''}.{SERVER}", request, state, waits_for)
            self.jobs[job.id] = job
            if request["array"]:
                first, last = map(int, request["array"].split("-"))
                for job_id in [f"{number}[{index}].{SERVER}" for index in range(first, last + 1)]:
                    self.jobs[job_id] = Job(job_id, request, array=job.id)
            self._schedule()
        return job.id

    def find(self, word: str) -> Job:
        """Return the job with this id: "12", "12.pbs-head", "79[]", "79[2].pbs-head"."""
        job_id = f"{word.partition('.')[0]}.{SERVER}"
        if job_id not in self.jobs:
            raise Refused(153, f"Unknown Job Id {job_id}")
        return self.jobs[job_id]

    def delete(self, word: str, force: bool) -> None:
        """End a job. Jobs that wait for one that never ran stay held for ever."""
        job = self.find(word)
        if job.state == FINISHED:
            raise Refused(35, f"Job has finished {job.id}")
        with self.lock:
            if job.state in "RE":
                self._terminate(job, "deleted", signal.SIGKILL if force else signal.SIGTERM)
            else:
                job.finish(91)

    def alter(self, word: str, resources: dict[str, str]) -> None:
        """Change what a job requests that has not started."""
        job = self.find(word)
        with self.lock:
            if job.state not in "QH":
                raise Refused(165, f"Cannot modify attribute while job running {job.id}")
            job.request["resources"].update(resources)
            job.chunks = chunks(job.request["resources"]["select"])
            self._schedule()

    def vnode(self, host: str) -> dict[str, Any]:
        """Return what pbsnodes shows of a host."""
        running = [part for job in list(self.jobs.values()) if job.state in "RE" for part in job.chunks]
        assigned = sum(part.count("ncpus") for part in running if part.host == host)
        return {"Mom": f"{host}.{DOMAIN}", "ntype": "PBS", "state": "free" if assigned < 4 else "job-busy",
                "resources_available": {"arch": "linux", "host": host, "mem": "24684096kb", **CAPACITY, "vnode": host},
                "resources_assigned": {"ncpus": assigned} if assigned else {}}

    def signal(self, word: str, number: int) -> None:
        job = self.find(word)
        send(job.sessions(job.hosts[0]), number)

    def rerun(self, word: str) -> None:
        self._terminate(self.find(word), "rerun", signal.SIGKILL)

    def run_task(self, word: str, name: str, program: list[str]) -> int:
        """Start a task on a host of a job's node file, and return its exit status when that is reported."""
        job = self.find(word)
        with_lines = [part.host for part in job.chunks if part.lines]
        host = name.removesuffix(f".{DOMAIN}")
        with self.lock:
            if host == name or host not in with_lines or job.state != "R":
                raise Refused(255, f'host "{name}" is not a node in job <{job.id}>')
            job.task_numbers[host] += 1
            number = job.task_numbers[host] + (host == job.hosts[0])  # the first task there is the job script
            task = self._spawn(job, host, program, number=number)
        began = time.monotonic()
        status = status_of(task.wait())
        # A first host that is not in the node file is not informed that a task on the first host there has ended,
        # unless the task has ended before the request.
        if job.hosts[0] not in with_lines and host == with_lines[0] and time.monotonic() - began > 0.05:
            while job.state != FINISHED:
                time.sleep(0.1)
        return status

    def _schedule(self) -> None:
        """Start what can be started, first come first served; a job without room does not keep back later ones."""
        every = list(self.jobs.values())
        for job in every:
            running = [part for other in every if other.state in "RE" for part in other.chunks]
            found = placed(job.chunks, job.request["resources"]["place"], self.hosts, running)
            if job.state == "Q" and found:
                for part, host in zip(job.chunks, found, strict=True):
                    part.host = host
                self._start(job)

    def _start(self, job: Job) -> None:
        job.state, job.started, job.run_count = "R", time.time(), job.run_count + 1
        job.ended_by, job.kill_at = "", None
        job.task_numbers.clear()
        script, nodes, scratch = (self.spool / f"{job.id}.{kind}" for kind in ("SC", "nodes", "tmp"))
        nodes.write_text("".join(f"{part.host}.{DOMAIN}\n" for part in job.chunks for _ in range(part.lines)))
        script.write_text(job.request["script"])
        scratch.mkdir(exist_ok=True)
        script.chmod(0o700)
        os.chown(script, UID, -1)
        os.chown(scratch, UID, -1)
        if job.request["command"]:
            shell = self._spawn(job, job.hosts[0], job.request["command"])
        else:
            shell = self._spawn(job, job.hosts[0], ["-bash"], program=job.request["shell"], line=str(script))
        threading.Thread(target=self._run, args=(job, shell), daemon=True).start()

    def _spawn(self, job: Job, host: str, words: list[str], *, number: int = 0, program: str = "",
               line: str = "") -> subprocess.Popen[bytes]:
        """Start a task as the leader of a session. line: what it reads from its standard input."""
        start = [*self.enter(host), sys.executable, "-IS", "-c", START, str(UID), program or words[0], *words]
        output, errors = self._streams(job)
        with output.open("ab") as out, errors.open("ab") as err:
            for file in (out, err):
                os.fchmod(file.fileno(), 0o600)
                os.fchown(file.fileno(), UID, -1)
            process = subprocess.Popen(start, env=job.environment(host, number, self.cookie, self.spool), stdout=out,
                                       stderr=err, stdin=subprocess.PIPE if line else subprocess.DEVNULL,
                                       start_new_session=True)
        if process.stdin is not None:
            process.stdin.write(f"{line}\n".encode())
            process.stdin.close()
        job.tasks.append((host, process))
        return process

    def _streams(self, job: Job) -> tuple[Path, Path]:
        """Return the files for output and errors; errors that are not joined are not delivered."""
        output = self._destination(job) if job.request["in_place"] else self.spool / f"{job.id}.o"
        return output, output if job.request["joined"] else self.spool / f"{job.id}.e"

    def _destination(self, job: Job) -> Path:
        path = self.local(job.output())
        return path / f"{job.id}.OU" if path.is_dir() else path

    def _terminate(self, job: Job, why: str, number: int) -> None:
        """Send a signal, and SIGKILL when the kill delay is over or the first session is empty."""
        with self.lock:
            if job.kill_at is None:
                job.ended_by = why
                job.kill_at = time.monotonic() + (0 if number == signal.SIGKILL else KILL_DELAY)
                send(job.sessions(job.hosts[0]), number)

    def _run(self, job: Job, shell: subprocess.Popen[bytes]) -> None:
        self._follow(job, shell)
        with self.lock:
            job.state = "E"
        send(job.sessions(), signal.SIGKILL)
        status = status_of([process.wait() for _, process in job.tasks][0])
        job.tasks.clear()
        shutil.rmtree(self.spool / f"{job.id}.tmp", ignore_errors=True)
        if not job.request["in_place"]:
            shutil.move(self.spool / f"{job.id}.o", self._destination(job))

        with self.lock:
            if job.ended_by == "rerun":
                job.state = "Q"
                for part in job.chunks:
                    part.host = ""
            else:
                self._end(job, status)
            self._schedule()

    def _follow(self, job: Job, shell: subprocess.Popen[bytes]) -> None:
        words = job.request["resources"].get("walltime", "1000:00:00").split(":")
        limit = sum(int(word) * 60 ** power for power, word in enumerate(reversed(words))) + 1
        began = time.monotonic()
        while True:
            ended, now = shell.poll() is not None, time.monotonic()
            if job.kill_at is None and ended:
                return
            if job.kill_at is not None and (now >= job.kill_at or ended and not in_sessions({shell.pid})):
                return
            if job.kill_at is None and now > began + limit:
                self._terminate(job, "walltime", signal.SIGTERM)
            time.sleep(0.05)

    def _end(self, job: Job, status: int) -> None:
        if job.ended_by == "deleted":
            job.finish(91, status)
        elif job.ended_by == "walltime":
            job.finish(93, -29)
        else:
            job.finish(93 if status else 92, status)

        for other in self.jobs.values():
            if job.id in other.waits_for:
                other.waits_for.remove(job.id)
                if not other.waits_for and other.state == "H":
                    other.state = "Q"


def status_of(code: int) -> int:
    """Return 256+N where signal N ended a process."""
    return code if code >= 0 else 256 - code


def in_sessions(sessions: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) in sessions and state not in "ZX":
                found.append(int(entry.name))
    return found


def send(sessions: set[int], number: int) -> None:
    for pid in in_sessions(sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
