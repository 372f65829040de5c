"""The commands of the stand-in, except those that work inside of a job (tasks.py): main(name, socket of the server)."""
from __future__ import annotations

import getopt
import os
import pwd
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.cluster.pbs_standin import listings, messages, qsub, tasks
from tests.cluster.pbs_standin.jobs import DOMAIN, SERVER
from tests.cluster.pbs_standin.resources import Refused

JOB_USAGE = {
    "qdel": "usage:\n\tqdel [-W force|suppress_email=X] [-x] job_identifier...\n\tqdel --version\n",
    "qsig": "usage: qsig [-s signal] job_identifier...\n       qsig --version\n",
    "qhold": "usage: qhold [-h hold_list] job_identifier...\n       qhold --version\n",
    "qrls": "usage: qrls [-h hold_list] job_identifier...\n       qrls --version\n",
    "qrerun": "usage: qrerun [-W force] job_identifier...\n       qrerun --version\n",
}
JOB_OPTIONS = {"qdel": "W:x", "qsig": "s:", "qhold": "h:", "qrls": "h:", "qrerun": "W:"}
VERBS = {"qdel": "delete", "qsig": "signal", "qhold": "hold", "qrls": "release", "qrerun": "rerun"}
# A server that does not response: exit status, and the second line.
DOWN = {"qsub": (162, "qsub: cannot connect to server {server} (errno={error})"),
        "qdel": (162, "Couldn't connect to cluster: {server}"),
        "pbsnodes": (1, "pbsnodes: cannot connect to server {server}, error={error}")}


