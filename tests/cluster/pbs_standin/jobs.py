"""One job: what it requested for, how far it is, and its attributes as qstat -f shows them."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.pbs_standin.resources import Chunk, chunks

SERVER = "pbs-head"
DOMAIN = "pbs.lab"
FINISHED = "F"
NOT_QUEUED_YET = ("H", "W")
SYSTEM_HOLD, USER_HOLD = "s", "u"


def moment(when: float) -> str:
    """As in qstat: "Sat Nov 21 03:55:00 2026"."""
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(when))


def moment_in_comment(when: float) -> str:
    return time.strftime("%a %b %d at %H:%M", time.localtime(when))


@dataclass
class Task:
    """A process that the job's mom started, the leader of a session."""

    host: str
    pid: int | None = None
    status: int | None = None


@dataclass
class Job:
    """A job, an array, or an element of an array."""

    id: str
    request: dict[str, Any]  # what qsub sent: see qsub.py
    resources: dict[str, str]
    queue: str
    state: str = "Q"
    substate: int = 10
    holds: str = ""
    depend: dict[str, list[str]] = field(default_factory=dict)  # afterok -> job ids; beforeok and so on on the parent
    comment: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    task_numbers: dict[str, int] = field(default_factory=dict)
    run_count: int = 0
    exit_status: int | None = None
    ended_by: str = ""  # "", "walltime", "deleted", "rerun"; what takes the job's end out of its own hands
    kill_at: float | None = None
    reported: bool = False  # the first host has sent its first report to the server
    ctime: float = field(default_factory=time.time)
    mtime: float = field(default_factory=time.time)
    stime: float | None = None
    end: float | None = None
    parent: Job | None = None
    index: int | None = None
    elements: list[Job] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def __post_init__(self) -> None:
        self.chunks = chunks(self.resources["select"])

    # Names -----------------------------------------------------------------------------------------------------------

    @property
    def number(self) -> str:
        return self.id.partition(".")[0].partition("[")[0]

    @property
    def name(self) -> str:
        return str(self.request["name"])

    @property
    def hosts(self) -> list[str]:
        """The hosts, each once, the first first."""
        return list(dict.fromkeys(part.host for part in self.chunks if part.host))

    def output(self, letter: str) -> str:
        """The path on pbs-head of the output (letter "o") or the errors ("e")."""
        path = self.request[{"o": "output", "e": "error"}[letter]]
        if not path:
            suffix = "" if not self.id.partition("[")[1] else f".{self.index if self.parent else '^array_index^'}"
            path = f"{self.request['workdir']}/{self.name}.{letter}{self.number}{suffix}"
        return str(path) if self.index is None else str(path).replace("^array_index^", str(self.index))

    def variables(self) -> dict[str, str]:
        """As in Variable_List."""
        return {**self.request["variables"], "PBS_O_QUEUE": self.request["queue"] or self.queue,
                "PBS_O_HOST": f"{self.request['host']}.{DOMAIN}"}

    # Ends ------------------------------------------------------------------------------------------------------------

    def finish(self, substate: int, how: str, status: int | None = None) -> None:
        """Make it a finished job. how: what is appended to its comment."""
        self.state, self.substate, self.end = FINISHED, substate, time.time()
        self.mtime = self.end
        if status is not None:
            self.exit_status = status
        if how and self.comment:
            self.comment += f" and {how}"

    # What qstat -f shows ---------------------------------------------------------------------------------------------

    def shown(self) -> dict[str, Any]:
        """The attributes in the order of qstat -f; a mapping stands for NAME.part, and everything else is a string."""
        request, at = self.request, f"{SERVER}.{DOMAIN}"
        counts = [sum(element.state in states for element in self.elements)
                  for states in ("QHW", "R", "E", "FX")]
        left = [element.index for element in self.elements if element.state in "QHW"]
        used = {"cpupercent": "0", "cput": "00:00:00", "mem": "0kb", "ncpus": self.resources["ncpus"],
                "vmem": "0kb", "walltime": self.resources_used()}
        every: dict[str, Any] = {
            "Job_Name": self.name, "Job_Owner": f"{request['user']}@{request['host']}.{DOMAIN}",
            "resources_used": used if self.reported and not self.elements else None,
            "job_state": "X" if self.state == FINISHED and self.parent and self.parent.state != FINISHED
            else self.state,
            "queue": self.queue, "server": SERVER, "Account_Name": request["account"],
            "Checkpoint": None if self.parent else "u", "ctime": moment(self.ctime),
            "depend": ",".join(f"{kind}:{':'.join(f'{job}@{SERVER}' for job in jobs)}"
                               for kind, jobs in self.depend.items()),
            "Error_Path": f"{at}:{self.output('e')}",
            "exec_host": "+".join(part.place() for part in self.chunks if part.host),
            "exec_vnode": "+".join(part.vnode() for part in self.chunks if part.host),
            "Hold_Types": None if self.parent else self.holds or "n", "Join_Path": request["join"],
            "Keep_Files": request["keep"], "Mail_Points": request["mail_points"],
            "Mail_Users": request["mail_users"], "mtime": moment(self.mtime),
            "Output_Path": f"{at}:{self.output('o')}", "Priority": request["priority"],
            "qtime": moment(self.ctime), "Remove_Files": request["remove"],
            "Rerunable": "True" if request["rerunnable"] else "False", "Resource_List": self.resources,
            "stime": moment(self.stime) if self.stime is not None else None,
            "session_id": str(self.tasks[0].pid) if self.reported and self.state in "RE" and self.tasks else None,
            "obittime": moment(self.end) if self.end and self.stime else None, "Shell_Path_List": request["shell"],
            "jobdir": request["home"] if self.reported and not self.elements else None,
            "substate": str(self.substate), "Variable_List": self.variables(), "comment": self.comment,
            "etime": moment(self.ctime) if not self.holds or self.stime else None,
            "umask": request["umask"], "run_count": str(self.run_count) if self.run_count else None,
            "Stageout_status": "1" if self.state == FINISHED and self.exit_status is not None else None,
            "Exit_status": str(self.exit_status) if self.exit_status is not None else None,
            "Submit_arguments": None if self.parent else request["arguments"],
            "executable": request.get("executable"), "argument_list": request.get("argument_list"),
        }
        if self.elements:
            every |= {
                "array": "True",
                "array_state_count": "Queued:{} Running:{} Exiting:{} Expired:{}".format(
                    *(counts if self.state != FINISHED else [0] * 4)),
                "array_indices_submitted": request["array"].partition("%")[0],
                "array_indices_remaining": ",".join(map(str, left)) or "-",
            }
        if self.parent:
            every |= {"array_id": self.parent.id, "array_index": str(self.index)}
        every |= {"history_timestamp": str(int(self.end)) if self.end else None, "project": request["project"],
                  "Submit_Host": f"{request['host']}.{DOMAIN}"}
        if self.elements:
            every["max_run_subjobs"] = request["array"].partition("%")[2] or None
        # Settings that were not made are not shown; a Variable_List may hold empty values.
        return {name: value for name, value in every.items() if value not in (None, "")}

    def resources_used(self) -> str:
        """A job's mom reports seldom: what a running job has used is shown as nothing for a while."""
        if self.stime is None or self.end is None:
            return "00:00:00"
        seconds = int(self.end - self.stime)
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def environment(job: Job, host: str, task: int, cookie: str) -> dict[str, str]:
    """The environment of a task of a job: Variable_List, and what the mom of `host` sets. task: 0 is the job script."""
    own = next(part for part in job.chunks if part.host == host)
    node = job.hosts.index(host)
    set_by_mom = {
        "HOME": job.request["home"], "ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": job.id,
        "PBS_JOBNAME": job.name, "PBS_QUEUE": job.queue, "PBS_JOBDIR": job.request["home"],
        "PBS_NODENUM": str(node), "PBS_MOMPORT": "15003", "PBS_JOBCOOKIE": cookie,
        "NCPUS": str(own.threads), "OMP_NUM_THREADS": str(own.threads), "TMPDIR": f"/var/tmp/pbs.{job.id}",
    }
    if job.parent is not None:
        set_by_mom |= {"PBS_ARRAY_ID": job.parent.id, "PBS_ARRAY_INDEX": str(job.index)}
    if task == 0:
        set_by_mom |= {"USER": job.request["user"], "LOGNAME": job.request["user"], "PBS_TASKNUM": "1",
                       "SHELL": job.request["login_shell"]}
    else:
        set_by_mom["PBS_TASKNUM"] = f"{node << 29 | task:08X}"
    if task == 0 or node > 0:  # of the first host's tasks only the job script has it
        set_by_mom["PBS_NODEFILE"] = f"/var/spool/pbs/aux/{job.id}"
    return {"PATH": "/bin:/usr/bin", **job.variables(), **set_by_mom}
