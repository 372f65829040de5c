#!/usr/bin/env python3
"""PBS for tests: a stand-in on hosts in network namespaces, or a real OpenPBS, used in the same way.

python tests/cluster/pbs.py up      as root; it runs until ctrl-C and prints how to enter its hosts

Jobs belong to alice, who exists only on these hosts. With --real-pbs PREFIX (pytest) the tests run on a real OpenPBS,
whose server is on pbs-head and whose execution hosts are n1, n2, ... There, `PREFIX HOST USER command...` has to run a
command in the current folder.
"""
from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.cluster.pbs_standin.commands import COMMANDS
from tests.cluster.pbs_standin.jobs import DOMAIN, FINISHED, HOME, SERVER, UID, USER
from tests.cluster.pbs_standin.resources import Node
from tests.cluster.pbs_standin.server import Server

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tests" / "cluster" / "pbs_standin" / "client.py"
HEAD = SERVER
WORK = f"{HOME}/jobs"
PROFILE = """\
if [ "$(id -u)" = 0 ]; then PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games; fi
export PATH="$PATH:/opt/pbs/bin" MANPATH="$MANPATH:/opt/pbs/share/man"
"""
# They change only what the host sees in whose mount namespace they run.
MOUNTS = """\
aside() { mkdir -p "$private/old$1"; mount --rbind "$1" "$private/old$1"; mount -t tmpfs -o mode=755 tmpfs "$1"; }
add() {  # FOLDER NAME SOURCE: the folder as it is, but with NAME in it, which is SOURCE
    aside "$1"
    for entry in "$private/old$1"/*; do
        [ "${entry##*/}" != "$2" ] && [ -d "$entry" ] || continue
        mkdir "$1/${entry##*/}"; mount --rbind "$entry" "$1/${entry##*/}"
    done
    mkdir "$1/$2"; mount --bind "$3" "$1/$2"
}
"""


@dataclass(frozen=True)
class Result:
    """How a command ended and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Pbs:
    """What tests do with either PBS, whose classes define two methods.

    Paths are those on the hosts; local(path) returns where this machine has one. command(host, command, user, cwd, env)
    returns the words that run a command on a host as a user, in a folder, with a fresh login's environment and `env`.
    """

    def run(self, host: str, command: Sequence[str], *, user: str = USER, cwd: str = WORK,
            env: Mapping[str, str] | None = None, seconds: float = 60) -> Result:
        """Run a command on a host in the folder `cwd`; AssertionError when it takes longer than `seconds`."""
        process = subprocess.Popen(self.command(host, command, user, cwd, env or {}), text=True,
                                   errors="surrogateescape", start_new_session=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with killed_at_end(process):
            try:
                out, err = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{shlex.join(command)} on {host}: still running after {seconds} s") from None
        return Result(process.returncode, out, err)

    def write(self, path: str, text: str) -> str:
        """Make a file of the user's; return its path."""
        local = self.local(os.path.join(WORK, path))
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_text(text)
        for each in (local, local.parent):
            os.chown(each, self.local(WORK).stat().st_uid, -1)
        return path

    def submit(self, *words: str, script: str = "", name: str = "job.sh", cwd: str = WORK,
               env: Mapping[str, str] | None = None) -> str:
        """Run qsub; return the job's id. script: the text of a script that is written to `name` before."""
        if script:
            words = (*words, self.write(os.path.join(cwd, name), script))
        done = self.run(HEAD, ["qsub", *words], cwd=cwd, env=env)
        if done.status != 0:
            raise RuntimeError(f"qsub {shlex.join(words)}: status {done.status}, {done.output}")
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """Return what `qstat -xf -F json` reports of a job."""
        done = self.run(HEAD, ["qstat", "-x", "-f", "-F", "json", job_id])
        if done.status != 0:
            raise RuntimeError(f"qstat {job_id}: {done.output}")
        return dict(json.loads(done.stdout, strict=False)["Jobs"][job_id])

    def state(self, job_id: str) -> str:
        return str(self.job(job_id)["job_state"])

    def wait(self, job_id: str, seconds: float = 60, *, states: str = "F") -> dict[str, Any]:
        """Wait until a job has ended, or is in another state; return its attributes."""
        limit = time.monotonic() + seconds
        while self.state(job_id) not in states:
            if time.monotonic() > limit:
                raise AssertionError(f"job {job_id} is not in one of the states {states} after {seconds} s: "
                                     f"{self.job(job_id)}")
            time.sleep(0.1)
        return self.job(job_id)

    def output(self, job: Mapping[str, Any]) -> str:
        """Return what a job has written."""
        path = self.local(str(job["Output_Path"]).partition(":")[2])
        return path.read_text(errors="replace") if path.is_file() else ""

    def delete_all(self) -> None:
        """End all jobs, and wait until they have ended."""
        jobs = self.unfinished()
        if jobs:
            self.run(HEAD, ["qdel", "-W", "force", *jobs])
            wait_until(lambda: not self.unfinished(), "all jobs to end", seconds=60)

    def unfinished(self) -> list[str]:
        return self.run(HEAD, ["qselect"]).stdout.split()


