"""The allocations of Slurm, as recorded from real jobs."""
from __future__ import annotations

import json

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, slurm_output
from utils.job import current_allocation
from utils.job.allocation import Allocation, AllocationError
from utils.job.slurm_job import gpu_count


def environments(name: str) -> list[dict[str, str]]:
    """The environment of every process of a recorded job: the batch shell first."""
    path = RECORDINGS / (name if "/" in name else f"slurm/{name}")
    recording = json.loads(path.with_name(f"{path.name}.json").read_text())
    return [process["environ"] for process in recording["processes"]]


def allocation(environ: dict[str, str], *, query: bool = False) -> Allocation:
    found = current_allocation(environ, query=query)
    assert found is not None
    return found


NONE = [None, None, None]
ALLOCATED: dict[str, tuple[list[int], list[int | None], list[int]]] = {  # ranks, GPUs and cores of each host
    "gpus_per_node_2x2": ([2, 2], [2, 2], [2, 2]),
    "nodelist_1_2_4": ([1, 1, 1], NONE, [1, 1, 1]),
    "pbs_directives_in_sbatch": ([3, 1], NONE[:2], [3, 1]),
    "exclusive_N2_only": ([1, 1], NONE[:2], [4, 4]),
    "srun_step_smaller_than_job": ([2, 2], NONE[:2], [2, 2]),
    "gres_gpu_1task_srun_gpus_per_task_gt": ([1], [2], [1]),
    "slurm-25.11/sbatch_2x2": ([2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_step_on_one_node": ([2, 2, 2], NONE, [2, 2, 2]),
    "slurm-25.11/salloc_2x2": ([2, 2], [2, 2], [2, 2]),
    "slurm-25.11/salloc_het": ([1, 2, 2], NONE, [1, 2, 2]),
    "slurm-25.11/sbatch_het_gpus_per_task": ([1, 2, 2], NONE, [1, 2, 2]),
    "slurm-26.05/sbatch_2x2": ([2, 2], [2, 2], [2, 2]),
    "slurm-26.05/sbatch_het": ([1, 2], NONE[:2], [1, 2]),
    "slurm-26.05/salloc_interactive": ([1, 1], NONE[:2], [1, 1]),
}


@pytest.mark.parametrize("name", ALLOCATED)
def test_every_process_of_a_job_knows_its_allocation(name: str) -> None:
    hosts = {"nodelist_1_2_4": ["node1", "node2", "node4"]}.get(name, ["node1", "node2", "node3"])
    for environ in environments(name):
        found = allocation(environ)
        assert (found.scheduler, found.job_id) == ("slurm", environ["SLURM_JOB_ID"])
        counts = (found.ranks_per_host, found.gpus_per_host, found.cores_per_host)
        assert tuple(map(list, counts)) == ALLOCATED[name]
        assert found.hosts == tuple(hosts[:len(found.ranks_per_host)])


@pytest.mark.parametrize(("name", "requested"), [
    ("gpus_per_node_1task_per_node_torchrun", True), ("gres_gpu_1task_srun_gpus_per_task_gt", True),
    ("exclusive_N2_only", False), ("slurm-26.05/salloc_interactive", False), ("slurm-26.05/sbatch_array", False),
    ("slurm-25.11/salloc_het", True), ("srun_pty_interactive", False)])  # what srun started
def test_number_of_tasks_is_known_to_be_requested(name: str, requested: bool) -> None:
    assert allocation(environments(name)[0]).tasks_requested == requested


def test_restarts_array_indices_and_the_plug_in_for_pbs_scripts_are_known() -> None:
    requeued = environments("requeue_external")
    array = environments("gres_gpu1_second_job_gets_device1")
    assert {allocation(environ).restart_count for environ in requeued} == {0, 1}
    assert {allocation(environ).array_index for environ in array} == {0, 1}

    assert current_allocation({"PATH": "/bin"}) is None
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PBS_JOBID": "7"}
    assert allocation(environ).scheduler == "slurm"


HETEROGENEOUS = environments("slurm-25.11/sbatch_het_gpus_per_task")[0]


def test_a_component_without_tasks_has_one_on_each_node() -> None:
    whole_nodes = {name: value for name, value in HETEROGENEOUS.items() if "NTASKS" not in name}
    assert allocation(whole_nodes).ranks_per_host == (1, 1, 1)


def test_commands_report_what_the_variables_lack(commands: Commands) -> None:
    found = allocation(HETEROGENEOUS, query=True)
    assert (found.gpus_per_host, found.seconds_left()) == ((None, None, None), None)

    commands.add("scontrol", slurm_output("job-het"))
    commands.add("squeue", "20 5:00\n36 1-00:00:10\n")
    found = allocation({**HETEROGENEOUS, "SLURM_JOB_ID": "36"}, query=True)
    assert (found.gpus_per_host, found.cores_per_host) == ((1, 0, 0), (1, 2, 1))
    assert found.seconds_left() == 86410


@pytest.mark.parametrize(("name", "value"), [
    ("SLURM_JOB_NODELIST", "n[1-"), ("SLURM_JOB_NODELIST", ""), ("SLURM_TASKS_PER_NODE", "2(x3)"),
    ("SLURM_TASKS_PER_NODE", "two"), ("SLURM_RESTART_COUNT", "many")])
def test_contradicting_variables_are_an_error(name: str, value: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
               "SLURM_TASKS_PER_NODE": "2(x2)", name: value}
    with pytest.raises(AllocationError, match="Slurm job 7"):
        current_allocation(environ, query=False)


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:2", 2), ("gpu:a100:4(IDX:0-3)", 4), ("gpu:a100:4,gpu:v100:2(S:0-1),shard:8", 6), ("(null)", 0), ("", 0),
    ("gpu", 1), ("gres/gpu=3", 3), ("mps:100", 0)])
def test_gpus_are_counted_in_every_form(text: str, count: int) -> None:
    assert gpu_count(text) == count
