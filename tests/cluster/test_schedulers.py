"""utils.schedulers on a real Slurm: what a job finds out about itself, and how jobs are submitted and watched."""
from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import SlurmCluster
from utils.schedulers import Job, Slurm

pytest_plugins = ["tests.cluster.slurm_fixture"]

ROOT = Path(__file__).resolve().parents[2]
SHOW = (f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); "
        "from utils.schedulers import current_allocation; found = current_allocation(); "
        "print('FOUND' + json.dumps({**found._asdict(), 'left': found.seconds_left()}))")
SHOW_IN_JOB = f'{shlex.quote(sys.executable)} -c "{SHOW}"'
CALL = (f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); from dataclasses import asdict; "
        "from utils.schedulers import *\n"
        "try:\n    answer = getattr(Slurm(), sys.argv[1])(*sys.argv[2:])\n"
        "except SchedulerError as error:\n    sys.exit(str(error))\n"
        "print(json.dumps(asdict(answer) if isinstance(answer, Status) else answer))")
TEMPLATE = "#!/bin/bash\n@directives@\nset -euo pipefail\n@setup@\n"

ALLOCATED = {  # options of sbatch: ranks, GPUs and cores of each host
    "-N2 --ntasks-per-node=2 --gres=gpu:2": ([2, 2], [2, 2], [2, 2]),
    "-N2 -n3 --gpus=3": ([2, 1], [2, 1], [2, 1]),
    "-N3 -n4": ([2, 1, 1], [0, 0, 0], [2, 1, 1]),
    "-N2 --exclusive": ([1, 1], [2, 2], [4, 4]),
    "-N1 --gpus-per-task=1 -n2 -c2": ([2], [2], [4]),
    "-N1 -n1 --gres=gpu:1 : -N2 --ntasks-per-node=2 --gpus-per-node=2": ([1, 2, 2], [1, 2, 2], [1, 2, 2]),
}


def found(output: str) -> list[dict[str, Any]]:
    return [json.loads(line[len("FOUND"):]) for line in output.splitlines() if line.startswith("FOUND")]


@pytest.mark.parametrize("options", ALLOCATED)
def test_a_job_and_a_step_on_a_part_of_it_know_the_whole_allocation(slurm: SlurmCluster, options: str) -> None:
    # A step gets none of the GPUs that were asked for as a total: Slurm refuses it unless it asks for some itself.
    script = f"#!/bin/bash\n{SHOW_IN_JOB}\nsrun --nodes 1 --ntasks 1 ${{SLURM_GPUS:+--gpus 1}} {SHOW_IN_JOB}\n"
    job_id = slurm.sbatch("--time=5", *options.split(), script_file(slurm, script))
    slurm.wait(job_id)
    batch, step = found(slurm.output(job_id))
    for seen in (batch, step):
        assert (seen["ranks_per_host"], seen["gpus_per_host"], seen["cores_per_host"]) == ALLOCATED[options]
        assert seen["hosts"] == [f"node{number + 1}" for number in range(len(seen["hosts"]))]
        assert 200 < seen["left"] <= 300 and seen["restart_count"] == 0


