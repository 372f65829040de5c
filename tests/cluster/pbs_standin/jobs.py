"""One job: what it requested, how far it is, and its attributes as qstat -f shows them."""
from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.pbs_standin.resources import Chunk, chunks

SERVER, DOMAIN = "pbs-head", "pbs.lab"
USER, UID, HOME = "alice", 1999, "/home/alice"
FINISHED = "F"
SYSTEM_HOLD = "s"


@dataclass
class Job:
    """A job, an array, or an element of an array."""

    id: str
    request: dict[str, Any]  # see qsub.py
    resources: dict[str, str]
    state: str = "Q"
    substate: int = 10
    holds: str = ""
    depend: dict[str, list[str]] = field(default_factory=dict)  # afterok -> job ids
    comment: str = ""
    run_count: int = 0
    exit_status: int | None = None
    started: float | None = None  # as time.time()
    ended_by: str = ""  # "walltime", "deleted" or "rerun", where the job does not end by itself
    kill_at: float | None = None  # as time.monotonic()
    tasks: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)  # with their hosts
    task_numbers: Counter[str] = field(default_factory=Counter)  # by host
    parent: Job | None = None
    index: int | None = None
    elements: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chunks: list[Chunk] = chunks(self.resources["select"])

    @property
    def hosts(self) -> list[str]:
        """The hosts, each once, in order."""
        return list(dict.fromkeys(part.host for part in self.chunks if part.host))

    def sessions(self, host: str | None = None) -> set[int]:
        """Return the sessions of its tasks, on one host or on all."""
        return {process.pid for where, process in self.tasks if host in (None, where)}

    def output(self, letter: str) -> str:
        """Return the path on pbs-head of the output (letter "o") or the errors ("e")."""
        path = str(self.request[letter])
        if not path:
            number, bracket, _ = self.id.removesuffix(f".{SERVER}").partition("[")
            path = f"{self.request['folder']}/{self.request['name']}.{letter}{number}{bracket and '.^array_index^'}"
        return path if self.index is None else path.replace("^array_index^", str(self.index))

    def finish(self, substate: int, how: str, status: int | None = None) -> None:
        """Mark the job as finished. how: what is appended to its comment."""
        self.state, self.substate = FINISHED, substate
        if status is not None:
            self.exit_status = status
        if how and self.comment:
            self.comment += f" and {how}"

    def shown(self) -> dict[str, Any]:
        """Return the attributes that the kit reads, as text; a mapping stands for NAME.part."""
        placed = [part for part in self.chunks if part.host]
        every: dict[str, Any] = {
            "Job_Name": self.request["name"], "job_state": self.state, "queue": "workq",
            "substate": self.substate, "comment": self.comment, "run_count": self.run_count or "",
            "depend": ",".join(f"{kind}:{':'.join(f'{job}@{SERVER}' for job in jobs)}"
                               for kind, jobs in self.depend.items()),
            "Output_Path": f"{SERVER}.{DOMAIN}:{self.output('o')}",
            "exec_host": "+".join(part.place() for part in placed),
            "exec_vnode": "+".join(part.vnode() for part in placed),
            "stime": time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(self.started)) if self.started else "",
            "Resource_List": self.resources, "Variable_List": self.variables(),
            "Exit_status": "" if self.exit_status is None else self.exit_status,
            "array": "True" if self.elements else "",
        }
        if self.parent is None:
            every |= {"Hold_Types": self.holds or "n", "Submit_arguments": self.request["arguments"]}
        else:
            every["array_index"] = self.index
            if self.state == FINISHED and self.parent.state != FINISHED:
                every["job_state"] = "X"
        # Settings that were not made are not shown; a Variable_List may hold empty values.
        return {name: value if isinstance(value, dict) else str(value) for name, value in every.items() if value != ""}

    def variables(self) -> dict[str, str]:
        """Return the Variable_List."""
        return {**self.request["variables"], "PBS_O_QUEUE": "workq", "PBS_O_HOST": f"{SERVER}.{DOMAIN}"}

    def environment(self, host: str, task: int, cookie: str) -> dict[str, str]:
        """Return the environment of a task on a host: the Variable_List, and what PBS sets. Task 0 is the script."""
        own = next(part for part in self.chunks if part.host == host)
        node = self.hosts.index(host)
        set_by_pbs = {
            "HOME": HOME, "ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": self.id,
            "PBS_JOBNAME": self.request["name"], "PBS_QUEUE": "workq", "PBS_JOBDIR": HOME, "PBS_NODENUM": str(node),
            "PBS_MOMPORT": "15003", "PBS_JOBCOOKIE": cookie, "NCPUS": str(own.threads),
            "OMP_NUM_THREADS": str(own.threads), "TMPDIR": f"/var/tmp/pbs.{self.id}",
            "PBS_TASKNUM": f"{node << 29 | task:08X}" if task else "1",
        }
        if self.parent is not None:
            set_by_pbs |= {"PBS_ARRAY_ID": self.parent.id, "PBS_ARRAY_INDEX": str(self.index)}
        if task == 0:
            set_by_pbs |= {"USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash"}
        if task == 0 or node > 0:  # of the first host's tasks only the job script has it
            set_by_pbs["PBS_NODEFILE"] = f"/var/spool/pbs/aux/{self.id}"
        return {"PATH": "/bin:/usr/bin", **self.variables(), **set_by_pbs}
