"""The allocations of Slurm and PBS, as recorded from real jobs."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, pbs_job, pbs_recording, slurm_output
from utils.job import current_job
from utils.job.commands import SchedulerError, decode
from utils.job.pbs_job import objects
from utils.tools.schedulers import current_allocation
from utils.tools.schedulers.allocation import Allocation, AllocationError
from utils.tools.schedulers.pbs_allocation import chunk_resources, read_nodefile
from utils.tools.schedulers.slurm_allocation import enter_job, gpu_count


def allocation(environ: dict[str, str], *, query: bool = False) -> Allocation:
    found = current_allocation(environ, query=query)
    assert found is not None
    return found


def seconds_left(environ: dict[str, str]) -> float | None:
    job = current_job(environ)
    assert job is not None
    return job.seconds_left()


# Slurm ------------------------------------------------------------------------------------------------------------

def environments(name: str) -> list[dict[str, str]]:
    """The environment of every process of a recorded job: the batch shell first."""
    path = RECORDINGS / (name if "/" in name else f"slurm/{name}")
    recording = json.loads(path.with_name(f"{path.name}.json").read_text())
    return [process["environ"] for process in recording["processes"]]


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


def test_restarts_and_the_plug_in_for_pbs_scripts_are_known() -> None:
    requeued = environments("requeue_external")
    assert {allocation(environ).restart_count for environ in requeued} == {0, 1}

    assert current_allocation({"PATH": "/bin"}) is None
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PBS_JOBID": "7"}
    assert allocation(environ).scheduler == "slurm"


HETEROGENEOUS = environments("slurm-25.11/sbatch_het_gpus_per_task")[0]


def test_commands_report_what_the_variables_lack(commands: Commands) -> None:
    whole_nodes = {name: value for name, value in HETEROGENEOUS.items() if "NTASKS" not in name}
    assert allocation(whole_nodes).ranks_per_host == (1, 1, 1)  # a component without tasks has one on each node
    found = allocation(HETEROGENEOUS, query=True)
    assert (found.gpus_per_host, seconds_left(HETEROGENEOUS)) == ((None, None, None), None)

    commands.add("scontrol", slurm_output("job-het"))
    commands.add("squeue", "20 5:00\n36 1-00:00:10\n")
    environ = {**HETEROGENEOUS, "SLURM_JOB_ID": "36"}
    found = allocation(environ, query=True)
    assert (found.gpus_per_host, found.cores_per_host) == ((1, 0, 0), (1, 2, 1))
    assert seconds_left(environ) == 86410


@pytest.mark.parametrize(("name", "value"), [
    ("SLURM_JOB_NODELIST", "n[1-"), ("SLURM_JOB_NODELIST", ""), ("SLURM_TASKS_PER_NODE", "2(x3)"),
    ("SLURM_TASKS_PER_NODE", "two"), ("SLURM_RESTART_COUNT", "many")])
def test_contradicting_variables_are_an_error(name: str, value: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
               "SLURM_TASKS_PER_NODE": "2(x2)", name: value}
    with pytest.raises(AllocationError, match="Slurm job 7"):
        current_allocation(environ, query=False)


def test_variables_of_a_job_that_is_held_elsewhere(commands: Commands) -> None:
    commands.add("scontrol", slurm_output("job-odd-name"))
    job_id = slurm_output("job-odd-name").partition("JobId=")[2].split()[0]
    outside = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "PBS_JOBID": "1", "A": "1"}
    found = enter_job(job_id, outside)
    assert {name: found.get(name) for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_OVERLAP", "A")} == {
        "SLURM_CONF": "/c", "SLURM_JOB_ID": job_id, "SLURM_OVERLAP": "1", "A": "1"}
    assert "PBS_JOBID" not in found and "SLURM_STEP_ID" not in found
    assert allocation(found).hosts == ("node1", "node2")

    commands.add("scontrol", slurm_output("job-never"))
    with pytest.raises(AllocationError, match="is not known|is PENDING"):
        enter_job("33", {})
    with pytest.raises(AllocationError, match="ddpkit launch --jobid 13"):
        current_allocation({"SLURM_JOB_ID": "13"})


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:2", 2), ("gpu:a100:4(IDX:0-3)", 4), ("gpu:a100:4,gpu:v100:2(S:0-1),shard:8", 6), ("(null)", 0), ("", 0),
    ("gpu", 1), ("gres/gpu=3", 3), ("mps:100", 0)])
def test_gpus_are_counted_in_every_form(text: str, count: int) -> None:
    assert gpu_count(text) == count


# PBS --------------------------------------------------------------------------------------------------------------

PLACED: dict[str, tuple[str, list[int | None], list[int]]] = {  # recorded job: hosts, GPUs and cores of each
    "sel_2x_ncpus2_mpiprocs2": ("n1.pbs.lab", [None], [4]),
    "sel_2x_mpiprocs0": ("n1.pbs.lab n2", [None, None], [2, 2]),
    "sel_uneven_scatter": ("n1.pbs.lab n2.pbs.lab", [None, None], [1, 2]),
    "sel_2x_ncpus4_mpiprocs4_ngpus4": ("n1.pbs.lab n2.pbs.lab", [4, 4], [4, 4]),
    "sel_2x_ncpus2_ngpus2": ("n1.pbs.lab", [4], [4]),
    "sel_2x_mpiprocs_gt_ncpus": ("n1.pbs.lab n2.pbs.lab", [None, None], [1, 1]),
    "sel_3x_mixed_scatter": ("n1.pbs.lab n2.pbs.lab n3.pbs.lab", [None, None, None], [2, 2, 1]),
}
NOTES = {  # recorded job whose chunks share a host, unlike those with place=pack
    "sel_2x_ncpus2": "all 2 chunks of select=2:ncpus=2 on one host, n1", "sel_uneven": "all 2 chunks",
    "sel_2x_pack": "", "sel_2x_scatter": "", "sel_1x_ncpus2": "", "sel_nodes_ppn": "", "nodefile_interleaved": ""}
SELECTS = sorted(path.stem for path in (RECORDINGS / "pbs" / "select").glob("*.json"))


def recorded_job(commands: Commands, name: str, **changes: Any) -> tuple[dict[str, str], list[str]]:
    """The environment and node file of a recorded job, with qstat as it was then."""
    recording = pbs_recording(f"select/{name}")
    seen = json.loads(recording["output"])
    nodefile = commands.folder / "nodefile"
    nodefile.write_text("".join(f"{line}\n" for line in seen["nodefile"]))
    record = {**recording["final"], "job_state": "R", **changes}
    commands.add("qstat", pbs_job(record, recording["jobid"]))
    return {**seen["env"], "PBS_NODEFILE": str(nodefile)}, seen["nodefile"]


@pytest.mark.parametrize("name", SELECTS)
def test_a_job_knows_where_pbs_placed_it(commands: Commands, name: str) -> None:
    environ, lines = recorded_job(commands, name)
    found = allocation(environ, query=True)
    exec_host = pbs_recording(f"select/{name}")["final"]["exec_host"]
    hosts = list(dict.fromkeys(part.split("/")[0] for part in exec_host.split("+")))
    assert [host.split(".")[0] for host in found.hosts] == hosts
    assert [lines.count(host) for host in found.hosts] == [*found.ranks_per_host]
    assert sum(found.ranks_per_host) == len(lines)
    assert (found.scheduler, found.restart_count) == ("pbs", 0)
    if name in PLACED:
        counts = [*found.gpus_per_host], [*found.cores_per_host]
        assert (" ".join(found.hosts), *counts) == PLACED[name]
    if name in NOTES:
        assert NOTES[name] in "".join(found.notes) and len(found.notes) == bool(NOTES[name])


def test_without_qstat_or_the_node_file_the_other_is_enough_and_restarts_are_known(commands: Commands) -> None:
    # The recorded start is long ago and does not count.
    used = {"resources_used": {"walltime": "00:00:30"}, "run_count": 3}
    environ, _ = recorded_job(commands, "sel_2x_scatter", **used)
    assert (allocation(environ, query=True).restart_count, seconds_left(environ)) == (2, 90)
    environ, _ = recorded_job(commands, "sel_uneven_scatter")
    without = {name: value for name, value in environ.items() if name != "PBS_NODEFILE"}  # as under pbsdsh
    found = allocation(without, query=True)
    assert (found.hosts, found.cores_per_host) == (("n1", "n2"), (1, 2))

    commands.add("qstat", status=255)
    found = allocation(environ, query=True)
    assert (found.hosts, found.ranks_per_host) == (("n1.pbs.lab", "n2.pbs.lab"), (1, 2))
    assert found.gpus_per_host == (None, None)
    assert found.restart_count is seconds_left(environ) is None


@pytest.mark.parametrize("path", ["/nowhere/nodefile", ""])
def test_a_job_without_a_host_is_an_error(commands: Commands, path: str) -> None:
    with pytest.raises(AllocationError, match="PBS job 7.server"):
        current_allocation({"PBS_JOBID": "7.server", "PBS_NODEFILE": path})


@pytest.mark.parametrize(("lines", "hosts"), [
    (["n1.pbs.lab", "n2", "n1", "", " N1.pbs.lab \n"], [("n1.pbs.lab", 3), ("n2", 1)]),
    (["n1.a.org", "n1.b.org"], [("n1.a.org", 1), ("n1.b.org", 1)]),
    (["10.0.0.1", "10.0.0.2", "fe80::1"], [("10.0.0.1", 1), ("10.0.0.2", 1), ("fe80::1", 1)])])
def test_full_and_short_names_are_one_host(lines: list[str], hosts: list[tuple[str, int]]) -> None:
    assert [(host.name, host.lines) for host in read_nodefile(lines).all] == hosts


@pytest.mark.parametrize("name", ["nums", "latin1", "ctrl"])
def test_a_job_with_odd_values_is_read(name: str) -> None:
    text = decode((RECORDINGS / "pbs" / "commands" / f"qstat_json_{name}.raw.txt").read_bytes())
    [job] = objects(text, "Jobs").values()
    assert job["job_state"] == "H"
    if name == "nums":  # PBS before 2024 prints the value of A=007 as 007
        [job] = objects(text.replace('"A":\t7,', '"A":\t007,'), "Jobs").values()
        names = ("A", "B", "C", "F", "G", "L", "M")
        assert [job[f"Variable_List.{name}"] for name in names] == [
            "007", "100000", "1.2345678901234567e+19", "0x10", "true", ".5", "5"]


@pytest.mark.parametrize("text", ["", "Connection refused", "[1]", '{"Jobs": {"1": 2}}'])
def test_output_of_another_form_is_an_error(text: str) -> None:
    with pytest.raises(SchedulerError, match="Expected a JSON object of Jobs"):
        objects(text, "Jobs")


def test_chunks_match_hosts_where_vnodes_have_other_names() -> None:
    vnodes = "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1)"
    assert chunk_resources("n1/0*2+n2/0", vnodes) == [("n1", {"ncpus": 2, "ngpus": 1}), ("n2", {"ncpus": 2})]
