"""The allocations of Slurm, as recorded from real jobs."""
from __future__ import annotations

import json
import random

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, slurm_output
from utils.schedulers import Allocation, AllocationError, current_allocation
from utils.schedulers.slurm.output import gpu_count


def environments(name: str) -> list[dict[str, str]]:
    """The environment of every process of a recorded job: the batch shell first."""
    path = RECORDINGS / (name if "/" in name else f"slurm/{name}")
    recording = json.loads(path.with_name(f"{path.name}.json").read_text())
    return [process["environ"] for process in recording["processes"]]


def mutated(chance: random.Random, text: str) -> str:
    """The text with a few characters changed, removed or inserted."""
    letters = list(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(letters) + 1)
        letters[place:place + chance.randint(0, 1)] = chance.choice(["[", "]", ",", "-", "0", "9", "a", "", ".", "_"])
    return "".join(letters)


def allocation(environ: dict[str, str], *, query: bool = False) -> Allocation:
    found = current_allocation(environ, query=query)
    assert found is not None
    return found


NONE = [None, None, None]
ALLOCATED: dict[str, tuple[list[int], list[int | None], list[int]]] = {  # ranks, GPUs and cores of each host
    "sbatch_2x2_srun_no_accounting": ([2, 2], NONE[:2], [2, 2]),
    "gpus_per_node_2x2": ([2, 2], [2, 2], [2, 2]),
    "gpus_per_node_1task_per_node_torchrun": ([1, 1], [2, 2], [2, 2]),
    "nodelist_1_2_4": ([1, 1, 1], NONE, [1, 1, 1]),
    "pbs_directives_in_sbatch": ([3, 1], NONE[:2], [3, 1]),
    "exclusive_N2_only": ([1, 1], NONE[:2], [4, 4]),
    "salloc_command_no_srun": ([2, 2], NONE[:2], [2, 2]),
    "srun_step_smaller_than_job": ([2, 2], NONE[:2], [2, 2]),
    "mpich_wheel_mpiexec": ([2, 2], NONE[:2], [2, 2]),
    "gres_gpu_1task_srun_gpus_per_task_gt": ([1], [2], [1]),
    "slurm-25.11/sbatch_2x2": ([2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_exclusive": ([1, 1], NONE[:2], [4, 4]),
    "slurm-25.11/salloc_2x2": ([2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_step_on_one_node": ([2, 2, 2], NONE, [2, 2, 2]),
    "slurm-25.11/salloc_het": ([1, 2, 2], NONE, [1, 2, 2]),
    "slurm-25.11/sbatch_het_gpus_per_task": ([1, 2, 2], NONE, [1, 2, 2]),
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


def test_restarts_and_array_indices_are_known() -> None:
    requeued = environments("requeue_external")
    array = environments("gres_gpu1_second_job_gets_device1")
    assert {allocation(environ).restart_count for environ in requeued} == {0, 1}
    assert {allocation(environ).array_index for environ in array} == {0, 1}


def test_the_variables_of_slurm_decide() -> None:
    assert current_allocation({"PATH": "/bin"}) is None
    # Its plug-in for PBS scripts sets both.
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PBS_JOBID": "7"}
    assert allocation(environ).scheduler == "slurm"


HETEROGENEOUS = {
    "SLURM_JOB_ID": "26", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1",
    "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "node1", "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)"}


def test_a_heterogeneous_job_has_the_hosts_of_all_components() -> None:
    found = allocation(HETEROGENEOUS)
    assert found.hosts == ("node1", "node2", "node3")
    assert found.ranks_per_host == found.cores_per_host == (1, 2, 2)

    # A component without tasks has one on each node, where the variables have its cores.
    whole_nodes = {name: value for name, value in HETEROGENEOUS.items() if "NTASKS" not in name}
    whole_nodes |= {"SLURM_TASKS_PER_NODE_HET_GROUP_0": "4", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)"}
    assert allocation(whole_nodes).ranks_per_host == (1, 1, 1)


def test_commands_report_what_the_variables_lack(commands: Commands) -> None:
    found = allocation(HETEROGENEOUS, query=True)
    assert (found.gpus_per_host, found.seconds_left()) == ((None, None, None), None)

    commands.add("scontrol", slurm_output("job-het"))
    commands.add("squeue", "20 5:00\n36 1-00:00:10\n")
    found = allocation({**HETEROGENEOUS, "SLURM_JOB_ID": "36"}, query=True)
    assert (found.gpus_per_host, found.cores_per_host) == ((1, 0, 0), (1, 2, 1))
    assert found.seconds_left() == 86410


@pytest.mark.parametrize("change", [
    {"SLURM_JOB_NODELIST": "n[1-"}, {"SLURM_JOB_NODELIST": ""}, {"SLURM_TASKS_PER_NODE": "2(x3)"},
    {"SLURM_TASKS_PER_NODE": "two"}, {"SLURM_RESTART_COUNT": "many"}, {"SLURM_GPUS_PER_NODE": "a100:"}])
def test_contradicting_variables_are_an_error(change: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
               "SLURM_TASKS_PER_NODE": "2(x2)", **change}
    with pytest.raises(AllocationError, match="Slurm job 7"):
        current_allocation(environ, query=False)


def test_any_variables_give_an_allocation_or_the_error() -> None:
    chance = random.Random(9)
    known = environments("srun_step_smaller_than_job")[-1]
    names = ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_RESTART_COUNT",
             "SLURM_ARRAY_TASK_ID", *HETEROGENEOUS, *(name for name in known if name.startswith("SLURM_"))]
    values = ["", "2", "2(x2)", "node[1-3]", "a100:2", "-1", "\u00b2", "9" * 20, "9" * 5000]
    for _ in range(3000):
        environ = dict(chance.choice([known, HETEROGENEOUS]))
        for name in chance.sample(names, 3):
            environ[name] = mutated(chance, chance.choice(values))
        try:
            found = current_allocation(environ, query=False)
        except AllocationError:
            continue
        if found is not None:
            assert len(found.hosts) == len(found.ranks_per_host) == len(found.gpus_per_host)
            assert min(*found.ranks_per_host, *(count or 0 for count in found.gpus_per_host)) >= 0


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:2", 2), ("gpu:a100:4(IDX:0-3)", 4), ("gpu:a100:4,gpu:v100:2(S:0-1),shard:8", 6), ("(null)", 0), ("", 0),
    ("gpu", 1), ("gres/gpu=3", 3), ("mps:100", 0)])
def test_gpus_are_counted_in_every_form(text: str, count: int) -> None:
    assert gpu_count(text) == count
