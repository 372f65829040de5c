#!/usr/bin/env python3
"""PBS for tests: a stand-in on hosts in network namespaces, or a real OpenPBS, used in the same way.

python tests/cluster/pbs.py up [--count 3]      as root; it stays until ctrl-C and prints how to enter its hosts

Jobs are alice's, who exists only on these hosts. With --real-pbs PREFIX (pytest) tests run on a real OpenPBS instead,
whose server is on pbs-head and whose execution hosts are n1, n2, ...: `PREFIX HOST USER command...` has to run a
command there, in the current folder.
"""
from __future__ import annotations

import argparse
import compileall
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.cluster.pbs_standin.messages import send_request

ROOT = Path(__file__).resolve().parents[2]
HEAD, DOMAIN, USER = "pbs-head", "pbs.lab", "alice"
UID = 1999
WORK = f"/home/{USER}/jobs"
COMMANDS = ("qsub", "qstat", "qdel", "qsig", "qrerun", "qhold", "qrls", "qselect", "pbsnodes", "pbsdsh", "pbs_tmrsh")
QUEUES = {"workq": {}, "small": {"resources_max": {"ncpus": 8, "walltime": "00:10:00"},
                                 "resources_default": {"walltime": "00:05:00"}}}
PROFILE = """\
if [ "$(id -u)" = 0 ]; then PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games; fi
export PATH="$PATH:/opt/pbs/bin" MANPATH="$MANPATH:/opt/pbs/share/man"
"""
# Each changes only what the host in whose mount namespace it is run sees.
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


