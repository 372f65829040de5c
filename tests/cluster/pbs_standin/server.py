"""The stand-in's server: it queues jobs, and runs them as pbs_mom does on their hosts.

As recorded, signals go to every process of a job's sessions on its first host, the login shell dies of them, and then
the job ends.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.pbs_standin import commands
from tests.cluster.pbs_standin.jobs import DOMAIN, FINISHED, SERVER, SYSTEM_HOLD, UID, USER, Job
from tests.cluster.pbs_standin.resources import Node, Refused, placed, resource_list, seconds

UNMET: dict[str, Callable[[int], bool]] = {
    "afterok": lambda status: status != 0, "afternotok": lambda status: status == 0, "afterany": lambda status: False}
# What a task runs on its host: become the user, and execute the program.
START = """\
import os, sys
uid, program, *words = sys.argv[1:]
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
    """The queue of jobs. enter: gives the words that run a command on a host; local: see PbsCluster."""

    def __init__(self, nodes: Mapping[str, Node], address: Mapping[str, str], kill_delay: float,
                 enter: Callable[[str], list[str]], local: Callable[[str, str], Path]) -> None:
        self.nodes, self.address, self.kill_delay = nodes, address, kill_delay
        self.enter, self.local = enter, local
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
        with (open(descriptors[0], "w", errors="surrogateescape") as out,
              open(descriptors[1], "w", errors="surrogateescape") as errors,
              connection.makefile("rb") as lines):
            request = json.loads(lines.readline())
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            root = f"/proc/{struct.unpack('3i', credentials)[0]}/root"
            return commands.run(self, request["name"], commands.Call(
                request["words"], request["environment"], request["folder"], root, out, errors))

    # Requests --------------------------------------------------------------------------------------------------------

    def submit(self, request: dict[str, Any]) -> str:
        """Queue a job; return its id."""
        if request["queue"] != "workq":
            raise Refused(170, "Unknown queue")
        resources = resource_list(request["resources"])
        with self.lock:
            job = Job(f"{next(self.numbers)}{'[]' if request['array'] else ''}.{SERVER}", request, resources)
            self.jobs[job.id] = job
            job.elements = [Job(job.id.replace("[]", f"[{index}]"), request, resources, parent=job, index=index)
                            for index in indices(request["array"])]
            self._depend(job)
            self._schedule()
        return job.id

    def find(self, word: str) -> Job:
        """Return the job with this id: "12", "12.pbs-head", "79[]", "79[2].pbs-head"."""
        job_id = f"{word.partition('.')[0]}.{SERVER}"
        with self.lock:
            for job in self.jobs.values():
                for each in (job, *job.elements):
                    if each.id == job_id:
                        return each
        raise Refused(153, f"Unknown Job Id {job_id}")

    def delete(self, word: str, force: bool) -> None:
        job = self.find(word)
        if job.state == FINISHED:
            raise Refused(35, f"Job has finished {job.id}")
        with self.lock:
            for each in job.elements or [job]:
                if each.state in "RE":
                    each.comment += f" and terminated by {USER}@{SERVER}.{DOMAIN}"
                    self._terminate(each, "deleted", signal.SIGKILL if force else signal.SIGTERM)
                elif each.state != FINISHED:  # jobs that wait for one that never ran stay held for ever
                    each.finish(91, "terminated")
                    if each.parent is not None:
                        each.comment, each.exit_status = "Subjob finished", 1 if job.state == "B" else None
            if job.elements:
                job.ended_by = "deleted"
                self._end_array(job)
            self._schedule()

    def signal(self, word: str, number: int) -> None:
        job = self.find(word)
        if job.state != "R":
            raise Refused(168, f"Request invalid for state of job {job.id}")
        send(job.sessions(job.hosts[0]), number)

    def rerun(self, word: str) -> None:
        job = self.find(word)
        if job.state != "R" or not job.request["rerunnable"]:
            raise Refused(168, f"Request invalid for state of job {job.id}")
        self._terminate(job, "rerun", signal.SIGKILL)

    def run_task(self, word: str, name: str, program: list[str]) -> int:
        """Start a task on a host of a job's node file, and return its exit status when that is reported."""
        job = self.find(word)
        with_lines = [part.host for part in job.chunks if part.lines]
        host = next((each for each in with_lines if name in (self.nodes[each].mom, self.address[each])), None)
        with self.lock:
            if host is None or job.state != "R":
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

    # Dependencies ----------------------------------------------------------------------------------------------------

    def _depend(self, job: Job) -> None:
        """Check a new job's dependencies: it may run, has to wait, or never will."""
        for kind, words in job.request["depend"].items():
            for word in words:
                try:
                    other = self.find(word)
                except Refused:
                    other = None
                if other is None or other.state != FINISHED:
                    job.depend.setdefault(kind, []).append(f"{word.partition('.')[0]}.{SERVER}")
                # One that never ran counts as a success here, unlike in _update_dependents.
                if other is None or other.state == FINISHED and UNMET[kind](other.exit_status or 0):
                    self._never_run(job)
                    return
        if job.depend:
            job.state, job.substate, job.holds = "H", 22, SYSTEM_HOLD

    def _never_run(self, job: Job) -> None:
        """End a job whose condition cannot be met as if nothing was wrong, but without an Exit_status."""
        job.holds = SYSTEM_HOLD
        job.finish(92, "")
        self._update_dependents(job)

    def _update_dependents(self, ended: Job) -> None:
        """Let the jobs that wait for this one run, or end those that never will."""
        for job in list(self.jobs.values()):
            for kind in [kind for kind, others in job.depend.items() if ended.id in others and job.state == "H"]:
                if ended.exit_status is None or UNMET[kind](ended.exit_status):
                    self._never_run(job)
                    break
                job.depend[kind].remove(ended.id)
                job.depend = {kind: others for kind, others in job.depend.items() if others}
                if not job.depend:
                    job.state, job.substate, job.holds = "Q", 10, ""

    # Running ---------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start what can be started, first come first served; a job without room does not keep back later ones."""
        for job in [element for each in self.jobs.values() for element in (each.elements or [each])]:
            if job.state != "Q" or (job.parent or job).state not in "QB":
                continue
            found = placed(job.chunks, job.resources["place"], self.nodes.values())
            if found is None:
                job.comment = "Not Running: Not enough free nodes available"
                continue
            for part, node in zip(job.chunks, found, strict=True):
                node.take(part, job.id)
            self._start(job)

    def _start(self, job: Job) -> None:
        now = time.time()
        moment = time.strftime("%a %b %d at %H:%M", time.localtime(now))
        job.state, job.substate, job.started, job.run_count = "R", 42, now, job.run_count + 1
        job.ended_by, job.kill_at = "", None
        job.task_numbers.clear()
        job.comment = f"Job run at {moment} on {'+'.join(part.vnode() for part in job.chunks)}"
        if job.parent is not None and job.parent.started is None:
            job.parent.state, job.parent.substate, job.parent.started = "B", 70, now
            job.parent.comment = f"Job Array Began at {moment}"
        script = self._prepare(job)
        if job.request["command"]:
            shell = self._spawn(job, job.hosts[0], job.request["command"])
        else:
            program = job.request["shell"] or "/bin/bash"
            shell = self._spawn(job, job.hosts[0], [f"-{Path(program).name}"], program=program, line=script)
        threading.Thread(target=self._run, args=(job, shell), daemon=True).start()

    def _prepare(self, job: Job) -> str:
        """Write the job's files on its hosts; return the path of its script."""
        lines = [f"{self.nodes[part.host].mom}\n" for part in job.chunks for _ in range(part.lines)]
        for host in job.hosts:
            self.local(f"/var/spool/pbs/aux/{job.id}", host).write_text("".join(lines))
            scratch = self.local(f"/var/tmp/pbs.{job.id}", host)
            scratch.mkdir(exist_ok=True)
            os.chown(scratch, UID, UID)
        path = f"/var/spool/pbs/mom_priv/jobs/{job.id}.SC"
        script = self.local(path, job.hosts[0])
        script.write_text(job.request["script"], errors="surrogateescape")
        script.chmod(0o700)
        os.chown(script, UID, UID)
        return path

    def _spawn(self, job: Job, host: str, words: list[str], *, number: int = 0, program: str = "",
               line: str = "") -> subprocess.Popen[bytes]:
        """Start a task as the leader of a session. line: what it reads from its standard input."""
        start = [*self.enter(host), sys.executable, "-IS", "-c", START, str(UID), program or words[0], *words]
        output, errors = self._streams(job)
        with output.open("ab") as out, errors.open("ab") as err:
            for file in (out, err):
                os.fchmod(file.fileno(), 0o600)
                os.fchown(file.fileno(), UID, UID)
            process = subprocess.Popen(start, env=job.environment(host, number, self.cookie), start_new_session=True,
                                       stdin=subprocess.PIPE if line else subprocess.DEVNULL, stdout=out, stderr=err)
        if process.stdin is not None:
            process.stdin.write(f"{line}\n".encode())
            process.stdin.close()
        job.tasks.append((host, process))
        return process

    def _streams(self, job: Job) -> tuple[Path, Path]:
        """Return the files that the job writes: spooled on its first host, or in place (-k doe)."""
        paths = {letter: destination(job, letter) if letter in job.request["keep"] else
                 f"/var/spool/pbs/spool/{job.id}.{letter}" for letter in "oe"}
        joined = "o" if job.request["join"] == "oe" else "e"
        return self.local(paths["o"], job.hosts[0]), self.local(paths[joined], job.hosts[0])

    def _terminate(self, job: Job, why: str, number: int) -> None:
        """Send a signal, and SIGKILL when the kill delay is over or the first session is empty."""
        with self.lock:
            if job.kill_at is None:
                job.ended_by = why
                job.kill_at = time.monotonic() + (0 if number == signal.SIGKILL else self.kill_delay)
                send(job.sessions(job.hosts[0]), number)

    def _run(self, job: Job, shell: subprocess.Popen[bytes]) -> None:
        self._follow(job, shell)
        with self.lock:
            job.state, job.substate = "E", 51
        send(job.sessions(), signal.SIGKILL)
        status = status_of([process.wait() for _, process in job.tasks][0])
        job.tasks.clear()
        if job.ended_by != "rerun":
            self._deliver(job)
        for host in job.hosts:
            shutil.rmtree(self.local(f"/var/tmp/pbs.{job.id}", host), ignore_errors=True)
            self.local(f"/var/spool/pbs/aux/{job.id}", host).unlink(missing_ok=True)
        with self.lock:
            for node in self.nodes.values():
                node.release(job.id)
            if job.ended_by == "rerun":
                job.state, job.substate = "Q", 10
                for part in job.chunks:
                    part.host = ""
            else:
                self._ended(job, -29 if job.ended_by == "walltime" else status)
            self._schedule()

    def _follow(self, job: Job, shell: subprocess.Popen[bytes]) -> None:
        """Wait until the job has to end."""
        limit = seconds(job.resources["walltime"]) + 1 if "walltime" in job.resources else None
        began = time.monotonic()
        while True:
            ended, now = shell.poll() is not None, time.monotonic()
            if job.kill_at is None and ended:
                return
            if job.kill_at is not None and (now >= job.kill_at or ended and not in_sessions({shell.pid})):
                return
            if limit is not None and job.kill_at is None and now > began + limit:
                with self._streams(job)[1].open("a") as file:
                    file.write(f"=>> PBS: job killed: walltime {int(now - began)} exceeded limit {limit - 1}\n")
                self._terminate(job, "walltime", signal.SIGTERM)
            time.sleep(0.05)

    def _deliver(self, job: Job) -> None:
        """Copy what the job wrote to the files that its submitter named."""
        for letter in "oe":
            spooled = self.local(f"/var/spool/pbs/spool/{job.id}.{letter}", job.hosts[0])
            if spooled.exists():
                path = self.local(destination(job, letter), SERVER)
                shutil.copy(spooled, path)
                os.chown(path, UID, UID)
                spooled.unlink()

    def _ended(self, job: Job, status: int) -> None:
        if job.ended_by == "deleted":
            job.finish(91, "", status)
        elif job.ended_by == "walltime":
            job.finish(93, "exceeded resource walltime", status)
        else:
            job.finish(92 if status == 0 else 93, "finished" if status == 0 else "failed", status)
        self._update_dependents(job)
        if job.parent is not None:
            self._end_array(job.parent)

    def _end_array(self, array: Job) -> None:
        """End an array all of whose elements have ended."""
        if any(element.state != FINISHED for element in array.elements):
            return
        ran = [element.exit_status for element in array.elements if element.exit_status is not None]
        substate, how = (91, "terminated") if array.ended_by else (93, "failed") if any(ran) else (92, "finished")
        array.finish(substate, how, int(any(ran)) if ran else None)
        self._update_dependents(array)


def indices(array: str) -> Iterator[int]:
    """Yield 0, 2 and 4 for "0-4:2"."""
    if array:
        first, last, step = (int(word or 1) for word in re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", array).groups())  # type: ignore[union-attr]
        yield from range(first, last + 1, step)


def status_of(code: int) -> int:
    """Return 256+N where signal N ended a process."""
    return code if code >= 0 else 256 - code


def destination(job: Job, letter: str) -> str:
    path = job.output(letter)
    return f"{path}{job.id}.{'OU' if letter == 'o' else 'ER'}" if path.endswith("/") else path


def in_sessions(sessions: set[int]) -> list[int]:
    """Return the living processes of these sessions."""
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