def login(user: str, env: Mapping[str, str], cwd: str, command: Sequence[str]) -> list[str]:
    """Return the words that run a command with a fresh login's environment, and nothing of the caller's."""
    home = HOME if user == USER else f"/{user}"
    own = {"PATH": "/opt/pbs/bin:/usr/local/bin:/usr/bin:/bin", "HOME": home, "USER": user, "LOGNAME": user,
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

    kill_delay = 10.0  # seconds from SIGTERM to SIGKILL

    def __init__(self, count: int = 3) -> None:
        subnet = "10.79.3"
        super().__init__(count, prefix="n", subnet=subnet)
        self.nodes = list(self.hosts)
        self.hosts.insert(0, HEAD)
        self.address[HEAD] = f"{subnet}.{count + 1}"
        nodes = {name: Node(name, f"{name}.{DOMAIN}", {"ncpus": 4, "ngpus": 4}) for name in self.nodes}
        self._server = Server(nodes, self.address, self.kill_delay, self.enter, self.local)

    def local(self, path: str, host: str = HEAD) -> Path:
        if Path(path).is_relative_to("/var"):
            return self.folder / "hosts" / host / path.lstrip("/")
        return self.folder / path.lstrip("/") if Path(path).is_relative_to(HOME) else Path(path)

    def command(self, host: str, command: Sequence[str], user: str, cwd: str, env: Mapping[str, str]) -> list[str]:
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user == USER else []
        return [*self.enter(host), *as_user, *login(user, env, cwd, command)]

    # These two need no command here.

    def state(self, job_id: str) -> str:
        return str(self._server.find(job_id).shown()["job_state"])

    def unfinished(self) -> list[str]:
        return [job.id for job in list(self._server.jobs.values()) if job.state != FINISHED]

    # Starting --------------------------------------------------------------------------------------------------------

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
        work = self.folder / WORK.lstrip("/")
        work.mkdir(parents=True)
        for folder in (work, work.parent):
            os.chown(folder, UID, UID)
        commands = self.folder / "exec" / "bin"
        commands.mkdir(parents=True)
        for name in COMMANDS:
            client = shlex.join([sys.executable, "-IS", str(CLIENT), str(self.folder / "server"), name])
            # By a shell: the path of python may have a space, which a #! line cannot have.
            (commands / name).write_text(f'#!/bin/sh\nexec {client} "$@"\n')
            (commands / name).chmod(0o755)
        for host in self.hosts:
            for path in ("/var/spool/pbs/aux", "/var/spool/pbs/spool", "/var/spool/pbs/mom_priv/jobs", "/var/tmp"):
                self.local(path, host).mkdir(parents=True)
                self.local(path, host).chmod(0o1777)
        machine = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(f"{USER}:")]
        (self.folder / "passwd").write_text("\n".join([*machine, f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash", ""]))
        (self.folder / "profile").write_text(PROFILE)

    def _mounts(self, host: str) -> str:
        """Return the shell lines that give a host its own /var/spool and /var/tmp, PBS below /opt, and alice's home."""
        readable = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        private = self.folder / "hosts" / host
        lines = [f"private={shlex.quote(str(private))}"]
        for folder in dict.fromkeys(closed for path in readable if (closed := closed_above(path))):
            lines.append(f"aside {shlex.quote(str(folder))}")
            for path in dict.fromkeys(path for path in readable if closed_above(path) == folder):
                old, new = shlex.quote(f"{private}/old{path}"), shlex.quote(str(path))
                lines.append(f'mkdir -p {new}; mount --rbind {old} {new}')
        lines += [f'mount --bind "$private/var/{name}" /var/{name}' for name in ("spool", "tmp")]
        lines += [f"mount --bind {shlex.quote(str(self.folder / name))} /etc/{name}" for name in ("passwd", "profile")]
        lines += [f"add /opt pbs {shlex.quote(str(self.folder / 'exec'))}",
                  f"add /home {USER} {shlex.quote(str(self.folder / 'home' / USER))}"]
        return "\n".join(lines)


def closed_above(path: Path) -> Path | None:
    """Return the uppermost folder above `path` that others cannot pass."""
    return next((folder for folder in reversed(path.resolve().parents) if not folder.stat().st_mode & 0o001), None)


def main() -> None:
    with PbsCluster() as cluster:
        enter = shlex.join(cluster.command(HEAD, ["bash"], USER, WORK, {"TERM": os.environ.get("TERM", "dumb")}))
        print(f"{HEAD} and {', '.join(cluster.nodes)} are up. A shell as {USER} on {HEAD}:\n  {enter}\n"
              f"Her home is {cluster.local(HOME)} on this machine. ctrl-C ends everything.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main() if sys.argv[1:] == ["up"] else sys.exit(__doc__)
