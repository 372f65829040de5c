#!/usr/bin/env python3
"""A real Slurm on one machine: a controller and a few nodes with fake GPUs, on hosts in network namespaces.

python tests/cluster/slurm.py up    as root; it runs until ctrl-C and prints how to enter its login host

It needs Debian's slurm-wlm, munge and iproute2. With --slurm-home FOLDER (pytest) or DDPKIT_SLURM_HOME it is another
installation of Slurm: the folder that holds bin/srun and sbin/slurmctld.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.hosts import CLEAN_ENV, Hosts, keep_up, killed_at_end, wait_until
from tests.launch.launchers import Lab, Result

HEAD = "head"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
         "DEADLINE"}

# Deviations from Slurm's defaults, and why:
# config_overrides      nodes may have more CPUs than this machine
# linuxproc             no cgroups are needed
# sched/backfill        the only one that starts heterogeneous jobs; *_interval=1: it looks every second
# cred_expire           this is also how long a requeued job stays pending; less than 5 counts as 120
# TmpFS                 the nodes share /tmp, and PMIx makes one folder per step and node
CONFIG = """\
ClusterName=ddpkit
SlurmctldHost={head}({head_address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/own/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/spool/%n.tmp
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,bf_resolution=1
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait={kill_wait}
SlurmdTimeout={slurmd_timeout}
MinJobAge=300
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""


def search_path(path: str, home: Path | str | None = None) -> str:
    """Return the search path for the programs of Slurm: those of the installation in `home` before those in `path`.

    home: the default is DDPKIT_SLURM_HOME, or the system's Slurm. ValueError where it holds no installation.
    """
    home = home or os.environ.get("DDPKIT_SLURM_HOME")
    if not home:
        return path
    folder = Path(home).resolve()
    missing = [name for name in ("bin/srun", "sbin/slurmctld", "sbin/slurmd") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{home} has no {', '.join(missing)}. Expected the folder of an installation of Slurm, the "
                         "--prefix of its build")
    return f"{folder}/bin:{folder}/sbin:{path}"


class SlurmCluster(Hosts):
    """`nodes` nodes node1, node2, ... and the login host `head`, where the controller runs. A context manager.

    A node has four CPUs, and two GPUs that are devices without a driver. kill_wait: seconds from SIGTERM to SIGKILL.
    slurmd_timeout: seconds until a node that does not respond is down (Slurm's default is 300). names: see Hosts.
    topology: the lines of topology.conf.
    """

    def __init__(self, nodes: int = 4, *, names: str = "right", kill_wait: int = 15, slurmd_timeout: int = 300,
                 subnet: str = "10.79.2", topology: str = "") -> None:
        self.programs = search_path(CLEAN_ENV["PATH"])
        super().__init__(nodes, prefix="node", subnet=subnet, names=names)
        self.nodes = list(self.hosts)
        self.hosts.insert(0, HEAD)
        self.address[HEAD] = f"{subnet}.{nodes + 1}"
        self.kill_wait, self.slurmd_timeout = kill_wait, slurmd_timeout
        self.topology = topology
        self.work = self.folder / "work"  # where commands run and jobs write their output
        self.environment = {"PATH": f"{self.folder}/bin:{self.programs}", "SLURM_CONF": f"{self.folder}/etc/slurm.conf"}

    def _start_hosts(self) -> None:
        super()._start_hosts()
        self._write_files()
        for host in self.hosts:
            self._start_munged(host)
        log = self.folder / "log" / "slurmctld.log"
        try:
            self._daemon(HEAD, ["slurmctld", "-D"])
            wait_until(lambda: log.exists() and "Running as primary" in log.read_text(errors="replace"), "slurmctld",
                       self._daemons[-1])
            for node in self.nodes:
                self._daemon(node, ["slurmd", "-D"])
            self.wait_for_nodes()
        except RuntimeError as error:
            logs = [f"{path.name}:\n{path.read_text(errors='replace')[-1000:]}" for path in log.parent.glob("slurm*")]
            raise RuntimeError("\n".join([str(error), *logs])) from None

    def _start_munged(self, host: str) -> None:
        """Start munged on each host: one for all would reject the second use of a credential as a replay."""
        munge = self.folder / "munge"
        own = munge / "own"
        self._in(host, ["mount", "--bind", str(munge / host), str(own)])
        self._in(host, [self.program("munged"), "--force", "--num-threads=2", f"--key-file={munge}/key",
                        f"--socket={own}/socket", f"--pid-file={own}/pid", f"--log-file={own}/log",
                        f"--seed-file={own}/seed"])  # it returns when it is ready

    def _write_files(self) -> None:
        for name in ("etc", "munge", "state", "spool", "run", "log", "dev", "bin", "work"):
            (self.folder / name).mkdir()
        for host in (*self.hosts, "own"):
            (self.folder / "munge" / host).mkdir()
        for node in self.nodes:
            (self.folder / "spool" / f"{node}.tmp").mkdir()
        self.folder.chmod(0o755)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        nodes = "\n".join(f"NodeName={node} NodeAddr={self.address[node]} CPUs=4 CoresPerSocket=4 RealMemory=4000 "
                          "Gres=gpu:2" for node in self.nodes)
        etc = self.folder / "etc"
        (etc / "slurm.conf").write_text(CONFIG.format(folder=self.folder, head=HEAD, head_address=self.address[HEAD],
                                                      nodes=nodes, kill_wait=self.kill_wait, user=os.geteuid(),
                                                      slurmd_timeout=self.slurmd_timeout)
                                        + "TopologyPlugin=topology/tree\n" * bool(self.topology))
        (etc / "topology.conf").write_text(self.topology)
        (etc / "cgroup.conf").touch()
        for number in range(2):
            device = self.folder / "dev" / f"nvidia{number}"
            device.touch()
            for host in self.hosts:
                # A character device, as real GPUs are: for a plain file slurmd sets no CUDA_VISIBLE_DEVICES.
                self._in(host, ["mount", "--bind", "/dev/null", str(device)])
        (etc / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/nvidia[0-1]\n")
        # submitit needs sacct. Without a data base it knows only jobs that ended, and only when a file is configured.
        sacct = self.folder / "bin" / "sacct"
        sacct.write_text(f'#!/bin/sh\nexec {self.program("sacct")} -c "$@"\n')
        sacct.chmod(0o755)

    def _daemon(self, host: str, command: Sequence[str]) -> None:
        with (self.folder / "log" / f"{command[0]}.{host}.out").open("wb") as log:
            process = subprocess.Popen([*self.enter(host), *command], env={**CLEAN_ENV, **self.environment}, cwd="/",
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(process)

    def wait_for_nodes(self) -> None:
        def ready() -> bool:
            done = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"])
            words = done.output.split()
            return done.status == 0 and sorted(words[::2]) == sorted(self.nodes) and set(words[1::2]) == {"idle"}

        wait_until(ready, "the nodes of Slurm", seconds=30, pause=0.1)  # each look starts a process

    def program(self, name: str) -> str:
        """Return the path of a program of this Slurm, past the wrappers in the cluster's folder."""
        found = shutil.which(name, path=self.programs)
        if found is None:
            raise RuntimeError(f"{name} was not found in {self.programs}")
        return found

    def start(self, command: Sequence[str], host: str = HEAD, *, env: Mapping[str, str] | None = None,
              cwd: Path | str | None = None, **options: object) -> subprocess.Popen[str]:
        """Start a command on a host with a login's environment, in the folder `cwd` (default: work)."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        # Entering the host's mounts changes the working folder.
        return self.popen(host, ["env", "-C", str(cwd or self.work), *command],
                          env={**self.environment, **(env or {})}, **options)

    def run(self, command: Sequence[str], host: str = HEAD, *, env: Mapping[str, str] | None = None,
            cwd: Path | str | None = None, seconds: float = 120) -> Result:
        """Run a command on a host; AssertionError with its output when it takes longer than `seconds`."""
        with killed_at_end(self.start(command, host, env=env, cwd=cwd)) as process:
            return Lab.wait(process, seconds)

    def sbatch(self, *words: str, script: str = "", env: Mapping[str, str] | None = None) -> str:
        """Submit a job from head; return its id. words: what follows `sbatch`; script: the text of a script."""
        if script:
            path = self.work / f"script{time.monotonic_ns()}.sh"
            path.write_text(script)
            words = (*words, str(path))
        done = self.run(["sbatch", "--parsable", *words], env=env)
        if done.status != 0:
            raise RuntimeError(f"sbatch {shlex.join(words)}: status {done.status}, {done.output}")
        return done.output.split()[-1].partition(";")[0]

    def batch(self, options: str, *lines: str) -> Result:
        """Run a batch script of these lines, which has to end with status 0."""
        job_id = self.sbatch(*options.split(), script="\n".join(["#!/bin/bash", *lines, ""]))
        job = self.wait(job_id)
        assert job["JobState"] == "COMPLETED", f"{job}\n{self.output(job_id)}"
        return Result(0, self.output(job_id))

    def jobs(self, job_id: str) -> list[dict[str, str]]:
        """Return what `scontrol show job` reports, for each element of an array and each component of a job."""
        done = self.run(["scontrol", "--oneliner", "show", "job", job_id])
        if done.status != 0:
            raise RuntimeError(f"scontrol show job {job_id}: {done.output}")
        return [dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line))
                for line in done.output.splitlines() if line.strip()]

    def job(self, job_id: str) -> dict[str, str]:
        return self.jobs(job_id)[0]

    def wait(self, job_id: str, seconds: float = 120) -> dict[str, str]:
        """Wait until a job has ended, with all its elements or components; return what scontrol reports of it."""
        self.wait_for(job_id, ENDED, seconds)
        return self.job(job_id)

    def wait_for(self, job_id: str, states: set[str], seconds: float = 120) -> None:
        """Wait until a job, with all its elements or components, is in one of the states."""
        limit = time.monotonic() + seconds
        while any(job["JobState"] not in states for job in self.jobs(job_id)):
            if time.monotonic() > limit:
                shown = [f"{job['JobId']} {job['JobState']} {job['Reason']}" for job in self.jobs(job_id)]
                raise AssertionError(f"job {job_id} is not {' or '.join(sorted(states))} after {seconds:.0f} s: "
                                     f"{shown}\n{self.output(job_id)}")
            time.sleep(0.25)  # each look starts a process

    def output(self, job_id: str) -> str:
        """Return what a job has written so far; nothing before it has started."""
        path = Path(self.job(job_id).get("StdOut", ""))
        return path.read_text(errors="replace") if path.is_file() else ""


if __name__ == "__main__":
    if sys.argv[1:] != ["up"]:
        sys.exit(__doc__)
    with SlurmCluster() as cluster:
        words = [f"{name}={value}" for name, value in {**CLEAN_ENV, **cluster.environment}.items()]
        keep_up(cluster.hosts, [*cluster.enter(HEAD), "env", "-C", str(cluster.work), *words, "bash"])
