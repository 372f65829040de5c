"""Failures of hosts and ranks in a launch with a spare: which host is left out, how long it takes, the final loss.

python tests/faults/spares.py [--failures 40] [--faults kill agent stop gpu outside off disk two]
                              [--by ssh | srun | pbs --real-pbs PREFIX [--mpiexec PATH]]
                              [--stage | --stage-dir FOLDER]
python tests/faults/spares.py --healthy 10 [--stage]    what --spare costs where nothing fails
python tests/faults/spares.py --torchrun 5              torchrun's own restart beside that of --max-restarts

Five hosts (network namespaces) are a job of PBS, as its variables describe one, or with --by srun of a real Slurm, that
of the system or of DDPKIT_SLURM_HOME, or with --by pbs of a real OpenPBS with five hosts (PREFIX: see
tests/cluster/pbs.py; node_fail_requeue is to be short; --mpiexec: of the MPI that starts the ranks, instead of
pbs_tmrsh). Four of them train. In each run a rank fails after step 12, in
the way of FAULT, or its host is cut off ("outside") or loses all its processes, too ("off"). Prints a line for each:
whether the right host was left out, seconds from the notice of the failure to the end of the next step, and whether the
final loss has the same bits as that of an undisturbed run. "disk", a full disk, ends the launch with its cause; "two"
kills ranks of two hosts at once: one of the hosts is left out. --stage: the ranks import from the kept copy of their
packages. Exit status 0 if all are right. Needs root, and about 30 s for each failure.

--healthy: pairs of launches on four hosts, without a spare and with one, one right after the other, and the median of
with / without. --torchrun: four ranks on this host, one of which is killed; seconds from the kill to the end of the
next step, of `torchrun --max-restarts 1` and of `ddpkit launch --max-restarts 1`.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.cluster.pbs import HEAD, WORK, RealPbs
from tests.cluster.pbs_standin.jobs import DOMAIN, FINISHED
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import LAUNCH, Lab, Result
from tests.launch.test_launch import Job
from utils.host import process

PROGRAM = str(Path(__file__).resolve().parents[1] / "launch" / "spare_program.py")
ENDED = re.compile("^final loss|^ddpkit launch: (no restart|error)", re.MULTILINE)
FAULTS = ("kill", "agent", "stop", "gpu", "outside", "off", "disk", "two")


def end_all(namespace: str) -> None:
    """Kill all of the launch that runs on a host, which was cut off before: nobody closes a connection."""
    for pid in process.process_ids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            of_launch = b"spare_program" in words or b"agent" in words
            if of_launch and os.readlink(f"/proc/{pid}/ns/net") == namespace:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


class SlurmJobs:
    """Launches in jobs of a real Slurm: a new one for each, as Slurm waits long for a host that failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [f"node{number}" for number in range(1, 6)]

    def run(self, folder: Path, words: list[str], fault: str = "", bad: str = "") -> Result:
        with SlurmCluster(5, slurmd_timeout=300, subnet="10.79.26") as slurm:
            work = slurm.work / folder.name
            work.mkdir()
            line = shlex.join([*LAUNCH, *(word.replace(str(folder), str(work)) for word in words)])
            job = slurm.sbatch("-N5", "-n5", "--ntasks-per-node=1", "--no-kill", script=f"#!/bin/bash\nexec {line}\n")
            if fault:
                failed = work / "failed"
                wait_until(lambda: failed.exists() and failed.read_text(), "the fault", seconds=120)
                if fault == "outside":
                    slurm.set_link(bad, "down")
                elif fault == "off":
                    slurm.set_link(bad, "down")
                    end_all(os.readlink(f"/proc/{slurm.pid(bad)}/ns/net"))
            wait_until(lambda: ENDED.search(slurm.output(job)), "the end", seconds=200)
            time.sleep(3)
            output = slurm.output(job)
            for file in work.glob("metrics.jsonl"):
                (folder / file.name).write_text(file.read_text())
            return Result(0 if "\nfinal loss" in output else 1, output)


