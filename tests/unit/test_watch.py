"""`ddpkit watch`: planted histories of jobs and chains, as Slurm and PBS report them."""
from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.unit.submission import Login, Scripted, use_scheduler
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.scheduler import Status
from utils.tools.submission import submissions as records

START = "ddpkit launch: 4 ranks on 2 hosts (2 each) by srun\n4 ranks on 2 hosts by srun, backend gloo\n"
ONE_HOST = "ddpkit launch: 4 ranks on n1 by srun\n"
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
SAID = 'ddpkit-failure {{"kind": "{}", "rank": 2, "host": "n7", "cause": "rank 2 on n7 {}"}}\n'
LOST = SAID.format("lost", "does not respond to n1: its host is down")
KILLED = SAID.format("status", "was ended by SIGKILL (exit status 137)")
CHECK = "ddpkit launch: 4 ranks on 2 hosts (2 each) by srun\ndoctor: good: 4 ranks on 2 hosts, started by srun\n"


def steps(first: int, last: int) -> str:
    return "".join(f"step {step}/900: loss 0.5\n" for step in range(first, last + 1, 10))


def ended(state: str, exit_code: int | None = None, **fields: str) -> dict[str, Status]:
    status = Status("1", state, exit_code, **fields)
    return {"slurm": status, "pbs": status}


RUNNING, QUEUED = ended("running"), ended("queued", reason="Priority")
FOR_EVER = {"slurm": Status("2", "held", reason="DependencyNeverSatisfied: the job that it waits for failed"),
            "pbs": Status("2", "held", reason="waits for ever for 1.head (afterok), which was deleted")}
LOST_HOST = {"slurm": Status("1", "node_fail"), "pbs": Status("1", "failed", 137)}

# Statuses of the jobs of a chain, their output, the decision and its exit status, and words of the evidence.
HISTORIES = {
    "runs": ([RUNNING], [CHECK + START + steps(10, 200)], "RUNNING", 0, "job 1: running"),
    "waits": ([QUEUED], [], "RUNNING", 0, r"job 1: queued \(Priority\)"),
    "requeued, came further": ([RUNNING], [START + steps(10, 50) + KILLED + START + steps(50, 90) + KILLED
                                           + START + steps(90, 100)], "RUNNING", 0, "2 runs before"),
    "time limit": ([ended("timeout")], [ONE_HOST + steps(10, 50)], "RESTART", 1, "submit resubmit 1"),
    "saved": ([ended("stopped", 75)], [START + "stopped after step 50\n"], "RESTART", 1, "stopped after saving"),
    "complete": ([ended("completed", 0), ended("cancelled")], [START + steps(10, 900)], "STOP", 0, "has completed"),
    "restart storm": ([RUNNING], [(START + KILLED.replace("n7", "n3")) * 2 + START + LOST * 2 + START
                                  + "ValueError: 7\n" + START], "STOP", 3, "restart storm: the last 4 runs failed"),
    "restarts without progress": (
        [RUNNING], [START + steps(10, 50) + KILLED + (START + steps(40, 50) + KILLED) * 3 + START], "STOP", 3,
        r"3 restarts without progress beyond step 50. Causes: killed \(3\)"),
    "error of the user": ([ended("failed", 1)], [START + OOM], "STOP", 3,
                          r"a restart does not help: rank 3: cuda_oom\. .*\n  Correct it first$"),
    "repeated error of the user": ([RUNNING], [(START + OOM) * 2 + START], "STOP", 3, "not help: .*submit cancel 1"),
    "lost host": ([LOST_HOST], [START + steps(10, 50) + LOST], "RESTART", 1, "resubmit 1"),
    "stranded": ([ended("cancelled", scheduler_state="PREEMPTED"), FOR_EVER], [START + steps(10, 50)], "RESTART", 1,
                 "stranded: job 2 waits for ever\n  ddpkit submit cancel 2 && ddpkit submit resubmit 1"),
    "chain after a failure": ([ended("failed", 137), QUEUED], [START + steps(10, 50) + KILLED], "RESTART", 1,
                              "stranded: job 2 will refuse to start after job 1"),
    "suspect node": ([RUNNING], [START + steps(10, 50) + KILLED + START + steps(60, 90) + KILLED + START], "RUNNING",
                     0, "suspect node: n7 was at fault in 2 of 2 runs"),
    "cancelled": ([ended("cancelled")], [START + steps(10, 50)], "STOP", 3, "it was cancelled"),
    "unknown": ([ended("unknown")], [], "STOP", 3, "neither the scheduler nor a record knows"),
}


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("history", HISTORIES)
def test_history(history: str, scheduler: str, login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, output, decision, exit_status, evidence = HISTORIES[history]
    folder = login.folder / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    ids = [str(number) for number in range(1, len(statuses) + 1)]
    records.write(folder, records.new_record(Job(("train.py",)), scheduler, "x"), ids)
    for job_id, text in zip(ids, output, strict=False):
        (folder / f"{job_id}{'.out' if scheduler == 'slurm' else '.head.OU'}").write_text(text)
    use_scheduler(monkeypatch, Scripted({job_id: replace(one[scheduler], job_id=job_id)
                                         for job_id, one in zip(ids, statuses, strict=True)}))
    done = login.submit("watch", "1")
    assert done.status == exit_status and done.out.startswith(f"{decision} 1\n"), done
    assert re.search(evidence, done.out, re.DOTALL), done.out
    found = json.loads(login.submit("watch", "--json", "1").out)
    assert found["decision"] == decision and found["job"] == "1" and found["evidence"]
