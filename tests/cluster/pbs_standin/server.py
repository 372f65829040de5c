"""The stand-in's server and scheduler: the queue of jobs, and what the commands ask of it.

Run on pbs-head as `python -m tests.cluster.pbs_standin.server FOLDER`.
"""
from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.pbs_standin import execution, messages
from tests.cluster.pbs_standin.jobs import FINISHED, SERVER, SYSTEM_HOLD, USER_HOLD, Job, Task, moment_in_comment
from tests.cluster.pbs_standin.messages import Message
from tests.cluster.pbs_standin.resources import Node, Refused, placed, resource_list, seconds, walltime, why_not

UNMET: dict[str, Callable[[int], bool]] = {
    "afterok": lambda status: status != 0, "afternotok": lambda status: status == 0, "afterany": lambda status: False}
DEFAULT_QUEUE = "workq"


class Server:
    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "settings.json").read_text())
        self.nodes = {name: Node(name, mom, dict(settings["each"]), changed=int(time.time()))
                      for name, mom in settings["moms"].items()}
        self.places = execution.Places(folder, self.nodes)
        self.queues: dict[str, dict[str, Any]] = settings["queues"]
        self.kill_delay: float = settings["kill_delay"]
        self.jobs: dict[str, Job] = {}
        self.numbers = itertools.count()
        self.cookie = uuid.uuid4().hex.upper()
        self.lock = threading.RLock()

    # Requests --------------------------------------------------------------------------------------------------------

    def response(self, request: Message) -> Iterator[Message]:
        """What the commands ask for; a refusal is a response too."""
        try:
            yield from getattr(self, f"do_{request['do']}")(request)
        except Refused as refused:
            yield {"status": refused.status, "message": refused.message}

    def do_submit(self, request: Message) -> Iterator[Message]:
        number = next(self.numbers)  # a refused job has used its number up
        if request["uid"] == 0:
            raise Refused(175, "Bad UID for job execution")
        queue = request["queue"].partition("@")[0] or DEFAULT_QUEUE
        if queue not in self.queues:
            raise Refused(170, "Unknown queue")
        resources = resource_list(request["resources"])
        rules = self.queues[queue]
        for name, value in rules.get("resources_default", {}).items():
            resources = dict(sorted({name: value, **resources}.items()))
        for name, most in rules.get("resources_max", {}).items():
            requested = resources.get(name, "0")
            if (seconds(requested if ":" in requested else walltime(requested)) > seconds(most) if name == "walltime"
                    else int(requested) > most):
                raise Refused(188, "Job violates queue and/or server resource limits")
        if not rules.get("enabled", True):
            raise Refused(173, "Queue is not enabled")
        brackets = "[]" if request["array"] else ""
        with self.lock:
            job = Job(f"{number}{brackets}.{SERVER}", request, resources, queue)
            self.jobs[job.id] = job
            if request["array"]:
                job.elements = [Job(job.id.replace("[]", f"[{index}]"), request, resources, queue, parent=job,
                                    index=index) for index in indices(request["array"])]
            if request["hold"]:
                job.state, job.substate, job.holds = "H", 20, USER_HOLD
            self._depend(job)
            self.schedule()
        yield {"status": 0, "id": job.id}
        if request["block"]:
            with job.changed:
                job.changed.wait_for(lambda: job.state == FINISHED)
            yield {"status": job.exit_status or 0}

    def do_stat(self, request: Message) -> Iterator[Message]:
        """Jobs by id, or all; errors apart, as qstat goes on after one."""
        jobs, errors = [], []
        for word in request["jobs"]:
            try:
                job = self.find(word)
                if job.state == FINISHED and not request["finished"] and job.parent is None:
                    raise Refused(35, f"{job.id} Job has finished, use -x or -H to obtain historical job information")
                jobs.append(job)
            except Refused as refused:
                errors.append((refused.status, refused.message))
        if not request["jobs"]:
            with self.lock:
                jobs = [job for job in self.jobs.values() if request["finished"] or job.state != FINISHED]
        if request["elements"]:
            jobs = [each for job in jobs for each in (job, *job.elements)]
        yield {"status": 0, "jobs": [[job.id, job.shown()] for job in jobs], "errors": errors}

    def do_delete(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        self._owned(job, request)
        if job.state == FINISHED:
            raise Refused(35, f"Job has finished {job.id}")
        with self.lock:
            for each in job.elements or [job]:
                self._delete(each, f"{request['user']}@{request['host']}", request["force"])
            if job.elements:
                job.ended_by = "deleted"
            if job.elements and not any(each.state in "RE" for each in job.elements):
                self._array_ended(job)
            self.schedule()
        yield {"status": 0}

    def _delete(self, job: Job, by: str, force: bool) -> None:
        if job.state in "RE":
            job.comment += f" and terminated by {by}"
            execution.begin_to_kill(job, "deleted", None if force else self.kill_delay)
        elif job.state != FINISHED:
            # Jobs that wait for one that never ran stay held for ever.
            job.finish(91, "terminated")
            if job.parent is not None:
                job.comment = "Subjob finished"
                job.exit_status = 1 if job.parent.state == "B" else None
            with job.changed:
                job.changed.notify_all()

    def do_signal(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        if job.state == FINISHED and job.parent is None:
            raise Refused(35, "Job has finished")
        self._owned(job, request)
        name = request["signal"]
        if name in ("suspend", "resume"):
            raise Refused(159, f"Unauthorized Request  {job.id}")
        number = int(name) if name.isdigit() else getattr(signal, f"SIG{name.upper().removeprefix('SIG')}", None)
        targets = [each for each in job.elements or [job] if each.state == "R"]
        if number is None:
            raise Refused(165, f"Unknown/illegal signal name {job.id}")
        if not targets:
            raise Refused(168, f"Request invalid for state of job {job.id}")
        for each in targets:
            execution.signal_job(each, number)
        yield {"status": 0}

    def do_hold(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        self._changeable(job, request)
        with self.lock:
            job.holds = "".join(sorted({*job.holds, USER_HOLD}))
            if job.state == "Q":
                job.state, job.substate = "H", 20
            elif job.state == "R":
                job.comment = f"Job held by {request['user']} on {time.strftime('%a %b %d %H:%M:%S %Y')}"
        yield {"status": 0}

    def do_release(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        self._changeable(job, request)
        with self.lock:
            job.holds = job.holds.replace(USER_HOLD, "")
            if job.state == "H" and not job.holds:
                job.state, job.substate = "Q", 10
            self.schedule()
        yield {"status": 0}

    def do_rerun(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        if job.state == FINISHED:
            raise Refused(35, "Job has finished")
        if request["uid"] != 0:
            raise Refused(159, f"Unauthorized Request  {job.id}")
        if not job.request["rerunnable"]:
            raise Refused(190, f"job is not rerunnable {job.id}")
        if job.state != "R":
            raise Refused(168, f"Request invalid for state of job {job.id}")
        with job.changed:
            job.ended_by, job.kill_at = "rerun", time.monotonic()
            job.changed.notify_all()
        yield {"status": 0}

    def do_nodes(self, request: Message) -> Iterator[Message]:
        with self.lock:
            yield {"status": 0, "nodes": {node.name: {
                "mom": node.mom, "total": node.total, "jobs": list(node.used), "changed": node.changed,
                "last_used": node.last_used,
                "used": {name: node.total[name] - node.free(name) for name in node.total},
                "exclusive": bool(node.exclusive)} for node in self.nodes.values()}}

    def do_queues(self, request: Message) -> Iterator[Message]:
        with self.lock:
            counts = {name: {state: sum(job.state == state and job.queue == name for job in self.jobs.values())
                             for state in "QHWRE"} for name in self.queues}
            history = sum(job.state == FINISHED for job in self.jobs.values())
        yield {"status": 0, "queues": self.queues, "counts": counts, "default": DEFAULT_QUEUE, "history": history}

    # Tasks of a job (pbsdsh, pbs_tmrsh) ------------------------------------------------------------------------------

    def do_lines(self, request: Message) -> Iterator[Message]:
        """The hosts of a job as in its node file: for each line the name there, the host's own, and its address."""
        job = self.find(request["job"])
        yield {"status": 0, "lines": [[self.nodes[part.host].mom, part.host] for part in job.chunks
                                      for _ in range(part.lines)]}

    def do_task(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        self._owned(job, request)
        if job.state != "R":
            raise Refused(255, f"job {job.id} is not running")
        with self.lock:
            number = job.task_numbers[request["host_name"]] = job.task_numbers.get(
                request["host_name"], 1 if request["host_name"] == job.hosts[0] else 0) + 1
        with_lines = [part.host for part in job.chunks if part.lines]
        # That a task on the first host of the node file has ended is not reported to a first host that is not in it,
        # unless the task has ended before the request.
        lost = job.hosts[0] not in with_lines and with_lines[0] == request["host_name"]
        began = time.monotonic()
        for task in execution.spawn(job, self.places, request["host_name"], request["command"], cookie=self.cookie,
                                    number=number, missing=execution.MISSING_TASK):
            if task.status is not None and lost and time.monotonic() - began > 0.05:
                with job.changed:
                    job.changed.wait_for(lambda: job.state == FINISHED)
            else:
                yield {"pid": task.pid} if task.status is None else {"status": task.status}

    def do_signal_task(self, request: Message) -> Iterator[Message]:
        job = self.find(request["job"])
        self._owned(job, request)
        execution.send({pid for pid in execution.sessions(job) if pid == request["pid"]}, request["signal"])
        yield {"status": 0}

    # Jobs ------------------------------------------------------------------------------------------------------------

    def find(self, word: str) -> Job:
        """The job with this id: "12", "12.pbs-head", "79[]", "79[2].pbs-head"."""
        number = word.partition(".")[0]
        with self.lock:
            job = self.jobs.get(f"{number}.{SERVER}")
            if job is None and (found := re.fullmatch(r"(\d+)\[(\d+)\]", number)):
                parent = self.jobs.get(f"{found[1]}[].{SERVER}")
                job = next((each for each in parent.elements if each.index == int(found[2])), None) if parent else None
        if job is None:
            raise Refused(153, f"Unknown Job Id {number}.{SERVER}")
        return job

    def _owned(self, job: Job, request: Message) -> None:
        if request["uid"] not in (0, job.request["uid"]):
            raise Refused(159, f"Unauthorized Request  {job.id}")

    def _changeable(self, job: Job, request: Message) -> None:
        if job.state == FINISHED:
            raise Refused(35, "Job has finished")
        self._owned(job, request)

    def _depend(self, job: Job) -> None:
        """Check a new job's dependencies: it may run, has to wait, or never will."""
        for kind, words in job.request["depend"].items():
            for word in words:
                try:
                    other = self.find(word)
                except Refused:
                    job.depend.setdefault(kind, []).append(f"{word.partition('.')[0]}.{SERVER}")
                    self._never(job)
                    return
                if other.state == FINISHED:
                    # One that never ran counts as a success here, unlike in _update_dependents.
                    if UNMET[kind](other.exit_status or 0):
                        job.depend.setdefault(kind, []).append(other.id)
                        self._never(job)
                        return
                else:
                    job.depend.setdefault(kind, []).append(other.id)
                    other.depend.setdefault(kind.replace("after", "before"), []).append(job.id)
        if job.depend:
            job.state, job.substate, job.holds = "H", 22, SYSTEM_HOLD + job.holds

    def _never(self, job: Job) -> None:
        """A condition cannot be met any more: the job is finished as if nothing was wrong, without an Exit_status."""
        job.holds = SYSTEM_HOLD + job.holds.replace(SYSTEM_HOLD, "")
        job.finish(92, "")
        self._update_dependents(job)

    def _update_dependents(self, job: Job) -> None:
        """The job has ended: those that wait for it may run, or never will."""
        for kind, children in job.depend.items():
            after = kind.replace("before", "after")
            if not kind.startswith("before"):
                continue
            for child in (self.jobs[word] for word in children):
                if child.state != "H" or job.id not in child.depend.get(after, []):
                    continue
                if job.exit_status is None or UNMET[after](job.exit_status):
                    self._never(child)
                    continue
                child.depend[after].remove(job.id)
                child.depend = {kind: jobs for kind, jobs in child.depend.items() if jobs}
                if not any(kind.startswith("after") for kind in child.depend):
                    child.holds = child.holds.replace(SYSTEM_HOLD, "")
                    if not child.holds:
                        child.state, child.substate = "Q", 10

    # Scheduling ------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start what can be started, first come first served; a job without room does not keep back later ones."""
        nodes = list(self.nodes.values())
        with self.lock:
            for job in [element for each in self.jobs.values() for element in (each.elements or [each])]:
                if (job.parent or job).state not in "QB" or job.state != "Q" or self._at_limit(job):
                    continue
                found = (placed(job.chunks, job.resources["place"], nodes)
                         if self.queues[job.queue].get("started", True) else None)
                if found is None:
                    job.comment = (why_not(job.chunks, job.resources["place"], nodes)
                                   if self.queues[job.queue].get("started", True) else
                                   "Not Running: Queue not started.")
                    continue
                self._start(job, found)

    def _at_limit(self, job: Job) -> bool:
        most = job.parent.request["array"].partition("%")[2] if job.parent else ""
        return bool(most) and sum(each.state in "RE" for each in job.parent.elements) >= int(most)  # type: ignore[union-attr]

    def _start(self, job: Job, hosts: list[str]) -> None:
        for part, host in zip(job.chunks, hosts, strict=True):
            node = self.nodes[host]
            part.host = host
            part.slot = next(number for number in itertools.count() if number not in node.slots)
            node.slots[part.slot] = job.id
            used = node.used.setdefault(job.id, dict.fromkeys(node.total, 0))
            for name in used:
                used[name] += part.count(name)
            if "excl" in job.resources["place"]:
                node.exclusive.add(job.id)
        job.state, job.substate, job.stime, job.mtime = "R", 41, time.time(), time.time()
        job.ended_by, job.kill_at, job.reported, job.task_numbers = "", None, False, {}
        job.run_count += 1
        where = "+".join(part.vnode() for part in job.chunks)
        job.comment = f"Job run at {moment_in_comment(job.stime)} on {where}"
        if job.parent is not None and job.parent.stime is None:
            job.parent.state, job.parent.substate, job.parent.stime = "B", 70, job.stime
            job.parent.comment = f"Job Array Began at {moment_in_comment(job.stime)}"
        threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job: Job) -> None:
        def started(task: Task) -> None:
            job.reported, job.substate = True, 42

        status = execution.run(job, self.places, self.cookie, lambda: self.kill_delay, started)
        if job.ended_by != "rerun":
            job.state, job.substate = "E", 51
            if status != -3 and not execution.deliver(job, self.places):
                time.sleep(execution.UNDELIVERABLE_SECONDS)
        execution.clean_up(job, self.places)
        with self.lock:
            for node in self.nodes.values():
                if node.used.pop(job.id, None):
                    node.last_used = int(time.time())
                node.slots = {slot: each for slot, each in node.slots.items() if each != job.id}
                node.exclusive.discard(job.id)
            if job.ended_by == "rerun":
                job.state, job.substate = "Q", 10
            elif status == -3:  # after 20 more trials
                job.state, job.substate, job.holds, job.run_count = "H", 20, SYSTEM_HOLD, 21
                job.exit_status, job.comment = status, "job held, too many failed attempts to run"
                job.end = time.time()
            else:
                self._ended(job, status)
            for part in job.chunks if job.state in "QH" else []:
                part.host = ""
            self.schedule()
        with job.changed:
            job.changed.notify_all()

    def _ended(self, job: Job, status: int) -> None:
        if job.ended_by == "deleted":
            job.finish(91, "", status)
        elif job.ended_by == "walltime":
            job.finish(93, "exceeded resource walltime", status)
        else:
            job.finish(92 if status == 0 else 93, "finished" if status == 0 else "failed", status)
        self._update_dependents(job)
        if job.parent is not None and all(each.state == FINISHED for each in job.parent.elements):
            self._array_ended(job.parent)

    def _array_ended(self, parent: Job) -> None:
        ran = [each.exit_status for each in parent.elements if each.exit_status is not None]
        failed = any(ran)
        substate, how = (91, "terminated") if parent.ended_by else (93, "failed") if failed else (92, "finished")
        parent.finish(substate, how, int(failed) if ran else None)
        self._update_dependents(parent)
        with parent.changed:
            parent.changed.notify_all()


def indices(array: str) -> list[int]:
    """"0-4:2%1" -> [0, 2, 4]."""
    first, last, step = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?:%\d+)?", array).groups()  # type: ignore[union-attr]
    return list(range(int(first), int(last) + 1, int(step or 1)))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    messages.serve(str(folder / "server"), Server(folder).response, mode=0o666)
