"""Failures of hosts and ranks in a launch with a spare: which host is left out, how long it takes, the final loss.

python tests/faults/spares.py [--failures 40] [--faults kill agent stop gpu outside off disk] [--by ssh]

Five hosts (network namespaces) are a job of PBS, four train. In each run a rank fails after step 12, in the way of
FAULT, or its host is cut off ("outside") or loses all its processes ("off"). Prints a line for each: whether the right
host was left out, seconds from the notice of the failure to the end of the next step, and whether the final loss has
the same bits as that of an undisturbed run. "disk", a full disk, ends the launch with its cause. Exit status 0 if all
are right. Needs root, and about 25 s for each failure.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.launch.launchers import Lab, Result
from tests.launch.test_launch import Job
from utils.host import process

PROGRAM = str(Path(__file__).resolve().parents[1] / "launch" / "spare_program.py")
FAULTS = ("kill", "agent", "stop", "gpu", "outside", "off", "disk")


def switch_off(hosts: Hosts, host: str) -> None:
    """Cut a host off, then kill all that runs there: nobody closes a connection."""
    hosts.set_link(host, "down")
    namespace = os.readlink(f"/proc/{hosts.pid(host)}/ns/net")
    for pid in process.process_ids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            of_launch = b"spare_program" in words or b"agent" in words
            if of_launch and os.readlink(f"/proc/{pid}/ns/net") == namespace:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def fail_once(lab: Lab, folder: Path, by: str, fault: str, rank: int) -> Result:
    job, bad = Job(lab, folder, nodes=lab.hosts.hosts), lab.hosts.hosts[rank]
    inside = "outside" if fault == "off" else fault
    words = ["--spare", "1", "--hang-timeout", "15", PROGRAM, str(folder), inside, str(rank)]
    with killed_at_end(job.start(by, *words)) as launch:
        failed = folder / "failed"
        wait_until(lambda: failed.exists() and failed.read_text(), "the fault", seconds=120)
        try:
            if fault == "outside":
                lab.hosts.set_link(bad, "down")
            elif fault == "off":
                switch_off(lab.hosts, bad)
            return lab.wait(launch, 200)
        finally:
            lab.hosts.set_link(bad, "up")


def verdict(done: Result, folder: Path, fault: str, bad: str, spare: str, loss: str) -> tuple[bool, str]:
    last = done.output.splitlines()[-1]
    if fault == "disk":
        return done.status == 1 and f"on {bad} failed: OSError: [Errno 28]" in last, last
    if done.status or f"restart 1 without {bad}, with {spare} instead" not in done.output:
        return False, last
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    restart = [line for line in lines if line.get("event") == "start"][-1]["restart"]
    same = re.findall(r"^final loss .*", done.output, re.MULTILINE) == [loss]
    return same, f"{restart['seconds']:5.1f} s, loss {'identical' if same else 'DIFFERS'}: {restart['cause'][:90]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--by", default="ssh")
    args = parser.parse_args()
    wrong = 0
    with Hosts(5, subnet="10.79.25") as hosts, tempfile.TemporaryDirectory() as name:
        lab = Lab(hosts, hosts.start_sshd(), lambda program: Path(program))
        folder = Path(name, "undisturbed")
        folder.mkdir()
        done = Job(lab, folder, nodes=hosts.hosts[:4]).run(args.by, PROGRAM, str(folder))
        loss = done.line("final loss")
        for number in range(args.failures):
            fault, rank = args.faults[number % len(args.faults)], random.randrange(4)
            if fault in ("outside", "off"):
                rank = random.randrange(1, 4)  # ddpkit launch runs on the first host
            folder = Path(name, str(number))
            folder.mkdir()
            done = fail_once(lab, folder, args.by, fault, rank)
            right, text = verdict(done, folder, fault, hosts.hosts[rank], hosts.hosts[4], loss)
            wrong += not right
            print(f"{number + 1:3} {fault:8} {hosts.hosts[rank]} {'right' if right else 'WRONG'} {text}", flush=True)
            if not right:
                print(done.output, file=sys.stderr, flush=True)
    print(f"{args.failures - wrong} of {args.failures} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