def test_each_element_of_an_array_knows_its_own_index_hosts_and_time(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("--time=5", "--array=3-5", "-N1", "-n2", script=f"#!/bin/bash\n{SHOW_IN_JOB}\n")
    slurm.wait(job_id)
    seen = [one for job in slurm.jobs(job_id) for one in found(Path(job["StdOut"]).read_text())]
    assert sorted(one["array_index"] for one in seen) == [3, 4, 5]
    assert all(one["ranks_per_host"] == [2] and 200 < one["left"] <= 300 for one in seen)


def script_file(slurm: SlurmCluster, text: str) -> str:
    path = slurm.work / "job.sh"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def call(slurm: SlurmCluster) -> Callable[..., Any]:
    """Call a method of Slurm on the login host; returns its answer, or the message of its SchedulerError."""
    def on_head(method: str, *arguments: str) -> Any:
        done = slurm.run([sys.executable, "-c", CALL, method, *arguments])
        return json.loads(done.output) if done.status == 0 else done.output
    return on_head


def rendered(slurm: SlurmCluster, body: str, **values: Any) -> str:
    return script_file(slurm, Slurm().render(Job(("x.py",), walltime=300, **values), TEMPLATE) + body)


def ends(call: Callable[..., Any], job_ids: Sequence[str]) -> list[tuple[str, int | None]]:
    """State and exit code of each job, when all have ended."""
    limit = time.monotonic() + 60
    while True:
        seen = [call("status", job_id) for job_id in job_ids]
        if all(one["state"] in ("completed", "failed", "cancelled", "never_ran", "timeout") for one in seen):
            return [(one["state"], one["exit_code"]) for one in seen]
        assert time.monotonic() < limit, seen
        time.sleep(0.2)


def test_jobs_end_as_they_ended(slurm: SlurmCluster, call: Callable[..., Any]) -> None:
    bad = call("submit", rendered(slurm, "exit 3"))
    after_success = call("submit", rendered(slurm, "exit 0", dependency=f"afterok:{bad}"))
    after_any = call("submit", rendered(slurm, "exit 0", dependency=f"afterany:{bad}"))
    array = call("submit", rendered(slurm, "exit $SLURM_ARRAY_TASK_ID", array="0-2"))
    killed = call("submit", rendered(slurm, "kill -9 $$"))
    assert ends(call, [bad, after_success, after_any, array, killed]) == [
        ("failed", 3), ("never_ran", None), ("completed", 0), ("failed", 2), ("failed", 137)]


def test_a_waiting_job_has_a_place_and_is_cancelled(slurm: SlurmCluster, call: Callable[..., Any]) -> None:
    first = call("submit", rendered(slurm, "sleep 100", nodes=4, directives=("--exclusive",)))
    slurm.wait_for(first, {"RUNNING"})
    second = call("submit", rendered(slurm, "true", nodes=4, directives=("--exclusive",)))
    assert (call("status", second)["state"], call("status", second)["position"]) == ("queued", 1)
    for job_id in (second, first, first):
        call("cancel", job_id)
    assert [state for state, _ in ends(call, [first, second])] == ["cancelled", "cancelled"]


def test_sbatch_reads_every_value_of_a_directive_as_it_was_given(slurm: SlurmCluster, call: Callable[..., Any]) -> None:
    output = str(slurm.work) + "/a  b 'c' \"d\" # $(touch x) \u00e9;&.out"
    job_id = call("submit", rendered(slurm, "echo here", output=output, name="run.1"))
    assert ends(call, [job_id]) == [("completed", 0)]
    status = call("status", job_id)
    assert (status["output"], status["name"]) == (output, "run.1")
    assert Path(output).read_text() == "here\n"


@pytest.mark.parametrize(("values", "line"), [
    ({"queue": "nosuch"}, "#SBATCH --partition=nosuch"), ({"directives": ("--frob=1",)}, "#SBATCH --frob=1"),
    ({"directives": ("--constraint=foo",)}, "#SBATCH --constraint=foo")])
def test_a_refusal_of_sbatch_names_the_line(slurm: SlurmCluster, call: Callable[..., Any], values: dict[str, Any],
                                            line: str) -> None:
    said = call("submit", rendered(slurm, "true", **values))
    assert "sbatch: " in said and said.strip().endswith(line)


def test_a_job_that_asks_for_too_much_is_found_out_before(slurm: SlurmCluster) -> None:
    (slurm.work / "train.py").write_text("")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from utils.schedulers import *; "
            "job = Job(('train.py',), nodes=5, gpus_per_node=3, queue='short', walltime=3600)\n"
            "print(*Slurm().check(job))")
    said = slurm.run([sys.executable, "-c", code]).output
    for field in ("walltime: ", "nodes: 5", "gpus_per_node: 3"):
        assert field in said


def test_a_requeued_job_counts(slurm: SlurmCluster, call: Callable[..., Any]) -> None:
    job_id = call("submit", rendered(slurm, f'{SHOW_IN_JOB}\n[ -n "${{SLURM_RESTART_COUNT-}}" ] || sleep 100\n',
                                     requeue=True))
    slurm.wait_for(job_id, {"RUNNING"})
    call("requeue", job_id)
    assert ends(call, [job_id]) == [("completed", 0)]
    assert found(slurm.output(job_id))[-1]["restart_count"] == 1
    assert call("status", job_id)["restart_count"] == 1
