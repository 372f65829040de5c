"""A job of the stand-in: what it requested, where it is placed, and what qstat -f and its processes show of it."""
from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER, DOMAIN = "pbs-head", "pbs.lab"
USER, UID, HOME = "alice", os.geteuid() or 1999, "/home/alice"  # a user namespace has one user, who becomes alice
CAPACITY = {"ncpus": 4, "ngpus": 4}  # of each host
FINISHED = "F"


class Refused(Exception):
    """A command fails with this exit status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Chunk:
    """One chunk of a select statement, with its resources in the order in which they were requested."""

    requested: dict[str, str]
    host: str = ""  # where it was placed

    def count(self, name: str) -> int:
        return int(self.requested.get(name, 1 if name == "ncpus" else 0))

    @property
    def lines(self) -> int:
        """The number of lines that its host has in the node file."""
        return int(self.requested.get("mpiprocs", 1))

    def vnode(self) -> str:
        """Its part of exec_vnode: "(n1:ncpus=2:ngpus=1)"."""
        names = [name for name in self.requested if name in CAPACITY]
        names = names if "ncpus" in names else ["ncpus", *names]
        return f"({self.host}:{':'.join(f'{name}={self.count(name)}' for name in names)})"


def chunks(select: str) -> list[Chunk]:
    """Return the chunks of a select statement: two of "2:ncpus=4:ngpus=1"."""
    result = []
    for group in select.split("+"):
        words = group.split(":")
        number = 1 if "=" in words[0] else int(words.pop(0))
        result += [Chunk(dict(word.split("=") for word in words)) for _ in range(number)]
    return result


def placed(parts: Sequence[Chunk], place: str, hosts: Sequence[str], running: Iterable[Chunk]) -> list[str] | None:
    """Return the host of each chunk, the first with room beside the running ones; None where there is no room."""
    free = {host: Counter(CAPACITY) for host in hosts}
    for part in running:
        free[part.host].subtract({name: part.count(name) for name in CAPACITY})

    chosen: list[str] = []
    for together in [parts] if place == "pack" else [[part] for part in parts]:
        needed = Counter({name: sum(part.count(name) for part in together) for name in CAPACITY})
        possible = [host for host in hosts if needed <= free[host] and not (place == "scatter" and host in chosen)
                    and all(part.requested.get("host", host) == host for part in together)]
        if not possible:
            return None
        chosen += possible[:1] * len(together)
        free[possible[0]].subtract(needed)
    return chosen


@dataclass
class Job:
    """A job, an array (state "B"), or an element of an array."""

    id: str
    request: Mapping[str, Any]  # see commands.request()
    state: str = "Q"
    waits_for: list[str] = field(default_factory=list)  # the jobs that have to end before
    substate: int | None = None  # of a finished job: 91 deleted, 92 succeeded, 93 failed
    run_count: int = 0
    exit_status: int | None = None
    started: float | None = None  # as time.time()
    ended_by: str = ""  # "walltime", "deleted" or "rerun", where the job does not end by itself
    kill_at: float | None = None  # as time.monotonic()
    tasks: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)  # with their hosts
    task_numbers: Counter[str] = field(default_factory=Counter)  # by host
    array: str = ""  # of an element: the id of its array

    def __post_init__(self) -> None:
        self.chunks = chunks(self.request["resources"]["select"])

    @property
    def hosts(self) -> list[str]:
        """The hosts, each once, in order."""
        return list(dict.fromkeys(part.host for part in self.chunks if part.host))

    def sessions(self, host: str | None = None) -> set[int]:
        """Return the sessions of its tasks, on one host or on all."""
        return {process.pid for where, process in self.tasks if host in (None, where)}

    @property
    def index(self) -> str:
        """The index of an element; "" of any other job."""
        return self.id.partition("[")[2].partition("]")[0]

    def output(self) -> str:
        """Return the file for the output, as on pbs-head, or the folder for that file."""
        number = re.match(r"\d+", self.id)[0]  # type: ignore[index]
        default = f"{self.request['folder']}/{self.request['name']}.o{number}{self.index and f'.{self.index}'}"
        return self.request["output"] or default

    def finish(self, substate: int, exit_status: int | None = None) -> None:
        self.state, self.substate, self.exit_status = FINISHED, substate, exit_status

    def shown(self) -> dict[str, Any]:
        """Return the attributes that the kit reads; a mapping stands for NAME.part."""
        placed_chunks = [part for part in self.chunks if part.host]
        every = {
            "job_state": self.state, "substate": self.substate, "queue": "workq", "run_count": self.run_count or None,
            "Exit_status": self.exit_status, "Resource_List": self.request["resources"],
            "depend": ",".join(f"afterany:{job}@{SERVER}" for job in self.waits_for) or None,
            "Output_Path": f"{SERVER}.{DOMAIN}:{self.output()}",
            "exec_host": "+".join(f"{part.host}/0" for part in placed_chunks) or None,
            "exec_vnode": "+".join(part.vnode() for part in placed_chunks) or None,
            "stime": self.started and time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(self.started)),
            "Submit_arguments": None if self.array else self.request["arguments"],
        }
        return {name: value for name, value in every.items() if value is not None}

    def environment(self, host: str, task: int, cookie: str, spool: Path) -> dict[str, str]:
        """Return the environment of a task on a host: what was submitted, and what PBS sets. Task 0 is the script."""
        own = next(part for part in self.chunks if part.host == host)
        threads = str(own.requested.get("ompthreads", own.count("ncpus")))
        node = self.hosts.index(host)
        set_by_pbs = {
            "PBS_O_QUEUE": "workq", "PBS_O_HOST": f"{SERVER}.{DOMAIN}", "HOME": HOME, "ENVIRONMENT": "BATCH",
            "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": self.id, "PBS_JOBNAME": self.request["name"],
            "PBS_QUEUE": "workq", "PBS_JOBDIR": HOME, "PBS_NODENUM": str(node), "PBS_MOMPORT": "15003",
            "PBS_JOBCOOKIE": cookie, "NCPUS": threads, "OMP_NUM_THREADS": threads, "TMPDIR": f"{spool}/{self.id}.tmp",
            "PBS_TASKNUM": f"{node << 29 | task:08X}" if task else "1",
        }
        if self.array:
            set_by_pbs |= {"PBS_ARRAY_ID": self.array, "PBS_ARRAY_INDEX": self.index}
        if task == 0:
            set_by_pbs |= {"USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash"}
        if task == 0 or node > 0:  # of the first host's tasks only the job script has it
            set_by_pbs["PBS_NODEFILE"] = f"{spool}/{self.id}.nodes"
        return {"PATH": "/bin:/usr/bin", **self.request["variables"], **set_by_pbs}