class Pbs(ABC):
    """What tests do with PBS, whichever it is. Paths are those on its hosts; local() is where this machine has them."""

    home = f"/home/{USER}"
    work = WORK

    @abstractmethod
    def local(self, path: str) -> Path:
        """Where this machine has a path of the hosts."""

    @abstractmethod
    def command(self, host: str, command: Sequence[str], user: str, cwd: str,
                env: Mapping[str, str]) -> list[str]:
        """The words that run a command on a host as a user, in a folder and with a fresh login's environment."""

    def run(self, host: str, command: Sequence[str], *, user: str = USER, cwd: str = WORK,
            env: Mapping[str, str] | None = None, stdin: str = "", seconds: float = 60) -> Result:
        """Run a command on a host in the folder `cwd`; AssertionError when it takes longer than `seconds`."""
        process = subprocess.Popen(self.command(host, command, user, cwd, env or {}), text=True,
                                   errors="surrogateescape", start_new_session=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with killed_at_end(process):
            try:
                out, err = process.communicate(stdin, timeout=seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{shlex.join(command)} on {host}: still running after {seconds} s") from None
        return Result(process.returncode, out, err)

    def write(self, path: str, text: str, mode: int = 0o644) -> str:
        """Make a file of the user's; returns its path."""
        local = self.local(os.path.join(WORK, path))
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_text(text)
        local.chmod(mode)
        for each in (local, local.parent):
            os.chown(each, self.uid(), -1)
        return path

    def uid(self) -> int:
        return self.local(WORK).stat().st_uid

    def submit(self, *words: str, script: str = "", name: str = "job.sh", cwd: str = WORK,
               env: Mapping[str, str] | None = None) -> str:
        """qsub; returns the job's id. script: the text of a script that is written to `name` before."""
        if script:
            words = (*words, self.write(os.path.join(cwd, name), script))
        done = self.run(HEAD, ["qsub", *words], cwd=cwd, env=env)
        if done.status != 0:
            raise RuntimeError(f"qsub {shlex.join(words)}: status {done.status}, {done.output}")
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """What `qstat -xf -F json` says of a job."""
        done = self.run(HEAD, ["qstat", "-x", "-f", "-F", "json", job_id])
        if done.status != 0:
            raise RuntimeError(f"qstat {job_id}: {done.output}")
        return dict(json.loads(done.stdout, strict=False)["Jobs"][job_id])

    def state(self, job_id: str) -> str:
        return str(self.job(job_id)["job_state"])

    def wait_for(self, job_id: str, states: str, seconds: float = 60) -> dict[str, Any]:
        """Wait until a job is in one of the states ("RF"); returns what job() says then."""
        limit = time.monotonic() + seconds
        while self.state(job_id) not in states:
            if time.monotonic() > limit:
                raise AssertionError(f"job {job_id} is not in one of the states {states} after {seconds} s: "
                                     f"{self.job(job_id)}")
            time.sleep(0.1)
        return self.job(job_id)

    def wait(self, job_id: str, seconds: float = 60) -> dict[str, Any]:
        """Wait until a job has ended and its output is where it belongs."""
        return self.wait_for(job_id, "F", seconds)

    def output(self, job: Mapping[str, Any], name: str = "Output_Path") -> str:
        """What the job wrote, as text; name: Output_Path or Error_Path."""
        path = self.local(str(job[name]).partition(":")[2])
        return path.read_text(errors="replace") if path.is_file() else ""

    def delete_all(self) -> None:
        """End all jobs, and wait until they have ended."""
        jobs = self.unfinished()
        if jobs:
            self.run(HEAD, ["qdel", "-W", "force", *jobs])
            wait_until(lambda: not self.unfinished(), "all jobs to end", seconds=60)

    def unfinished(self) -> list[str]:
        return self.run(HEAD, ["qselect"]).stdout.split()


def login(user: str, home: str, env: Mapping[str, str], cwd: str, command: Sequence[str]) -> list[str]:
    """The words that run a command with a fresh login's environment, and nothing of the caller's."""
    own = {"PATH": "/opt/pbs/bin:/usr/local/bin:/usr/bin:/bin", "HOME": home, "USER": user, "LOGNAME": user,
           "SHELL": "/bin/bash", "LANG": "C.UTF-8", "PWD": cwd, **env}
    return ["env", "-i", "-C", cwd, *(f"{name}={value}" for name, value in own.items()), *command]


class RealPbs(Pbs):
    """An OpenPBS that somebody else has raised; prefix: see the top of this file."""

    def __init__(self, prefix: str) -> None:
        self.prefix = shlex.split(prefix)
        self.run(HEAD, ["mkdir", "-p", WORK], cwd="/")

    def local(self, path: str) -> Path:
        return Path(path)

    def command(self, host: str, command: Sequence[str], user: str, cwd: str,
                env: Mapping[str, str]) -> list[str]:
        home = self.home if user == USER else f"/{user}"
        return [*self.prefix, host, user, *login(user, home, env, cwd, command)]


class PbsCluster(Hosts, Pbs):
    """The stand-in: pbs-head and `count` execution hosts n1, n2, ... A context manager.

    cpus, gpus: of each host. kill_delay: seconds from SIGTERM to SIGKILL. short: hosts whose names have no domain.
    readable: more folders that alice may read, besides the repository and Python.
    """

    def __init__(self, count: int = 3, *, cpus: int = 4, gpus: int = 4, kill_delay: float = 10,
                 short: Sequence[str] = (), readable: Sequence[Path] = (), subnet: str = "10.79.3",
                 folder: Path | None = None) -> None:
        super().__init__(count, prefix="n", subnet=subnet, folder=folder)
        self.nodes = list(self.hosts)
        self.hosts.insert(0, HEAD)
        self.address[HEAD] = f"{subnet}.{count + 1}"
        self.short = short
        self.kill_delay = kill_delay
        self.each = {"ncpus": cpus, "ngpus": gpus, "mem": 24684096}
        self.readable = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *readable]

    def __enter__(self) -> PbsCluster:
        super().__enter__()
        return self

    def local(self, path: str) -> Path:
        return self.folder / path.lstrip("/") if Path(path).is_relative_to(self.home) else Path(path)

    def command(self, host: str, command: Sequence[str], user: str, cwd: str,
                env: Mapping[str, str]) -> list[str]:
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user == USER else []
        home = self.home if user == USER else f"/{user}"
        return [*self.enter(host), *as_user, *login(user, home, env, cwd, command)]

    # The same as Pbs has them, without a command for each look.

    def state(self, job_id: str) -> str:
        return str(self._jobs(job_id)[0][1]["job_state"])

    def unfinished(self) -> list[str]:
        return [job_id for job_id, job in self._jobs() if job["job_state"] != "F"]

    def _jobs(self, *ids: str) -> list[tuple[str, dict[str, Any]]]:
        request = {"do": "stat", "jobs": ids, "finished": True, "elements": False}
        return list(next(send_request(str(self.folder / "server"), request))["jobs"])

    # Starting --------------------------------------------------------------------------------------------------------

    def _hosts_file(self, host: str) -> Path:
        path = super()._hosts_file(host)
        lines = [f"{self.address[each]} {'' if each in self.short else f'{each}.{DOMAIN} '}{each}"
                 for each in self.hosts]
        path.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        return path

    def _raise_hosts(self) -> None:
        super()._raise_hosts()
        self._write_files()
        for host in self.hosts:
            subprocess.run([*self.enter(host), "sh", "-euc", MOUNTS + self._mounts(host)], check=True)
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        module = "tests.cluster.pbs_standin"
        for host in self.nodes:
            self._start(host, [f"{module}.mom", str(self.folder / f"mom.{host}")], environment)
        self._start(HEAD, [f"{module}.server", str(self.folder)], environment)

    def _start(self, host: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        socket = self.folder / ("server" if host == HEAD else f"mom.{host}")
        with (self.folder / f"log.{host}").open("wb") as log:
            process = subprocess.Popen([*self.enter(host), sys.executable, "-m", *words], env=dict(environment),
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(process)
        try:
            wait_until(socket.exists, f"the stand-in on {host}", process)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{(self.folder / f'log.{host}').read_text()}") from None

    def _write_files(self) -> None:
        self.folder.chmod(0o755)
        work = self.folder / WORK.lstrip("/")
        work.mkdir(parents=True)
        for folder in (work, work.parent):
            os.chown(folder, UID, UID)
        commands = self.folder / "exec" / "bin"
        commands.mkdir(parents=True)
        for name in COMMANDS:
            path = commands / name
            code = ("import sys; sys.path.insert(0, '/opt/pbs/lib'); from tests.cluster.pbs_standin import client; "
                    f"sys.exit(client.main({name!r}, {str(self.folder / 'server')!r}))")
            # By a shell: the path of python may have a space, which a #! line cannot have.
            path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", "-c", code])} "$@"\n')
            path.chmod(0o755)
        # The commands run from a compiled copy: their user could not write down what Python compiles, each time anew.
        copy = self.folder / "exec" / "lib"
        shutil.copytree(ROOT / "tests" / "cluster" / "pbs_standin", copy / "tests" / "cluster" / "pbs_standin",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for package in ("tests", "tests/cluster"):
            (copy / package / "__init__.py").touch()
        compileall.compile_dir(copy, quiet=1)
        for host in self.hosts:
            private = self.folder / "hosts" / host
            for name in ("aux", "spool", "undelivered", "mom_priv/jobs"):
                (private / "var/spool/pbs" / name).mkdir(parents=True)
            (private / "var/tmp").mkdir()
            (private / "var/tmp").chmod(0o1777)
        machine = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(f"{USER}:")]
        alice = f"{USER}:x:{UID}:{UID}::{self.home}:/bin/bash"
        (self.folder / "passwd").write_text("\n".join([*machine, alice]) + "\n")
        (self.folder / "profile").write_text(PROFILE)
        moms = {host: host if host in self.short else f"{host}.{DOMAIN}" for host in self.nodes}
        (self.folder / "settings.json").write_text(json.dumps(
            {"moms": moms, "each": self.each, "queues": QUEUES, "kill_delay": self.kill_delay}))

    def _mounts(self, host: str) -> str:
        """Shell lines that give the host its own /var/spool and /var/tmp, PBS below /opt, and alice with her home."""
        private = self.folder / "hosts" / host
        lines = [f"private={shlex.quote(str(private))}"]
        for folder in dict.fromkeys(closed for path in self.readable if (closed := closed_above(path))):
            lines.append(f"aside {shlex.quote(str(folder))}")
            for path in dict.fromkeys(path for path in self.readable if closed_above(path) == folder):
                old, new = shlex.quote(f"{private}/old{path}"), shlex.quote(str(path))
                lines.append(f'mkdir -p {new}; mount --rbind {old} {new}')
        lines += [f'mount --bind "$private/var/{name}" /var/{name}' for name in ("spool", "tmp")]
        lines += [f"mount --bind {shlex.quote(str(self.folder / name))} /etc/{name}" for name in ("passwd", "profile")]
        lines += [f"add /opt pbs {shlex.quote(str(self.folder / 'exec'))}",
                  f"add /home {USER} {shlex.quote(str(self.folder / 'home' / USER))}"]
        return "\n".join(lines)


def closed_above(path: Path) -> Path | None:
    """The uppermost folder above `path` that others cannot pass."""
    return next((folder for folder in reversed(path.resolve().parents) if not folder.stat().st_mode & 0o001), None)


# By hand -------------------------------------------------------------------------------------------------------------

def main() -> int:
    parser = argparse.ArgumentParser(description="A stand-in for PBS on this machine, as root.")
    parser.add_argument("action", choices=["up"], help="raise it; it stays until ctrl-C")
    parser.add_argument("--count", type=int, default=3, help="execution hosts")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    with PbsCluster(args.count) as cluster:
        enter = shlex.join(cluster.command(HEAD, ["bash"], USER, WORK, {"TERM": os.environ.get("TERM", "dumb")}))
        print(f"{HEAD} and {', '.join(cluster.nodes)} are up. A shell as {USER} on {HEAD}:\n  {enter}\n"
              f"Her home is {cluster.local(cluster.home)} on this machine. ctrl-C ends everything.", flush=True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
