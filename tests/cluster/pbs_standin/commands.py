"""The commands of the stand-in: what each prints, and its exit status."""
from __future__ import annotations

import getopt
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tests.cluster.pbs_standin.jobs import Refused

if TYPE_CHECKING:
    from tests.cluster.pbs_standin.server import Server


@dataclass
class Call:
    words: list[str]
    environment: Mapping[str, str]
    out: TextIO
    errors: TextIO


def run(server: Server, name: str, call: Call) -> int:
    try:
        return COMMANDS[name](server, call)
    except (Refused, getopt.GetoptError) as error:
        print(f"{name}: {error}", file=call.errors)
        return error.status if isinstance(error, Refused) else 2


def qsub(server: Server, call: Call) -> int:
    print(server.submit(request(server, call)), file=call.out)
    return 0


def request(server: Server, call: Call) -> dict[str, Any]:
    """Return what a job requests: by the directives of its script, and by the command line, which takes precedence."""
    letters = "A:J:j:k:l:N:o:q:r:S:v:VW:"
    folder = call.environment["PWD"]
    given, rest = getopt.getopt(call.words, letters)
    is_command = "--" in call.words
    script = "" if is_command else server.local(os.path.join(folder, rest[0])).read_text()

    found: dict[str, str] = {}
    resources: dict[str, str] = {}
    for letter, value in [*getopt.getopt(directives(script), letters)[0], *given]:
        if letter == "-l":
            resources |= dict(part.split("=", 1) for part in value.split(","))
        else:
            found[letter] = value
    resources = {"place": "free" if "select" in resources else "pack", "select": "1:ncpus=1", **resources}
    return {
        "command": rest if is_command else None, "script": script, "shell": found.get("-S", "/bin/bash"),
        "name": found.get("-N", os.path.basename(rest[0])), "queue": found.get("-q", "workq"),
        "resources": resources, "variables": variables(found, call.environment), "folder": folder,
        "arguments": " ".join(call.words), "array": found.get("-J", ""),
        "output": os.path.join(folder, found["-o"]) if "-o" in found else "",
        "joined": found.get("-j") == "oe", "in_place": "d" in found.get("-k", ""),
        "after": found.get("-W", "").removeprefix("depend=afterany").split(":")[1:],
    }


def directives(script: str) -> list[str]:
    """Return the words of the #PBS lines before the first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#PBS"):
            lexer = shlex.shlex(line.removeprefix("#PBS"), posix=True)
            lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", "#"
            words += lexer
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def variables(found: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of the submitter's environment the job gets."""
    result = {f"PBS_O_{name}": environment[name] for name in ("HOME", "LANG", "LOGNAME", "PATH", "SHELL")}
    result |= {"PBS_O_WORKDIR": environment["PWD"], "PBS_O_SYSTEM": "Linux"}
    for part in found["-v"].split(",") if "-v" in found else []:  # v23.06.06 ignores -V
        name, equals, value = part.partition("=")
        result[name] = value if equals else from_environment(name, environment)
    return result


def from_environment(name: str, environment: Mapping[str, str]) -> str:
    """Return what -v NAME passes on: a backslash for each quote, if they are in pairs."""
    value = environment.get(name)
    if value is None or len(re.findall("['\"]", value)) % 2:
        raise Refused(1, "cannot send environment with the job")
    return re.sub("['\"]", r"\\", value)


def qstat(server: Server, call: Call) -> int:
    """qstat -x -f -F json JOB; qstat -f -w JOB, without its Resource_List; qstat -Qf and -Bf, for one queue."""
    options, names = getopt.getopt(call.words, "BfF:Qwx")
    if ("-Q", "") in options or ("-B", "") in options:
        queue = {"queue_type": "Execution", "enabled": "True", "started": "True"}
        json.dump({"Queue": {"workq": queue}, "Server": {"pbs-head": {"default_queue": "workq"}}}, call.out)
        return 0
    if not names:  # a table of all jobs, which the kit does not read
        print("\n".join(server.jobs), file=call.out)
        return 0
    [name] = names
    job = server.find(name)
    if ("-F", "json") in options:
        json.dump({"Jobs": {job.id: job.shown()}}, call.out)
    else:
        lines = [f"    {key} = {value}" for key, value in job.shown().items() if not isinstance(value, dict)]
        print("\n".join([f"Job Id: {job.id}", *lines]), file=call.out)
    return 0


def qalter(server: Server, call: Call) -> int:
    """qalter -l RESOURCE=VALUE... JOB, of a job that has not started."""
    options, [name] = getopt.getopt(call.words, "l:")
    server.alter(name, dict(value.split("=", 1) for _, value in options))
    return 0


def pbsnodes(server: Server, call: Call) -> int:
    """pbsnodes -a -F json"""
    json.dump({"nodes": {host: server.vnode(host) for host in server.hosts}}, call.out)
    return 0


def qselect(server: Server, call: Call) -> int:
    states = dict(getopt.getopt(call.words, "s:q:")[0]).get("-s", "QHRE")
    for job in list(server.jobs.values()):
        if job.state in states:
            print(job.id, file=call.out)
    return 0


def qdel(server: Server, call: Call) -> int:
    options, jobs = getopt.getopt(call.words, "W:")
    for job in jobs:
        server.delete(job, force=bool(options))
    return 0


def qsig(server: Server, call: Call) -> int:
    [(_, name)], [job] = getopt.getopt(call.words, "s:")
    server.signal(job, getattr(signal, f"SIG{name.removeprefix('SIG')}"))
    return 0


def qrerun(server: Server, call: Call) -> int:
    server.rerun(call.words[0])
    return 0


def pbsdsh(server: Server, call: Call) -> int:
    """pbsdsh -n LINE -- PROGRAM..., of the node file: 0 however the program ends. It has no -h in v23.06.06."""
    [(_, line)], program = getopt.getopt(call.words, "n:")
    hosts = server.local(call.environment["PBS_NODEFILE"]).read_text().split()
    server.run_task(call.environment["PBS_JOBID"], hosts[int(line) % len(hosts)], program)
    return 0


def pbs_tmrsh(server: Server, call: Call) -> int:
    """pbs_tmrsh HOST PROGRAM...: the low byte of the exit status."""
    host, *program = call.words
    return server.run_task(call.environment["PBS_JOBID"], host, program) & 0xFF


COMMANDS: dict[str, Callable[[Server, Call], int]] = {
    command.__name__: command for command in (qsub, qstat, qalter, qselect, qdel, qsig, qrerun, pbsnodes, pbsdsh,
                                            pbs_tmrsh)}
