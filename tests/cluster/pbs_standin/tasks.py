"""pbsdsh and pbs_tmrsh: starting programs on the hosts of the job that they are called in.

What the programs print goes to the job's output.
"""
from __future__ import annotations

import contextlib
import getopt
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from tests.cluster.pbs_standin.resources import Refused

if TYPE_CHECKING:
    from tests.cluster.pbs_standin.client import Connection

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


def job_id() -> str:
    found = os.environ.get("PBS_JOBID")
    if not found:
        raise Refused(1, "PBS_JOBID is not set: not in a job")
    return found


def pbsdsh(words: list[str], server: Connection) -> int:
    """One task for each line of the node file, or for some; 0 however the tasks end."""
    try:
        # Options are looked for among the program's arguments too, unless "--" is before it.
        found, program = getopt.gnu_getopt(words, "c:n:h:svo")
    except getopt.GetoptError as error:
        sys.stderr.write(f"pbsdsh: invalid option -- '{error.opt}'\n")
        raise Refused(1, PBSDSH_USAGE) from None
    options, job = dict(found), job_id()
    lines = server.one({"do": "lines", "job": job})["lines"]
    if "-c" in options and not options["-c"].isdigit():
        return 0
    if "-h" in options:
        lines = [line for line in lines if line[0] == options["-h"]][:1]
    elif "-n" in options:
        lines = [lines[int(options["-n"]) % len(lines)]]
    elif "-c" in options:
        lines = lines[:int(options["-c"])]
    if not lines or not program:
        raise Refused(1, PBSDSH_USAGE)
    running: dict[int, int] = {}
    started = [threading.Event() for _ in lines]

    def stop(number: int, frame: object) -> None:
        for index, pid in running.items():
            sys.stderr.write(f"pbsdsh: killing task 0x{index:08X} signal {number}\n")
            server.one({"do": "signal_task", "job": job, "pid": pid, "signal": number})
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)

    def follow(index: int, host: str) -> None:
        for response in server.send_request({"do": "task", "job": job, "host_name": host, "command": program}):
            if "pid" in response:
                running[index] = response["pid"]
                started[index].set()
                if "-v" in options:
                    node, event = int(options.get("-n", index)), 2 * index + 2
                    sys.stderr.write(f"pbsdsh: spawned task 0x{index:08X} on logical node {node} event {event}\n"
                                     "pbsdsh: waiting on 1 spawned and 0 obits\n"
                                     "pbsdsh: waiting on 0 spawned and 1 obits\n")
                continue
            running.pop(index, None)
            started[index].set()
            if response["status"] != 0 or "-v" in options:
                sys.stderr.write(f"pbsdsh: task 0x{index:08X} exit status {response['status']}\n")
                sys.stderr.flush()

    threads = [threading.Thread(target=follow, args=(index, host), daemon=True)
               for index, (_, host) in enumerate(lines)]
    for thread in threads:
        thread.start()
        if "-s" in options:
            thread.join()
    for thread, event in zip(threads, started, strict=True):
        event.wait()
        if "-o" not in options:
            thread.join()
    return 0


def pbs_tmrsh(words: list[str], server: Connection) -> int:
    """Run a program on one host; its exit status, the low byte of it."""
    rest, host = list(words), ""
    while rest and (rest[0].startswith("-") or not host):
        word = rest.pop(0)
        if word == "-l" and rest:
            rest.pop(0)
        elif word.startswith("-") and word != "-n":
            raise Refused(255, TMRSH_USAGE)
        elif not word.startswith("-"):
            host = word
    if not rest:
        raise Refused(255, TMRSH_USAGE)
    job = job_id()
    addresses: dict[str, str] = {}
    lines: list[Any] = server.one({"do": "lines", "job": job})["lines"]
    for name, own in lines:
        addresses[name] = own
        with contextlib.suppress(OSError):
            addresses[socket.gethostbyname(name)] = own
    if host not in addresses:
        raise Refused(255, f'host "{host}" is not a node in job <{job}>')
    status = 255
    for response in server.send_request({"do": "task", "job": job, "host_name": addresses[host], "command": rest}):
        status = response.get("status", status)
    return int(status) & 0xFF
