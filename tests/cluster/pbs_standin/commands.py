"""The commands of the stand-in: what each prints, and its exit status."""
from __future__ import annotations

import getopt
import json
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tests.cluster.pbs_standin import qsub
from tests.cluster.pbs_standin.jobs import FINISHED, SERVER
from tests.cluster.pbs_standin.resources import Refused

if TYPE_CHECKING:
    from tests.cluster.pbs_standin.server import Server

VERSION = "23.06.06"
@dataclass
class Call:
    """A command that a user runs. root: where that process has its file system."""

    words: list[str]
    environment: Mapping[str, str]
    folder: str
    root: str
    out: TextIO
    errors: TextIO

    def options(self, letters: str) -> tuple[dict[str, str], list[str]]:
        try:
            found, rest = getopt.getopt(self.words, letters)
        except getopt.GetoptError as error:
            raise Refused(2, f"-{error.opt} is not part of this stand-in for PBS") from None
        return dict(found), rest


def run(server: Server, name: str, call: Call) -> int:
    """Run a command; return its exit status."""
    try:
        return COMMANDS[name](server, call)
    except Refused as refused:
        print(f"{name}: {refused.message}", file=call.errors)
        return refused.status


# Jobs ----------------------------------------------------------------------------------------------------------------

def submit(server: Server, call: Call) -> int:
    folder = call.environment.get("PWD", call.folder)
    request = qsub.request(call.words, call.environment, folder, call.root)
    print(server.submit(request), file=call.out)
    return 0


def delete(server: Server, call: Call) -> int:
    options, jobs = call.options("W:")
    return for_each(jobs, "qdel", call, lambda job: server.delete(job, options.get("-W") == "force"))


def send_signal(server: Server, call: Call) -> int:
    options, jobs = call.options("s:")
    name = options.get("-s", "SIGTERM")
    number = int(name) if name.isdigit() else getattr(signal, f"SIG{name.removeprefix('SIG')}")
    return for_each(jobs, "qsig", call, lambda job: server.signal(job, number))


def for_each(jobs: list[str], name: str, call: Call, act: Callable[[str], None]) -> int:
    status = 0
    for job in jobs:
        try:
            act(job)
        except Refused as refused:
            status = refused.status
            print(f"{name}: {refused.message}", file=call.errors)
    return status


def select(server: Server, call: Call) -> int:
    """qselect -s STATES"""
    options, _ = call.options("s:q:")
    for job in server.jobs.values():
        if job.state in options.get("-s", "QHRBE"):
            print(job.id, file=call.out)
    return 0


def show(server: Server, call: Call) -> int:
    """qstat -f -F json, and qstat -f -w for a job; -x: also one that has ended; -t: also the elements of an array"""
    options, names = call.options("fF:wxt")
    if "-f" not in options or not {"-F", "-w"} & set(options) or not names:
        raise Refused(2, f"qstat {' '.join(call.words)} is not part of this stand-in for PBS")
    shown: dict[str, dict[str, Any]] = {}

    def add(name: str) -> None:
        job = server.find(name)
        if job.state == FINISHED and "-x" not in options and job.parent is None:
            raise Refused(35, f"{job.id} Job has finished, use -x or -H to obtain historical job information")
        shown.update({each.id: each.shown() for each in (job, *(job.elements if "-t" in options else []))})

    status = for_each(names, "qstat", call, add)
    if "-F" in options:
        document = {"timestamp": int(time.time()), "pbs_version": VERSION, "pbs_server": SERVER,
                    **({"Jobs": json_value("Jobs", shown)} if shown else {})}
        print(json.dumps(document, indent="\t", separators=(",", ":\t"), ensure_ascii=False), file=call.out)
    else:
        for name, attributes in shown.items():  # without Resource_List and Variable_List
            lines = [f"    {key} = {value}" for key, value in attributes.items() if isinstance(value, str)]
            print("\n".join([f"Job Id: {name}", *lines]) + "\n", file=call.out)
    return status


def json_value(name: str, value: Any) -> Any:
    """Convert an attribute as qstat -F json does: what looks like a number or a truth value becomes one."""
    if isinstance(value, Mapping):
        return {key: json_value(key, each) for key, each in value.items()}
    if value in ("true", "false"):
        return value == "true"
    if name == "Job_Name" or not re.fullmatch(r"\s*-?\d+\.?\d*([eE][+-]?\d+)?", value):
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


# Tasks of the job that a command is called in ------------------------------------------------------------------------

def pbsdsh(server: Server, call: Call) -> int:
    """pbsdsh -h HOST -- program: run a program on one host; 0 however it ends."""
    options, program = call.options("h:")
    status = server.run_task(call.environment["PBS_JOBID"], options["-h"], program)
    if status != 0:
        print(f"pbsdsh: task 0x00000000 exit status {status}", file=call.errors)
    return 0


def pbs_tmrsh(server: Server, call: Call) -> int:
    """Run a program on one host; return the low byte of its exit status."""
    program, host = list(call.words), ""
    while program and (program[0].startswith("-") or not host):
        word = program.pop(0)
        if word == "-l" and program:
            program.pop(0)
        elif word.startswith("-") and word != "-n":
            raise Refused(255, "usage")
        elif not word.startswith("-"):
            host = word
    return server.run_task(call.environment["PBS_JOBID"], host, program) & 0xFF


COMMANDS: dict[str, Callable[[Server, Call], int]] = {
    "qsub": submit, "qstat": show, "qselect": select, "qdel": delete, "qsig": send_signal, "pbsdsh": pbsdsh,
    "qrerun": lambda server, call: for_each(call.words, "qrerun", call, server.rerun), "pbs_tmrsh": pbs_tmrsh,
}
