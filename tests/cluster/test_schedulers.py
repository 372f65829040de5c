"""utils.schedulers on a real Slurm: allocations, and jobs submitted, queried and cancelled."""
from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT
from utils.schedulers import Job, Slurm

pytest_plugins = ["tests.cluster.slurm_fixture"]

IMPORT = f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); from utils.schedulers import *"
SHOW = (f"{IMPORT}; found = current_allocation(); "
        "print('FOUND' + json.dumps({**found._asdict(), 'left': found.seconds_left()}))")
SHOW_IN_JOB = f'{shlex.quote(sys.executable)} -c "{SHOW}"'
CALL = f"""{IMPORT}
from dataclasses import asdict
result = getattr(Slurm(), sys.argv[1])(*sys.argv[2:])
print(json.dumps(asdict(result) if isinstance(result, Status) else result))"""
TEMPLATE = "#!/bin/bash\n@directives@\nset -euo pipefail\n@setup@\n"

ALLOCATED = {  # options of sbatch: ranks, GPUs and cores of each host
    "-N2 --ntasks-per-node=2 --gres=gpu:2": ([2, 2], [2, 2], [2, 2]),
    "-N2 -n3 --gpus=3": ([2, 1], [2, 1], [2, 1]),
    "-N3 -n4": ([2, 1, 1], [0, 0, 0], [2, 1, 1]),
    "-N2 --exclusive": ([1, 1], [2, 2], [4, 4]),
    "-N1 --gpus-per-task=1 -n2 -c2": ([2], [2], [4]),
    "-N1 -n1 --gres=gpu:1 : -N2 --ntasks-per-node=2 --gpus-per-node=2": (
        [1, 2, 2], [1, 2, 2], [1, 2, 2]),
}


def found(output: str) -> list[dict[str, Any]]:
    """Return the allocations that the processes of a job printed."""
    lines = [line for line in output.splitlines() if line.startswith("FOUND")]
    return [json.loads(line.removeprefix("FOUND")) for line in lines]


@pytest.mark.parametrize("options", ALLOCATED)
def test_job_and_smaller_step_know_the_allocation(slurm: SlurmCluster, options: str) -> None:
    # Of GPUs requested as a total, a step gets none unless it requests some itself.
    step = f"srun --nodes 1 --ntasks 1 ${{SLURM_GPUS:+--gpus 1}} {SHOW_IN_JOB}"
    job_id = slurm.sbatch("--time=5", *options.split(), script=f"#!/bin/bash\n{SHOW_IN_JOB}\n{step}\n")
    slurm.wait(job_id)
    processes = found(slurm.output(job_id))
    assert len(processes) == 2
    for seen in processes:
        counts = seen["ranks_per_host"], seen["gpus_per_host"], seen["cores_per_host"]
        assert counts == ALLOCATED[options]
        assert seen["hosts"] == [f"node{number + 1}" for number in range(len(seen["hosts"]))]
        assert 200 < seen["left"] <= 300 and seen["restart_count"] == 0


def call(slurm: SlurmCluster, method: str, *arguments: str) -> Any:
    """Return the result of a method of Slurm that is called on the login host."""
    done = slurm.run([sys.executable, "-c", CALL, method, *arguments])
    assert done.status == 0, done.output
    return json.loads(done.output)


def rendered(slurm: SlurmCluster, body: str, **values: Any) -> str:
    """Write a job script; return its path."""
    path = slurm.work / "job.sh"
    path.write_text(Slurm().render(Job(("x.py",), walltime=300, **values), TEMPLATE) + body, encoding="utf-8")
    return str(path)


def ends(slurm: SlurmCluster, *job_ids: str) -> list[tuple[str, int | None]]:
    """Return state and exit code of each job, when all have ended."""
    for job_id in job_ids:
        slurm.wait(job_id)
    seen = [call(slurm, "status", job_id) for job_id in job_ids]
    return [(one["state"], one["exit_code"]) for one in seen]


def test_each_end_of_a_job_is_its_status(slurm: SlurmCluster) -> None:
    failed = call(slurm, "submit", rendered(slurm, "exit 3"))
    after_success = call(slurm, "submit", rendered(slurm, "exit 0", dependency=f"afterok:{failed}"))
    after_any = call(slurm, "submit", rendered(slurm, "exit 0", dependency=f"afterany:{failed}"))
    array = call(slurm, "submit", rendered(slurm, "exit $SLURM_ARRAY_TASK_ID", array="0-2"))
    killed = call(slurm, "submit", rendered(slurm, "kill -9 $$"))
    assert ends(slurm, failed, after_any, array, killed) == [
        ("failed", 3), ("completed", 0), ("failed", 2), ("failed", 137)]
    wait_until(lambda: call(slurm, "status", after_success)["state"] == "never_ran", "the state", seconds=60)


def test_pending_job_has_a_position_and_is_cancelled(slurm: SlurmCluster) -> None:
    all_nodes: dict[str, Any] = {"nodes": 4, "directives": ("--exclusive",)}
    first = call(slurm, "submit", rendered(slurm, "sleep 100", **all_nodes))
    slurm.wait_for(first, {"RUNNING"})
    second = call(slurm, "submit", rendered(slurm, "true", **all_nodes))
    status = call(slurm, "status", second)
    assert (status["state"], status["position"]) == ("queued", 1)
    for job_id in (second, first, first):
        call(slurm, "cancel", job_id)
    assert [state for state, _ in ends(slurm, first, second)] == ["cancelled", "cancelled"]


def test_sbatch_reads_quoted_directives(slurm: SlurmCluster) -> None:
    output = str(slurm.work) + "/a  b 'c' \"d\" # $(touch x) \u00e9;&.out"
    job_id = call(slurm, "submit", rendered(slurm, "echo here", output=output, name="run.1"))
    assert ends(slurm, job_id) == [("completed", 0)]
    assert (call(slurm, "status", job_id)["output"], slurm.job(job_id)["JobName"]) == (output, "run.1")
    assert Path(output).read_text() == "here\n"
