#!/usr/bin/env python3
"""PBS for tests: a stand-in on hosts in network namespaces, or a real OpenPBS, used in the same way.

python tests/cluster/pbs.py up      as root; it runs until ctrl-C and prints how to enter its hosts

Jobs belong to alice, who exists only on these hosts. With --real-pbs PREFIX (pytest) the tests run on a real OpenPBS,
whose server is on pbs-head and whose execution hosts are n1, n2, ... There, `PREFIX HOST USER command...` has to run a
command in the current folder.
"""
from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.hosts import Hosts, keep_up, killed_at_end, wait_until
from tests.cluster.pbs_standin.commands import COMMANDS
from tests.cluster.pbs_standin.jobs import DOMAIN, FINISHED, HOME, SERVER, UID, USER
from tests.cluster.pbs_standin.server import Server
from tests.launch.launchers import Lab, Result

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tests" / "cluster" / "pbs_standin" / "client.py"
HEAD = SERVER
WORK = f"{HOME}/jobs"
LOGIN_PATH = "/opt/pbs/bin:/usr/local/bin:/usr/bin:/bin"
PROFILE = ("export PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games:/opt/pbs/bin\n"
           "export MANPATH=:/opt/pbs/share/man\n")
# They change only what the host sees in whose mount namespace they run.
MOUNTS = """\
aside() { mkdir -p "$private$1"; mount --rbind "$1" "$private$1"; mount -t tmpfs -o mode=755 tmpfs "$1"; }
let_pass() {  # FOLDER PATH: let others pass FOLDER, but see nothing below it except PATH
    [ -d "$private$1" ] || aside "$1"
    mkdir -p "$2"; mount --rbind "$private$2" "$2"
}
add() {  # FOLDER NAME SOURCE: the folder as it is, but with NAME in it, which is SOURCE
    aside "$1"
    for entry in "$private$1"/*; do
        [ "${entry##*/}" != "$2" ] && [ -d "$entry" ] || continue
        mkdir "$1/${entry##*/}"; mount --rbind "$entry" "$1/${entry##*/}"
    done
    mkdir "$1/$2"; mount --bind "$3" "$1/$2"
}
"""