class PbsJobs:
    """Launches in jobs of a real OpenPBS, as ddpkit submit run makes them. One that has lost a host may end late."""

    def __init__(self, prefix: str, mpiexec: str | None) -> None:
        self.pbs = RealPbs(prefix)
        self.by = []
        if mpiexec:
            path = shlex.quote(str(Path(mpiexec).resolve().parent))
            self.by = ["--launcher", "mpiexec", "--setup", f'export PATH={path}:"$PATH"']
        self.hosts = [f"n{number}.{DOMAIN}" for number in range(1, 6)]

    def root(self, host: str, *words: str) -> str:
        return self.pbs.run(host.partition(".")[0], words, user="root", cwd="/").output.strip()

    def run(self, folder: Path, words: list[str], fault: str = "", bad: str = "") -> Result:
        wait_until(self.all_free, "five free hosts", seconds=300)
        work = f"{WORK}/spares/{uuid.uuid4().hex}"
        self.pbs.write(f"{work}/about", "")
        os.chown(Path(work).parent, Path(WORK).stat().st_uid, -1)
        command = [str(Path(sys.executable).with_name("ddpkit")), "submit", "run", "--site", "generic-pbs",
                   "--no-check", "--nodes", "4", "--ntasks-per-node", "1", "--gpus-per-node", "0", "-c1", "-t", "6m",
                   *self.by]
        done = self.pbs.run(HEAD, [*command, *(word.replace(str(folder), work) for word in words)], cwd=work)
        found = re.search(rf"^\d+\.{HEAD}$", done.output, re.MULTILINE)
        assert found, done.output
        job = found[0]
        try:
            if fault:
                failed = Path(work, "failed")
                wait_until(lambda: failed.exists() and failed.read_text(), "the fault", seconds=120)
                if fault in ("outside", "off"):
                    self.root(bad, "ip", "link", "set", "eth0", "down")
                if fault == "off":
                    end_all(self.root(bad, "readlink", "/proc/self/ns/net"))
            wait_until(lambda: self.has_ended(job), "the end", seconds=200)
        finally:
            for host in (bad,) * (fault in ("outside", "off")):
                self.root(host, "ip", "link", "set", "eth0", "up")
        attributes = self.pbs.wait(job, 300)
        for file in Path(work).glob("metrics.jsonl"):
            (folder / file.name).write_text(file.read_text())
        return Result(int(attributes.get("Exit_status", -1)), self.pbs.output(attributes))

    def has_ended(self, job: str) -> bool:
        attributes = self.pbs.job(job)
        return attributes["job_state"] == FINISHED or bool(ENDED.search(self.pbs.output(attributes)))

    def all_free(self) -> bool:
        return self.root(HEAD, "/opt/pbs/bin/pbsnodes", "-aS").count(" free ") == len(self.hosts)


def fail_once(lab: Lab | SlurmJobs | PbsJobs, folder: Path, by: str, stage: list[str], fault: str, rank: int) -> Result:
    inside = "outside" if fault == "off" else fault
    words = [*stage, "--spare", "1", "--hang-timeout", "15", PROGRAM, str(folder), inside, str(rank)]
    if not isinstance(lab, Lab):
        return lab.run(folder, words, fault, lab.hosts[rank])
    job, bad = Job(lab, folder, nodes=lab.hosts.hosts), lab.hosts.hosts[rank]
    with killed_at_end(job.start(by, *words)) as launch:
        failed = folder / "failed"
        wait_until(lambda: failed.exists() and failed.read_text(), "the fault", seconds=120)
        try:
            if fault == "outside":
                lab.hosts.set_link(bad, "down")
            elif fault == "off":
                lab.hosts.set_link(bad, "down")
                end_all(os.readlink(f"/proc/{lab.hosts.pid(bad)}/ns/net"))
            return lab.wait(launch, 200)
        finally:
            lab.hosts.set_link(bad, "up")


def outcome(done: Result, folder: Path, fault: str, bad: str, other: str, spare: str, loss: str) -> tuple[bool, str]:
    last = done.output.splitlines()[-1]
    if fault == "disk":
        return done.status == 1 and f"on {bad.partition('.')[0]} failed: OSError: [Errno 28]" in last, last
    same = re.findall(r"^final loss .*", done.output, re.MULTILINE) == [loss]
    if fault == "two" and f"restart 1 without {bad}," not in done.output:  # the other one was noticed first
        bad = other
    if done.status or f"restart 1 without {bad}, with {spare} instead" not in done.output:
        return False, last
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    restart = [line for line in lines if line.get("event") == "start"][-1]["restart"]
    return same, f"{restart['seconds']:5.1f} s, loss {'identical' if same else 'DIFFERS'}: {restart['cause'][:90]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--by", default="ssh")
    parser.add_argument("--real-pbs", metavar="PREFIX")
    parser.add_argument("--mpiexec", metavar="PATH")
    parser.add_argument("--stage", action="store_const", const=["--stage"], default=[])
    parser.add_argument("--stage-dir", dest="stage", type=lambda folder: ["--stage-dir", folder], metavar="FOLDER")
    parser.add_argument("--healthy", type=int, metavar="PAIRS")
    parser.add_argument("--torchrun", type=int, metavar="PAIRS")
    args = parser.parse_args()
    if args.torchrun:
        return beside_torchrun(args.torchrun)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        if args.by == "srun":
            jobs = SlurmJobs(Path(name))
            return run(jobs, jobs.hosts, Path(name), args)
        if args.by == "pbs":
            if not args.real_pbs:
                parser.error("--by pbs needs --real-pbs PREFIX")
            pbs = PbsJobs(args.real_pbs, args.mpiexec)
            return run(pbs, pbs.hosts, Path(name), args)
        hosts = stack.enter_context(Hosts(5, subnet="10.79.25"))
        lab = Lab(hosts, hosts.start_sshd(), lambda program: Path(program))
        if args.healthy:
            return healthy(lab, Path(name), args.healthy, args.by, args.stage)
        return run(lab, hosts.hosts, Path(name), args)


