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
    def number(self) -> str:
        return self.id.partition(".")[0].partition("[")[0]

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
            suffix = ".^array_index^" if "[" in self.id else ""
            path = f"{self.request['folder']}/{self.request['name']}.{letter}{self.number}{suffix}"
        return path if self.index is None else path.replace("^array_index^", str(self.index))

    def finish(self, substate: int, how: str, status: int | None = None) -> None:
        """Mark the job as finished. how: what is appended to its comment."""
        self.state, self.substate = FINISHED, substate
        if status is not None:
            self.exit_status = status
        if how and self.comment:
            self.comment += f" and {how}"

    def shown(self) -> dict[str, Any]:
        """Return its attributes as text; a mapping stands for NAME.part. Of the times only stime is there."""
        request, at = self.request, f"{SERVER}.{DOMAIN}"
        running = [part for part in self.chunks if part.host]
        every: dict[str, Any] = {
            "Job_Name": request["name"], "Job_Owner": f"{USER}@{at}", "queue": "workq", "server": SERVER,
            "job_state": self.state, "substate": self.substate, "comment": self.comment,
            "depend": ",".join(f"{kind}:{':'.join(f'{job}@{SERVER}' for job in jobs)}"
                               for kind, jobs in self.depend.items()),
            "Account_Name": request["account"], "Join_Path": request["join"], "Keep_Files": request["keep"],
            "Output_Path": f"{at}:{self.output('o')}", "Error_Path": f"{at}:{self.output('e')}",
            "exec_host": "+".join(part.place() for part in running),
            "exec_vnode": "+".join(part.vnode() for part in running),
            "Mail_Points": "a", "Priority": "0", "project": "_pbs_project_default", "Submit_Host": at,
            "Rerunable": str(request["rerunnable"]), "Resource_List": self.resources,
            "stime": time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(self.started)) if self.started else "",
            "Shell_Path_List": request["shell"], "Variable_List": self.variables(),
            "run_count": self.run_count or "", "Exit_status": "" if self.exit_status is None else self.exit_status,
            "Stageout_status": "1" if self.state == FINISHED and self.exit_status is not None else "",
            **request["executable"],
        }
        if self.started and not self.elements:
            every["jobdir"] = HOME
        if self.parent:
            if self.state == FINISHED and self.parent.state != FINISHED:
                every["job_state"] = "X"
            every |= {"array_id": self.parent.id, "array_index": str(self.index)}
        else:
            every |= {"Checkpoint": "u", "Hold_Types": self.holds or "n", "Submit_arguments": request["arguments"]}
        if self.elements:
            every |= self.array_attributes()
        # Settings that were not made are not shown; a Variable_List may hold empty values.
        return {name: value if isinstance(value, dict) else str(value) for name, value in every.items() if value != ""}

    def array_attributes(self) -> dict[str, str]:
        counts = [sum(element.state in states for element in self.elements) for states in ("QHW", "R", "E", "F")]
        left = [str(element.index) for element in self.elements if element.state in "QHW"]
        return {"array": "True", "array_indices_submitted": self.request["array"],
                "array_indices_remaining": ",".join(left) or "-",
                "array_state_count": "Queued:{} Running:{} Exiting:{} Expired:{}".format(
                    *(counts if self.state != FINISHED else [0] * 4))}

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
