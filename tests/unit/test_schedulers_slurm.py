"""Slurm's allocations and output, as recorded from real jobs."""
from __future__ import annotations

import json
import random
import re

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, commands, slurm_output
from tests.unit.test_hostlist import mutated
from utils.schedulers import Allocation, AllocationError, current_allocation
from utils.schedulers.slurm.output import SEPARATOR, gpu_count, node_resources, records, table

__all__ = ["commands"]  # the fixture

OUTPUTS = sorted(path.stem for path in (RECORDINGS / "slurm" / "answers").glob("*.json"))


def environments(name: str) -> list[dict[str, str]]:
    """The environment of every process of a recorded job: the batch shell first."""
    path = RECORDINGS / (name if "/" in name else f"slurm/{name}")
    recording = json.loads(path.with_name(f"{path.name}.json").read_text())
    return [process["environ"] for process in recording["processes"]]


def allocation(environ: dict[str, str], *, query: bool = False) -> Allocation:
    found = current_allocation(environ, query=query)
    assert found is not None
    return found


ALLOCATED = {  # recorded job: hosts, ranks, GPUs and cores of each
    "sbatch_2x2_srun_no_accounting": ("node1 node2", [2, 2], [None] * 2, [2, 2]),
    "gpus_per_node_2x2": ("node1 node2", [2, 2], [2, 2], [2, 2]),
    "gpus_per_node_1task_per_node_torchrun": ("node1 node2", [1, 1], [2, 2], [2, 2]),
    "nodelist_1_2_4": ("node1 node2 node4", [1, 1, 1], [None] * 3, [1, 1, 1]),
    "pbs_directives_in_sbatch": ("node1 node2", [3, 1], [None] * 2, [3, 1]),
    "exclusive_N2_only": ("node1 node2", [1, 1], [None] * 2, [4, 4]),
    "salloc_command_no_srun": ("node1 node2", [2, 2], [None] * 2, [2, 2]),
    "srun_step_smaller_than_job": ("node1 node2", [2, 2], [None] * 2, [2, 2]),
    "mpich_wheel_mpiexec": ("node1 node2", [2, 2], [None] * 2, [2, 2]),
    "gres_gpu_1task_srun_gpus_per_task_gt": ("node1", [1], [2], [1]),
    "slurm-25.11/sbatch_2x2": ("node1 node2", [2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_exclusive": ("node1 node2", [1, 1], [None] * 2, [4, 4]),
    "slurm-25.11/salloc_2x2": ("node1 node2", [2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_step_on_one_node": ("node1 node2 node3", [2, 2, 2], [None] * 3, [2, 2, 2]),
    "slurm-25.11/salloc_het": ("node1 node2 node3", [1, 2, 2], [None] * 3, [1, 2, 2]),
    "slurm-25.11/sbatch_het_gpus_per_task": ("node1 node2 node3", [1, 2, 2], [None] * 3, [1, 2, 2]),
}


@pytest.mark.parametrize("name", ALLOCATED)
def test_every_process_of_a_job_knows_its_allocation(name: str) -> None:
    hosts, *counts = ALLOCATED[name]
    for environ in environments(name):
        found = allocation(environ)
        assert (found.scheduler, found.job_id) == ("slurm", environ["SLURM_JOB_ID"])
        assert found.hosts == tuple(hosts.split())
        assert [*found.ranks_per_host] == counts[0]
        assert [[*found.gpus_per_host], [*found.cores_per_host]] == counts[1:]


def test_restarts_and_array_indices_are_known() -> None:
    requeued = environments("requeue_external")
    array = environments("gres_gpu1_second_job_gets_device1")
    assert {allocation(environ).restart_count for environ in requeued} == {0, 1}
    assert {allocation(environ).array_index for environ in array} == {0, 1}


def test_outside_of_a_job_nothing_is_allocated() -> None:
    assert current_allocation({"PATH": "/bin"}) is None


def test_slurm_wins_where_its_plug_in_sets_pbs_variables() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PBS_JOBID": "7"}
    assert allocation(environ).scheduler == "slurm"


HETEROGENEOUS = {
    "SLURM_JOB_ID": "26", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)"}


def test_a_heterogeneous_job_has_the_hosts_of_all_components() -> None:
    found = allocation(HETEROGENEOUS)
    assert found.hosts == ("node1", "node2", "node3")
    assert found.ranks_per_host == found.cores_per_host == (1, 2, 2)


def test_a_component_without_tasks_has_one_per_node() -> None:
    whole_nodes = {name: value for name, value in HETEROGENEOUS.items() if "NTASKS" not in name}
    whole_nodes |= {"SLURM_TASKS_PER_NODE_HET_GROUP_0": "4",  # its cores
                    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)"}
    assert allocation(whole_nodes).ranks_per_host == (1, 1, 1)


def test_scontrol_reports_gpus_that_the_variables_lack(commands: Commands) -> None:
    commands.add("scontrol", slurm_output("job-het"))
    found = allocation({**HETEROGENEOUS, "SLURM_JOB_ID": "36"}, query=True)
    assert (found.gpus_per_host, found.cores_per_host) == ((1, 0, 0), (1, 2, 1))


def test_without_scontrol_the_gpus_are_unknown(commands: Commands) -> None:
    found = allocation(HETEROGENEOUS, query=True)
    assert (found.gpus_per_host, found.seconds_left()) == ((None, None, None), None)


def test_the_time_left_is_that_of_this_element(commands: Commands) -> None:
    commands.add("squeue", "20 5:00\n26 1-00:00:10\n")
    assert allocation(HETEROGENEOUS).seconds_left() == 86410


@pytest.mark.parametrize("change", [
    {"SLURM_JOB_NODELIST": "n[1-"}, {"SLURM_JOB_NODELIST": ""}, {"SLURM_TASKS_PER_NODE": "2(x3)"},
    {"SLURM_TASKS_PER_NODE": "two"}, {"SLURM_RESTART_COUNT": "many"},
    {"SLURM_GPUS_PER_NODE": "a100:"}])
def test_contradicting_variables_are_an_error(change: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
               "SLURM_TASKS_PER_NODE": "2(x2)", **change}
    with pytest.raises(AllocationError, match="Slurm job 7"):
        current_allocation(environ, query=False)


def test_any_variables_give_an_allocation_or_the_error() -> None:
    chance = random.Random(9)
    known = environments("srun_step_smaller_than_job")[-1]
    more = ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_RESTART_COUNT",
            "SLURM_ARRAY_TASK_ID"]
    names = [name for name in [*known, *HETEROGENEOUS, *more] if name.startswith("SLURM_")]
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


# Output -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    name for name in OUTPUTS if name.startswith("job-") or name in ("nodes", "partitions")])
def test_no_field_of_scontrol_is_lost(name: str) -> None:
    left = slurm_output(name)
    for record in records(left):
        for field, value in record.items():
            is_lines = field == "Nodes" and "CPU_IDs" in value
            for printed in value.split("\n") if is_lines else [f"{field}={value}"]:
                assert printed in left
                left = left.replace(printed, "", 1)
    assert left.split() == []


@pytest.mark.parametrize("name", ["squeue", "sinfo", "sacct"])
def test_no_column_of_a_table_is_lost(name: str) -> None:
    text = slurm_output(name)
    columns = [str(number) for number in range(len(text.split("\n")[0].split(SEPARATOR)))]
    rows = [SEPARATOR.join(row.values()) for row in table(text, columns)]
    assert "\n".join(rows) + "\n" == text


def test_names_that_look_like_fields_stay_names() -> None:
    odd = 'odd | name  with "quotes" \'and\' \\ JobState=COMPLETED #é😀'
    [job] = records(slurm_output("job-odd-name"))
    assert (job["JobName"], job["JobState"], job["Reason"]) == (odd, "RUNNING", "None")
    assert job["StdOut"] == "/cluster/log of 33.out"
    [job] = records(slurm_output("job-newline"))
    assert (job["JobName"], job["JobState"]) == ("two\nlines", "PENDING")
    rows = table(slurm_output("squeue"), ("id", "state", "partition", "name", "reason", "nodes"))
    assert {odd, "two\nlines"} <= {row["name"] for row in rows}


@pytest.mark.parametrize(("name", "field", "values"), [
    ("job-array", "ArrayTaskId", ["2-5%2", "1", "0"]),
    ("nodes", "NodeName", ["node1", "node2", "node3", "node4"]),
    ("partitions", "PartitionName", ["main", "short"]),
    ("partitions", "MaxTime", ["UNLIMITED", "00:10:00"])])
def test_each_record_is_one(name: str, field: str, values: list[str]) -> None:
    assert [record[field] for record in records(slurm_output(name))] == values


@pytest.mark.parametrize(("name", "resources"), [
    ("job-details", {"node1": (1, 1), "node2": (1, 1)}),
    ("job-het", {"node1": (1, 1), "node2": (2, 0), "node3": (1, 0)})])
def test_cores_and_gpus_of_each_node(name: str, resources: dict[str, tuple[int, int]]) -> None:
    assert node_resources(records(slurm_output(name))) == resources


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:2", 2), ("gpu:a100:4(IDX:0-3)", 4), ("gpu:a100:4,gpu:v100:2(S:0-1),shard:8", 6),
    ("(null)", 0), ("", 0), ("gpu", 1), ("gres/gpu=3", 3), ("mps:100", 0)])
def test_gpus_are_counted_in_every_form(text: str, count: int) -> None:
    assert gpu_count(text) == count


def test_any_output_is_parsed() -> None:
    chance = random.Random(3)
    pieces = re.findall(r"\S+|\s+", slurm_output("job-het"))
    for _ in range(500):
        text = "".join(chance.choice(pieces) for _ in range(chance.randint(0, 60)))
        node_resources(records(text))
        table(text, ("a", "b"))