def healthy(lab: Lab, parent: Path, pairs: int, by: str, stage: list[str]) -> int:
    """Print the seconds of launches without a spare and with one, nothing failing."""
    hosts, seconds = lab.hosts.hosts, []
    for number in range(pairs + 1):
        pair = {}
        for spare in (False, True) if number % 2 else (True, False):
            folder = parent / f"{number} {spare}"
            folder.mkdir()
            words = [*(stage if spare else []), "--spare", "1", PROGRAM] if spare else [PROGRAM]
            beginning = time.monotonic()
            done = Job(lab, folder, nodes=hosts[:5 if spare else 4]).run(by, *words, str(folder))
            pair[spare] = time.monotonic() - beginning
            assert done.status == 0, done.output
        if number:  # the first one fills the caches, and makes the copy
            seconds.append((pair[False], pair[True]))
            print(f"{number:3} without {pair[False]:.2f} s, with {pair[True]:.2f} s", flush=True)
    ratios = [with_spare / without for without, with_spare in seconds]
    quartiles = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    print(f"--spare 1{' --stage' * bool(stage)}: {quartiles[1]:.3f} of the launch without it, quartiles "
          f"{quartiles[0]:.3f} to {quartiles[2]:.3f}, {pairs} pairs; the bar is 1.03")
    return 0


def beside_torchrun(pairs: int) -> int:
    """Print the seconds from a killed rank to the end of the next step, of torchrun's restart and of the kit's."""
    sides = {"torchrun": [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "4"],
             "ddpkit launch": [*LAUNCH, "-n", "4"]}
    took: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(pairs):
        for side, command in sides.items():
            with tempfile.TemporaryDirectory() as name:
                words = [*command, "--max-restarts", "1", PROGRAM, name, "kill", "2"]
                done = subprocess.run(words, capture_output=True, text=True, timeout=200)
                assert done.returncode == 0 and "final loss" in done.stdout, done.stdout + done.stderr
                rows = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
                last_start = max(index for index, row in enumerate(rows) if row.get("event") == "start")
                next_step = next(row for row in rows[last_start:] if "loss" in row)
                took[side].append(next_step["time"] - (Path(name) / "failed").stat().st_mtime)
        print(number + 1, *(f"{side} {seconds[-1]:.1f} s" for side, seconds in took.items()), sep=", ", flush=True)
    medians = {side: statistics.median(seconds) for side, seconds in took.items()}
    print(f"medians: {', '.join(f'{side} {seconds:.1f} s' for side, seconds in medians.items())}; ratio "
          f"{medians['ddpkit launch'] / medians['torchrun']:.2f}")
    return 0


def run(lab: Lab | SlurmJobs | PbsJobs, hosts: list[str], parent: Path, args: argparse.Namespace) -> int:
    folder = parent / "undisturbed"
    folder.mkdir()
    if not isinstance(lab, Lab):
        done = lab.run(folder, [*args.stage, "--spare", "1", PROGRAM, str(folder)])
    else:
        done = Job(lab, folder, nodes=hosts[:4]).run(args.by, PROGRAM, str(folder))
    loss, wrong = done.line("final loss"), 0
    for number in range(args.failures):
        fault, rank = args.faults[number % len(args.faults)], random.randrange(4)
        if fault in ("outside", "off"):
            rank = random.randrange(1, 4)  # ddpkit launch runs on the first host
        folder = parent / str(number)
        folder.mkdir()
        done = fail_once(lab, folder, args.by, args.stage, fault, rank)
        right, text = outcome(done, folder, fault, hosts[rank], hosts[(rank + 1) % 4], hosts[4], loss)
        wrong += not right
        print(f"{number + 1:3} {fault:8} {hosts[rank]} {'right' if right else 'WRONG'} {text}", flush=True)
        if not right:
            print(done.output, file=sys.stderr, flush=True)
    print(f"{args.failures - wrong} of {args.failures} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
