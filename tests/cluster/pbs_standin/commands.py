"""The commands of the stand-in: what each prints, and its exit status."""
from __future__ import annotations

import getopt
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tests.cluster.pbs_standin import qsub
from tests.cluster.pbs_standin.jobs import FINISHED, SERVER, Job
from tests.cluster.pbs_standin.resources import Refused

if TYPE_CHECKING:
    from tests.cluster.pbs_standin.server import Server

VERSION = "23.06.06"
PBSDSH_USAGE = """\
Usage: pbsdsh [-c copies][-s][-v][-o] -- program [args...]
       pbsdsh [-n node_index][-s][-v][-o] -- program [args...]
       pbsdsh --version
Where -c copies =  run a copy of "program" on the first "copies" nodes,
      -n node_index = run a copy of "program" on the "node_index"-th node,
      -h hostname = run a copy of "program" on the node named by hostname,
      -s = forces synchronous execution,
      -v = forces verbose output.
      -o = no obits are waited for.
"""
TMRSH_USAGE = ("usage: pbs_tmrsh [-n][-l username] host [-n][-l username] command\n"
               "       pbs_tmrsh --version\n")


@dataclass
class Call:
    """A command that a user runs. root: where that process has its file system."""

    words: list[str]
    environment: Mapping[str, str]
    folder: str
    root: str
    by_root: bool
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
    if call.words == ["--version"]:
        print(f"pbs_version = {VERSION}", file=call.out)
        return 0
    try:
        return COMMANDS[name](server, call)
    except Refused as refused:
        usage = refused.message.lower().startswith("usage")
        print(refused.message.rstrip("\n") if usage else f"{name}: {refused.message}", file=call.errors)
        return refused.status


# Jobs ----------------------------------------------------------------------------------------------------------------

def submit(server: Server, call: Call) -> int:
    folder = call.environment.get("PWD", call.folder)
    request = qsub.request(call.words, call.environment, folder, call.root)
    if call.by_root:
        raise Refused(175, "Bad UID for job execution")
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


def rerun(server: Server, call: Call) -> int:
    return for_each(call.words, "qrerun", call, lambda job: server.rerun(job, call.by_root))


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
        for name, attributes in shown.items():
            print("\n".join([f"Job Id: {name}", *lines(attributes)]) + "\n", file=call.out)
    return status


def lines(attributes: Mapping[str, Any]) -> list[str]:
    """Return the attributes of a job as qstat -f -w shows them."""
    result = []
    for name, value in attributes.items():
        if name == "Variable_List":
            value = ",".join(f"{variable}={text.replace(',', chr(92) + ',')}" for variable, text in value.items())
        if isinstance(value, Mapping):
            result += [f"    {name}.{part} = {each}" for part, each in value.items()]
        else:
            result.append(f"    {name} = {value}")
    return result


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

def own_job(server: Server, call: Call) -> Job:
    return server.find(call.environment["PBS_JOBID"])


def pbsdsh(server: Server, call: Call) -> int:
    """Start a task for each line of the node file, or for one (-n, -h); 0 however the tasks end."""
    try:
        # Options are looked for among the program's arguments too, unless "--" is before it.
        found, program = getopt.gnu_getopt(call.words, "c:n:h:")
    except getopt.GetoptError as error:
        print(f"pbsdsh: invalid option -- '{error.opt}'", file=call.errors)
        raise Refused(1, PBSDSH_USAGE) from None
    options, job = dict(found), own_job(server, call)
    hosts = [part.host for part in job.chunks for _ in range(part.lines)]
    if "-c" in options:
        return 0  # as recorded where it is not a number; the kit does not use it
    if "-h" in options:
        hosts = [host for host in hosts if server.nodes[host].mom == options["-h"]][:1]
    elif "-n" in options:
        hosts = [hosts[int(options["-n"]) % len(hosts)]]
    if not hosts or not program:
        raise Refused(1, PBSDSH_USAGE)

    def follow(index: int, host: str) -> None:
        status = server.run_task(job, host, program)
        if status != 0:
            print(f"pbsdsh: task 0x{index:08X} exit status {status}", file=call.errors, flush=True)

    threads = [threading.Thread(target=follow, args=(index, host), daemon=True) for index, host in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def pbs_tmrsh(server: Server, call: Call) -> int:
    """Run a program on one host; return the low byte of its exit status."""
    program, host = list(call.words), ""
    while program and (program[0].startswith("-") or not host):
        word = program.pop(0)
        if word == "-l" and program:
            program.pop(0)
        elif word.startswith("-") and word != "-n":
            raise Refused(255, TMRSH_USAGE)
        elif not word.startswith("-"):
            host = word
    if not program:
        raise Refused(255, TMRSH_USAGE)
    job = own_job(server, call)
    with_lines = [part.host for part in job.chunks if part.lines]
    found = next((name for name in with_lines if host in (server.nodes[name].mom, server.address[name])), None)
    if found is None:
        raise Refused(255, f'host "{host}" is not a node in job <{job.id}>')
    return server.run_task(job, found, program) & 0xFF


COMMANDS: dict[str, Callable[[Server, Call], int]] = {
    "qsub": submit, "qstat": show, "qdel": delete, "qsig": send_signal, "qrerun": rerun, "qselect": select,
    "pbsdsh": pbsdsh, "pbs_tmrsh": pbs_tmrsh,
}