class Connection:
    """The server, as a command reaches it."""

    def __init__(self, command: str, path: str) -> None:
        self.command, self.path = command, path

    def send_request(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        server = os.environ.get("PBS_SERVER") or SERVER
        known = server in (SERVER, f"{SERVER}.{DOMAIN}")
        try:
            if not known:
                raise ConnectionRefusedError
            for response in messages.send_request(self.path, request):
                if "message" in response:
                    raise Refused(response["status"], response["message"])
                yield response
        except (ConnectionRefusedError, FileNotFoundError):
            status, second = DOWN.get(self.command, (255, self.command + ": cannot connect to server {server} "
                                                     "(errno={error})"))
            first = "Connection refused" if known else "Unknown Host."
            sys.stderr.write(f"{first}\n{second.format(server=server, error=15010 if known else 15008)}\n")
            raise SystemExit(status if known else 160) from None

    def one(self, request: dict[str, Any]) -> dict[str, Any]:
        return next(self.send_request(request))


def who() -> dict[str, str]:
    return {"user": pwd.getpwuid(os.getuid()).pw_name, "host": f"{socket.gethostname()}.{DOMAIN}"}


def submit(words: list[str], server: Connection) -> int:
    request = qsub.request(words)
    talk = server.send_request(request)
    response = next(talk)
    if not request["silent"]:
        print(response["id"], flush=True)
    return int(next(talk)["status"]) & 0xFF if request["block"] else 0


def change(words: list[str], server: Connection) -> int:
    """qdel, qsig, qhold, qrls, qrerun: one request for each job."""
    name = server.command
    try:
        found, jobs = getopt.getopt(words, JOB_OPTIONS[name])
    except getopt.GetoptError:
        jobs = []
    if not jobs:
        raise Refused(2, JOB_USAGE[name])
    options = dict(found)
    status = 0
    for job in jobs:
        try:
            server.one({"do": VERBS[name], "job": job, "signal": options.get("-s", "SIGTERM"),
                        "force": options.get("-W") == "force", **who()})
        except Refused as refused:
            status = refused.status
            sys.stderr.write(f"{name}: {refused.message}\n")
    return status


def status_of(words: list[str], server: Connection) -> int:
    """qstat"""
    found, names = getopt.gnu_getopt(words, "fF:xtJaisnr1wQBHu:")
    letters = {letter for letter, _ in found}
    as_json = dict(found).get("-F") == "json"
    if "-Q" in letters:
        return queues(names, letters, as_json, server)
    if "-B" in letters:
        return server_status("-f" in letters, server)
    bad = [name for name in names if not name[:1].isdigit()]
    for name in bad:
        sys.stderr.write(f"qstat: Unknown queue destination {name}\n")
    jobs, errors = [], []
    if not bad:
        response = server.one({"do": "stat", "jobs": names, "finished": bool({"-x", "-H"} & letters),
                             "elements": "-t" in letters})
        jobs, errors = response["jobs"], response["errors"]
    if "-J" in letters:
        jobs = [(name, job) for name, job in jobs if "array" in job]
    if as_json:
        print(listings.document("Jobs", dict(jobs)))
    elif "-f" in letters:
        print("".join(listings.full("Job Id", name, job, "-w" in letters) for name, job in jobs), end="")
    elif {"-a", "-i", "-s", "-n", "-r"} & letters:
        print(listings.wide_table(jobs, nodes="-n" in letters, comments="-s" in letters, one_line="-1" in letters),
              end="")
    else:
        print(listings.table(jobs), end="")
    sys.stdout.flush()
    for _, message in errors:
        sys.stderr.write(f"qstat: {message}\n")
    return 170 if bad else errors[-1][0] if errors else 0


def queues(names: list[str], letters: set[str], as_json: bool, server: Connection) -> int:
    response = server.one({"do": "queues"})
    known = {name: rules for name, rules in response["queues"].items() if name in names or not names}
    for name in names:
        if name not in known:
            sys.stderr.write(f"qstat: Unknown queue {name}\n")
    shown = {name: listings.queue_attributes(rules, response["counts"][name]) for name, rules in known.items()}
    if as_json:
        print(listings.document("Queue", shown))
    elif "-f" in letters:
        print("".join(listings.full("Queue", name, queue, False) for name, queue in shown.items()), end="")
    elif known:
        print(listings.queue_table(known, response["counts"]), end="")
    return 170 if len(known) < len(names) else 0


def server_status(full: bool, server: Connection) -> int:
    response = server.one({"do": "queues"})
    count = {state: sum(each[state] for each in response["counts"].values()) for state in "QHWRE"}
    total = sum(count.values()) + response["history"]
    if full:
        attributes = {"server_state": "Active", "server_host": f"{SERVER}.{DOMAIN}", "scheduling": "True",
                      "total_jobs": str(total), "state_count": listings.state_count(count),
                      "default_queue": response["default"], "job_history_enable": "True",
                      "pbs_version": listings.VERSION}
        print(listings.full("Server", SERVER, attributes, False), end="")
        return 0
    print("Server             Max   Tot   Que   Run   Hld   Wat   Trn   Ext Status\n"
          "---------------- ----- ----- ----- ----- ----- ----- ----- ----- -----------\n"
          f"{SERVER:16} {0:5} {total:5} {count['Q']:5} {count['R']:5} {count['H']:5} {count['W']:5} {0:5} "
          f"{count['E']:5} Active    ")
    return 0


def nodes(words: list[str], server: Connection) -> int:
    """pbsnodes -a, -l, -v, or names; -F json"""
    found, names = getopt.gnu_getopt(words, "alvF:S")
    letters = {letter for letter, _ in found}
    known = server.one({"do": "nodes"})["nodes"]
    status = 0
    for name in names:
        if name not in known:
            sys.stderr.write(f"Node: {name},  Error: Unknown node \n")
            status = 1
    wanted = {name: node for name, node in known.items() if name in names or not names}
    if "-l" in letters:
        return 0  # only nodes that are down are listed
    if not names and "-a" not in letters:
        raise Refused(1, "usage:\tpbsnodes [-{o|r}][-C comment][-s server] host host ...\n")
    if dict(found).get("-F") == "json":
        shown = {name: listings.node_attributes(name, node, as_text=False) for name, node in wanted.items()}
        print(listings.document("nodes", shown))
    else:
        print("".join(listings.node_text(name, node) for name, node in wanted.items()), end="")
    return status


def select(words: list[str], server: Connection) -> int:
    """qselect -s STATES -u USER -x"""
    options = dict(getopt.gnu_getopt(words, "s:u:x")[0])
    response = server.one({"do": "stat", "jobs": [], "finished": "-x" in options, "elements": False})
    for name, job in response["jobs"]:
        if job["job_state"] in options.get("-s", job["job_state"]) and (
                job["Job_Owner"].partition("@")[0] == options.get("-u", job["Job_Owner"].partition("@")[0])):
            print(name)
    return 0


COMMANDS: dict[str, Callable[[list[str], Connection], int]] = {
    "qsub": submit, **dict.fromkeys(VERBS, change), "qstat": status_of, "pbsnodes": nodes, "qselect": select,
    "pbsdsh": tasks.pbsdsh, "pbs_tmrsh": tasks.pbs_tmrsh,
}


def main(name: str, path: str) -> int:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"pbs_version = {listings.VERSION}")
        return 0
    try:
        return COMMANDS[name](words, Connection(name, path))
    except Refused as refused:
        text = refused.message
        space = "" if text.startswith("\t") else " "
        sys.stderr.write(text if text.startswith(("usage", "Usage")) else f"{name}:{space}{text}".rstrip("\n") + "\n")
        return refused.status
