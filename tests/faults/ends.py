"""How each rank can end, under every launcher: which rank and host the closing line names, and the exit status.

python tests/faults/ends.py [--by local ssh torchrun srun mpich5 openmpi4 openmpi5 intel] [--ends kill status-3 ...]
                            [--scripts kit plain]

Rank 1 ends in one way; rank 0 trains on. Two hosts in network namespaces with one rank each, of a job as PBS describes
it; with srun, two nodes of a real Slurm, of DDPKIT_SLURM_HOME or of the system; local: two ranks on this host. A script
with setup_distributed() and a plain one. Prints a line for each case: right or WRONG, the exit status and the closing
line; exit status 0 if all are right. Needs root, and 5 to 15 s for each case.

What is right: the status is not 0 unless all ranks ended well; rank 1 and its host are named, and its own end (signal,
exit status or exception) is in the line or the status. A rank that leaves early with status 0 may be named as such, or
the line says that the other one ended after it. A rank that never ends is named by the hang timeout.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.cluster.hosts import Hosts, killed_at_end
from tests.cluster.slurm import SlurmCluster
from tests.conftest import find_or_skip
from tests.launch.launchers import LAUNCH, Lab, Result
from tests.launch.test_launch import Job

ENDS = ("well", "status-1", "status-3", "before", "after", "kill", "segv", "abrt", "bus", "exit-7", "early",
        "late-kill", "never")
STATUS = {"status-1": 1, "status-3": 3, "before": 1, "after": 1, "kill": 137, "segv": 139, "abrt": 134, "bus": 135,
          "exit-7": 7, "late-kill": 137}
_LEFT = "status 0 before|left normally|ended its program|left by sys.exit"
LAUNCHERS = ("local", "ssh", "torchrun", "srun", "mpich5", "openmpi4", "openmpi5", "intel")
WORDS = {"status-1": "SystemExit: 1|exit status 1", "status-3": "SystemExit: 3|exit status 3",
         "before": "ValueError: first", "after": "ValueError: second",
         "kill": "SIGKILL", "segv": "SIGSEGV", "abrt": "SIGABRT", "bus": "SIGBUS",
         "exit-7": "exit status 7", "late-kill": "SIGKILL"}

PROGRAM = '''
import os, resource, signal, sys, time
import torch, torch.distributed as td
if {kit!r} == "kit":
    from ddpkit import setup_distributed
end = sys.argv[1]

def go(when):
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "1" and "1" not in sys.argv[2:]:
        return
    number = {{"kill": 9, "segv": 11, "abrt": 6, "bus": 7}}.get(end)
    if when == "before" and end == "before":
        raise ValueError("first")
    if when != "after":
        return
    if number:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL) if number != 9 else None
        os.kill(os.getpid(), number)
    if end == "after":
        raise ValueError("second")
    if end.startswith("status-"):
        sys.exit(int(end[-1]))
    if end == "exit-7":
        os._exit(7)
    if end == "early":
        sys.exit(0)
    if end == "never":
        time.sleep(10000)

def train():
    x = torch.ones(4)
    for step in range(20):
        td.all_reduce(x)
        if step == 5:
            go("after")
        time.sleep(0.02)

go("before")
if {kit!r} == "kit":
    with setup_distributed("gloo") as job:
        train()
        rank = job.rank
else:
    td.init_process_group("gloo")
    rank = td.get_rank()
    train()
    td.destroy_process_group()
if end == "late-kill":
    if rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
'''


def is_right(end: str, by: str, done: Result, failure: dict[str, object] | None) -> bool:
    """Whether a launch has told the end of rank 1."""
    if end == "well":
        return done.status == 0 and failure is None
    if done.status == 0 or failure is None:
        return False
    cause, last = str(failure["cause"]), done.output.splitlines()[-1]
    if cause[:60] not in last:
        return False
    if end == "early":
        return failure["rank"] in (0, 1, None) and re.search(_LEFT, cause) is not None
    host = {"srun": "node2"}.get(by, socket.gethostname() if by in ("local", "torchrun") else "h2")
    names_rank = failure["rank"] == 1 and failure["host"] in (host, None if by == "local" else host)
    if end == "never":
        return names_rank and failure["kind"] == "hang"
    is_status = done.status in (STATUS[end], 1) if by == "torchrun" else done.status == STATUS[end]
    return names_rank and is_status and re.search(WORDS[end], cause) is not None


def failure_of(path: Path) -> dict[str, object] | None:
    """What the failure file says last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1].partition(" ")[2]) if lines else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", nargs="+", default=LAUNCHERS, choices=LAUNCHERS)
    parser.add_argument("--ends", nargs="+", default=ENDS, choices=ENDS)
    parser.add_argument("--scripts", nargs="+", default=("kit", "plain"), choices=("kit", "plain"))
    args = parser.parse_args()
    cases = wrong = 0
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        run = {by: launcher(by, folder, stack) for by in args.by}
        for by in args.by:
            for script in args.scripts:
                for end in args.ends:
                    program, record = folder / f"{script}.py", folder / f"{by}-{script}-{end}"
                    program.write_text(PROGRAM.format(kit=script))
                    done = run[by](program, record, ["--hang-timeout", "15" if end == "never" else "60"], end)
                    failure = failure_of(record)
                    right = is_right(end, by, done, failure)
                    cases, wrong = cases + 1, wrong + (not right)
                    last = done.output.splitlines()[-1][:150] if done.output else ""
                    verb = "right" if right else "WRONG"
                    print(f"{by:9} {script:5} {end:9} {verb} {done.status:3} {last}", flush=True)
                    if not right:
                        print(done.output, failure, file=sys.stderr, flush=True)
    print(f"{cases - wrong} of {cases} right")
    return 1 if wrong else 0


@functools.cache
def lab_of(stack: contextlib.ExitStack) -> Lab:
    hosts = stack.enter_context(Hosts(2, subnet="10.79.28"))
    return Lab(hosts, hosts.start_sshd(), find_or_skip)


def launcher(by: str, folder: Path, stack: contextlib.ExitStack) -> Callable[[Path, Path, list[str], str], Result]:
    """Return what starts a program: (program, failure file, options of launch, end) -> Result."""
    options = ["-n", "2"] if by in ("local", "torchrun") else []
    options += ["--torchrun"] * (by == "torchrun")
    if by in ("local", "torchrun"):
        def run_local(program: Path, record: Path, more: list[str], end: str) -> Result:
            words = [*LAUNCH, *options, *more, "--failure-file", str(record), str(program), end]
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                                  cwd=folder)
            return Result(done.returncode, done.stdout)
        return run_local
    if by == "srun":
        slurm = stack.enter_context(SlurmCluster(2, subnet="10.79.27"))

        def run_srun(program: Path, record: Path, more: list[str], end: str) -> Result:
            words = [*LAUNCH, *more, "--failure-file", str(record), str(program), end]
            script = f"#!/bin/bash\n{shlex.join(words)}\necho status $?\n"
            job = slurm.sbatch("-N2", "--ntasks-per-node=1", script=script)
            slurm.wait(job, 150)
            output, _, status = slurm.output(job).rstrip().rpartition("\nstatus ")
            return Result(int(status or -1), output)
        return run_srun
    lab = lab_of(stack)

    def run(program: Path, record: Path, more: list[str], end: str) -> Result:
        job = Job(lab, folder, nodes=["h1", "h2"])
        with killed_at_end(job.start(by, *more, "--failure-file", str(record), str(program), end)) as process:
            return job.lab.wait(process, 150)
    return run


if __name__ == "__main__":
    sys.exit(main())