class Pbs:
    """What tests do with either PBS, whose classes define two methods.

    Paths are those on the hosts; local(path) returns where this machine has one. command(host, command, user, cwd, env)
    returns the words that run a command on a host as a user, in a folder, with a fresh login's environment and `env`.
    """

    def run(self, host: str, command: Sequence[str], *, user: str = USER, cwd: str = WORK,
            env: Mapping[str, str] | None = None, seconds: float = 60) -> Result:
        """Run a command on a host in the folder `cwd`; AssertionError when it takes longer than `seconds`."""
        process = subprocess.Popen(self.command(host, command, user, cwd, env or {}), text=True, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with killed_at_end(process):
            return Lab.wait(process, seconds)

    def write(self, path: str, text: str) -> str:
        """Make a file of the user's; return its path."""
        local = self.local(os.path.join(WORK, path))
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_text(text)
        for each in (local, local.parent):
            os.chown(each, self.local(WORK).stat().st_uid, -1)
        return path

    def submit(self, *words: str, cwd: str = WORK, env: Mapping[str, str] | None = None) -> str:
        done = self.run(HEAD, ["qsub", *words], cwd=cwd, env=env)
        assert done.status == 0, f"qsub {shlex.join(words)}: {done.output}"
        return done.output.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """Return what `qstat -xf -F json` reports of a job."""
        done = self.run(HEAD, ["qstat", "-x", "-f", "-F", "json", job_id])
        assert done.status == 0, done.output
        return dict(json.loads(done.output, strict=False)["Jobs"][job_id])

    def state(self, job_id: str) -> str:
        return str(self.job(job_id)["job_state"])

    def wait(self, job_id: str, seconds: float = 60) -> dict[str, Any]:
        """Wait until a job has ended; return its attributes."""
        wait_until(lambda: self.state(job_id) == FINISHED, f"job {job_id} to end", seconds=seconds)
        return self.job(job_id)

    def output(self, job: Mapping[str, Any]) -> str:
        path = self.local(str(job["Output_Path"]).partition(":")[2])
        path = next(path.glob("*.OU"), path) if path.is_dir() else path
        return path.read_text(errors="replace") if path.is_file() else ""

    def delete_all(self) -> None:
        def none_is_left() -> bool:
            jobs = self.run(HEAD, ["qselect"]).output.split()
            if jobs:
                self.run(HEAD, ["qdel", "-W", "force", *jobs])
            return not jobs

        wait_until(none_is_left, "all jobs to end", seconds=60)


def login(user: str, env: Mapping[str, str], cwd: str, command: Sequence[str]) -> list[str]:
    """Return the words that run a command with a fresh login's environment, and nothing of the caller's."""
    home = HOME if user == USER else f"/{user}"
    own = {"PATH": LOGIN_PATH, "HOME": home, "USER": user, "LOGNAME": user,
           "SHELL": "/bin/bash", "LANG": "C.UTF-8", "PWD": cwd, **env}
    return ["env", "-i", "-C", cwd, *(f"{name}={value}" for name, value in own.items()), *command]


class RealPbs(Pbs):
    """An OpenPBS that somebody else has started; prefix: see the top of this file."""

    def __init__(self, prefix: str) -> None:
        self.prefix = shlex.split(prefix)
        self.run(HEAD, ["mkdir", "-p", WORK], cwd="/")

    def local(self, path: str) -> Path:
        return Path(path)

    def command(self, host: str, command: Sequence[str], user: str, cwd: str, env: Mapping[str, str]) -> list[str]:
        return [*self.prefix, host, user, *login(user, env, cwd, command)]


class PbsCluster(Hosts, Pbs):
    """The stand-in: pbs-head and `count` hosts n1, n2, ... with four CPUs and four GPUs each. A context manager."""

    def __init__(self, count: int = 3) -> None:
        subnet = "10.79.3"
        super().__init__(count, prefix="n", subnet=subnet)
        self._server = Server(self.hosts[:], self.folder / "spool", self.enter, self.local)
        self.hosts.insert(0, HEAD)
        self.address[HEAD] = f"{subnet}.{count + 1}"

    def local(self, path: str) -> Path:
        return self.folder / path.lstrip("/") if Path(path).is_relative_to(HOME) else Path(path)

    def command(self, host: str, command: Sequence[str], user: str, cwd: str, env: Mapping[str, str]) -> list[str]:
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        return [*self.enter(host), *(as_user if user == USER and os.geteuid() == 0 else []),
                *login(user, env, cwd, command)]

    def state(self, job_id: str) -> str:
        return str(self._server.find(job_id).shown()["job_state"])  # without the processes of a qstat

    def _hosts_file(self, host: str) -> Path:
        path = super()._hosts_file(host)
        lines = [f"{self.address[each]} {each}.{DOMAIN} {each}" for each in self.hosts]
        path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        return path

    def _start_hosts(self) -> None:
        super()._start_hosts()
        self._write_files()
        for host in self.hosts:
            subprocess.run([*self.enter(host), "sh", "-euc", MOUNTS + self._mounts(host)], check=True)
        self._server.serve(self.folder / "server")

    def _write_files(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "spool").mkdir()
        work = self.folder / WORK.lstrip("/")
        work.mkdir(parents=True)
        for folder in (work, work.parent):
            os.chown(folder, UID, -1)
        commands = self.folder / "pbs" / "bin"
        commands.mkdir(parents=True)
        for name in COMMANDS:
            client = shlex.join([sys.executable, "-IS", str(CLIENT), str(self.folder / "server"), name])
            # By a shell: the path of python may have a space, which a #! line cannot have.
            (commands / name).write_text(f'#!/bin/sh\nexec {client} "$@"\n')
            (commands / name).chmod(0o755)
        machine = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(f"{USER}:")]
        (self.folder / "passwd").write_text("\n".join([f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash", *machine, ""]))
        (self.folder / "profile").write_text(PROFILE)

    def _mounts(self, host: str) -> str:
        """Return the shell lines that give a host PBS below /opt, alice's home, and a kit that she may read."""
        folder = str(self.folder)
        readable = dict.fromkeys([ROOT, Path(sys.prefix), Path(sys.base_prefix)])
        lines = [
            *(["let_pass", str(closed), str(path)] for path in readable if (closed := closed_above(path))),
            ["mount", "--bind", f"{folder}/passwd", "/etc/passwd"],
            ["mount", "--bind", f"{folder}/profile", "/etc/profile"],
            ["add", "/opt", "pbs", f"{folder}/pbs"],
            ["add", "/home", USER, f"{folder}{HOME}"],
        ]
        return "\n".join([f"private={shlex.quote(f'{folder}/{host}')}", *map(shlex.join, lines)])


def closed_above(path: Path) -> Path | None:
    """Return the uppermost folder above `path` that others cannot pass."""
    return next((folder for folder in reversed(path.resolve().parents) if not folder.stat().st_mode & 0o001), None)


if __name__ == "__main__":
    if sys.argv[1:] != ["up"]:
        sys.exit(__doc__)
    with PbsCluster() as cluster:
        keep_up(cluster.hosts, cluster.command(HEAD, ["bash"], USER, WORK, {"TERM": os.environ.get("TERM", "dumb")}))
