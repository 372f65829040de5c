"""Slurm: what was allocated, and what its commands print. Recorded jobs, and lists compared with scontrol's own."""
from __future__ import annotations

import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from utils.schedulers import AllocationError, current_allocation
from utils.schedulers.slurm import expand_counts, expand_hostlist
from utils.schedulers.slurm_answers import SEPARATOR, gpu_count, node_resources, parse_duration, records, table

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "slurm"
ANSWERS = sorted(path.stem for path in (RECORDINGS / "answers").glob("*.json"))
SCONTROL = [name for name in ANSWERS if name.startswith("job-") or name in ("nodes", "partitions")]


def answer(name: str) -> str:
    """What a command of Slurm printed."""
    return str(json.loads((RECORDINGS / "answers" / f"{name}.json").read_text())["output"])


def environments(name: str) -> list[dict[str, str]]:
    """The environment of every process of a recorded job: the batch shell first."""
    path = RECORDINGS.parent / f"{name}.json" if "/" in name else RECORDINGS / f"{name}.json"
    return [process["environ"] for process in json.loads(path.read_text())["processes"]]


# What was allocated ---------------------------------------------------------------------------------------------------

ALLOCATED = {  # recorded job: hosts, ranks, GPUs and cores of each
    "sbatch_2x2_srun_no_accounting": (["node1", "node2"], [2, 2], [None, None], [2, 2]),
    "gpus_per_node_2x2": (["node1", "node2"], [2, 2], [2, 2], [2, 2]),
    "gpus_per_node_1task_per_node_torchrun": (["node1", "node2"], [1, 1], [2, 2], [2, 2]),
    "nodelist_1_2_4": (["node1", "node2", "node4"], [1, 1, 1], [None] * 3, [1, 1, 1]),
    "pbs_directives_in_sbatch": (["node1", "node2"], [3, 1], [None, None], [3, 1]),
    "exclusive_N2_only": (["node1", "node2"], [1, 1], [None, None], [4, 4]),
    "salloc_command_no_srun": (["node1", "node2"], [2, 2], [None, None], [2, 2]),
    "srun_step_smaller_than_job": (["node1", "node2"], [2, 2], [None, None], [2, 2]),
    "mpich_wheel_mpiexec": (["node1", "node2"], [2, 2], [None, None], [2, 2]),
    "gres_gpu_1task_srun_gpus_per_task_gt": (["node1"], [1], [2], [1]),
    "slurm-25.11/sbatch_2x2": (["node1", "node2"], [2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_exclusive": (["node1", "node2"], [1, 1], [None, None], [4, 4]),
    "slurm-25.11/salloc_2x2": (["node1", "node2"], [2, 2], [2, 2], [2, 2]),
    "slurm-25.11/sbatch_step_on_one_node": (["node1", "node2", "node3"], [2, 2, 2], [None] * 3, [2, 2, 2]),
    "slurm-25.11/salloc_het": (["node1", "node2", "node3"], [1, 2, 2], [None] * 3, [1, 2, 2]),
    "slurm-25.11/sbatch_het_gpus_per_task": (["node1", "node2", "node3"], [1, 2, 2], [None] * 3, [1, 2, 2]),
}


@pytest.mark.parametrize("name", ALLOCATED)
def test_every_process_of_a_job_knows_what_the_job_was_allocated(name: str) -> None:
    hosts, ranks, gpus, cores = ALLOCATED[name]
    for environ in environments(name):
        found = current_allocation(environ, ask=False)
        assert found is not None
        assert (found.scheduler, found.job_id) == ("slurm", environ["SLURM_JOB_ID"])
        assert [*found.hosts] == hosts
        assert [*found.ranks_per_host] == ranks
        assert [*found.gpus_per_host] == gpus
        assert [*found.cores_per_host] == cores


def test_a_requeued_job_counts_its_restarts() -> None:
    counts = {found.restart_count for environ in environments("requeue_external")
              if (found := current_allocation(environ, ask=False))}
    assert counts == {0, 1}


def test_an_element_of_an_array_knows_its_index() -> None:
    found = [current_allocation(environ, ask=False) for environ in environments("gres_gpu1_second_job_gets_device1")]
    assert {one.array_index for one in found if one} == {0, 1}


def test_outside_of_a_job_nothing_is_allocated() -> None:
    assert current_allocation({"PATH": "/bin"}) is None


def test_slurm_wins_where_its_plug_in_sets_variables_of_pbs_too() -> None:
    found = current_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PBS_JOBID": "7"}, ask=False)
    assert found is not None and found.scheduler == "slurm"


HETEROGENEOUS = {"SLURM_JOB_ID": "26", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1",
                 "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
                 "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
                 "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2",
                 "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)"}


def test_a_heterogeneous_job_has_the_hosts_of_all_components() -> None:
    found = current_allocation(HETEROGENEOUS, ask=False)
    assert found is not None
    assert (found.hosts, found.ranks_per_host) == (("node1", "node2", "node3"), (1, 2, 2))
    assert found.cores_per_host == (1, 2, 2)


def test_a_component_that_asked_for_no_tasks_has_one_on_each_node() -> None:
    whole_nodes = {name: value for name, value in HETEROGENEOUS.items() if "NTASKS" not in name}
    found = current_allocation({**whole_nodes, "SLURM_TASKS_PER_NODE_HET_GROUP_0": "4",
                                "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)"}, ask=False)  # its cores
    assert found is not None and found.ranks_per_host == (1, 1, 1)


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Let scontrol on PATH print a recorded answer."""
    (tmp_path / "answer").write_text(answer(name))
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncat "{tmp_path}/answer"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_scontrol_tells_the_gpus_that_the_variables_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked(monkeypatch, tmp_path, "job-het")
    found = current_allocation({**HETEROGENEOUS, "SLURM_JOB_ID": "36"})
    assert found is not None and found.gpus_per_host == (1, 0, 0)
    assert found.cores_per_host == (1, 2, 1)


def test_without_an_answer_of_scontrol_the_gpus_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = current_allocation(HETEROGENEOUS)
    assert found is not None and found.gpus_per_host == (None, None, None)
    assert found.seconds_left() is None


@pytest.mark.parametrize("change", [{"SLURM_JOB_NODELIST": "n[1-"}, {"SLURM_JOB_NODELIST": ""},
                                    {"SLURM_TASKS_PER_NODE": "2(x3)"}, {"SLURM_TASKS_PER_NODE": "two"},
                                    {"SLURM_RESTART_COUNT": "many"}, {"SLURM_GPUS_PER_NODE": "a100:"}])
def test_variables_that_contradict_each_other_are_an_error_that_names_the_job(change: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
               "SLURM_TASKS_PER_NODE": "2(x2)", **change}
    with pytest.raises(AllocationError, match="Slurm job 7"):
        current_allocation(environ, ask=False)


def test_any_variables_at_all_give_an_allocation_or_the_error() -> None:
    chance = random.Random(9)
    known = environments("srun_step_smaller_than_job")[-1]
    names = [name for name in [*known, *HETEROGENEOUS, "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS",
                               "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID"] if name.startswith("SLURM_")]
    values = ["", "2", "2(x2)", "node[1-3]", "a100:2", "-1", "\u00b2", "9" * 20, "9" * 5000]
    for _ in range(3000):
        environ = dict(chance.choice([known, HETEROGENEOUS]))
        for name in chance.sample(names, 3):
            environ[name] = mutated(chance, chance.choice(values))
        try:
            found = current_allocation(environ, ask=False)
        except AllocationError:
            continue
        if found is not None:
            assert len(found.hosts) == len(found.ranks_per_host) == len(found.gpus_per_host)
            assert min(found.ranks_per_host) >= 0 and min(count or 0 for count in found.gpus_per_host) >= 0


# Lists ----------------------------------------------------------------------------------------------------------------

def test_counts_per_node_are_expanded() -> None:
    assert expand_counts("2,1(x2),3") == [2, 1, 1, 3]


def test_any_counts_at_all_give_numbers_or_a_value_error() -> None:
    chance = random.Random(1)
    for _ in range(10000):
        text = "".join(chance.choice("0123,(x)9 -\n\u0663") for _ in range(chance.randint(0, 12)))
        try:
            counts = expand_counts(text)
        except ValueError as error:
            assert "counts per node" in str(error)
        else:
            assert counts and min(counts) >= 0


def random_list(chance: random.Random) -> str:
    """A node list that follows the grammar."""
    parts = []
    for _ in range(chance.randint(1, 4)):
        numbers = []
        for _ in range(chance.randint(1, 3)):
            first = chance.randint(0, 120)
            width = chance.choice([0, 0, 2, 3])
            numbers.append(f"{first:0{width}d}" + (f"-{first + chance.randint(0, 12):0{width}d}"
                                                   if chance.random() < 0.6 else ""))
        prefix = "".join(chance.choice(["n", "rack", "a-b", "gpu", "x9y"]) for _ in range(chance.randint(1, 2)))
        parts.append(chance.choice([prefix, f"{prefix}{chance.randint(0, 99)}", f"{prefix}[{','.join(numbers)}]",
                                    f"{prefix}[{','.join(numbers)}]", f"{prefix}[0-1]n[{','.join(numbers)}]",
                                    f"r[1-2]c[0,3]{prefix}[{','.join(numbers)}]"]))
    return ",".join(parts)


def mutated(chance: random.Random, text: str) -> str:
    """The same with a few characters changed, left out or put in."""
    letters = list(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(letters) + 1)
        letters[place:place + chance.randint(0, 1)] = chance.choice(["[", "]", ",", "-", "0", "9", "a", "", ".", "_"])
    return "".join(letters)


def expanded_by_slurm(scontrol: str, lists: list[str], together: int) -> dict[str, list[str]]:
    """What scontrol makes of each list that it knows. Several are asked for at once, with a mark between them."""
    found: dict[str, list[str]] = {}
    work = [lists[start:start + together] for start in range(0, len(lists), together)]
    while work:
        batch = work.pop()
        shown = subprocess.run([scontrol, "show", "hostnames", ",=,".join(batch)], capture_output=True, text=True,
                               timeout=20)
        groups: list[list[str]] = [[]]
        for host in shown.stdout.split():
            groups.append([]) if host == "=" else groups[-1].append(host)
        if shown.returncode == 0 and not shown.stderr and len(groups) == len(batch):
            found.update(zip(batch, groups, strict=True))
        elif len(batch) > 1:
            work += [batch[:len(batch) // 2], batch[len(batch) // 2:]]
    return found


def test_ten_thousand_node_lists_are_expanded_as_scontrol_does(scontrol: str) -> None:
    chance = random.Random(7)
    valid = [random_list(chance) for _ in range(9500)]
    ours = {text: expand_hostlist(text) for text in valid}
    assert expanded_by_slurm(scontrol, list(ours), 500) == ours

    for text in [mutated(chance, text) for text in valid[:500]]:
        try:
            ours[text] = expand_hostlist(text)
        except ValueError as error:
            assert "node list" in str(error)
    # Older versions know no text behind the last bracket.
    changed = [text for text in ours if text not in valid and not re.search(r"\][^][,]+(,|$)", text)]
    slurm = expanded_by_slurm(scontrol, changed, 8)
    assert len(slurm) > 0.9 * len(changed) > 100  # scontrol itself refuses the others
    assert {text: hosts for text, hosts in slurm.items() if ours[text] != hosts} == {}


# What commands print --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SCONTROL)
def test_nothing_that_scontrol_printed_is_lost(name: str) -> None:
    """Every field is there with its value, and nothing but blanks is left of the text without them."""
    left = answer(name)
    for record in records(left):
        for field, value in record.items():
            if field == "Nodes" and "CPU_IDs" in value:
                for line in value.split("\n"):
                    left = left.replace(line, "", 1)
                continue
            assert f"{field}={value}" in left, (field, value)
            left = left.replace(f"{field}={value}", "", 1)
    assert left.split() == []


def test_a_name_that_looks_like_fields_stays_a_name() -> None:
    [job] = records(answer("job-odd-name"))
    assert job["JobName"] == 'odd | name  with "quotes" \'and\' \\ JobState=COMPLETED #é😀'
    assert (job["JobState"], job["Reason"], job["StdOut"]) == ("RUNNING", "None", "/cluster/log of 33.out")


def test_a_line_break_in_a_name_stays_in_it() -> None:
    [job] = records(answer("job-newline"))
    assert (job["JobName"], job["JobState"]) == ("two\nlines", "PENDING")


def test_the_elements_of_an_array_are_records_of_their_own() -> None:
    assert [job["ArrayTaskId"] for job in records(answer("job-array"))] == ["2-5%2", "1", "0"]


def test_the_nodes_and_partitions_are_all_there() -> None:
    assert [node["NodeName"] for node in records(answer("nodes"))] == ["node1", "node2", "node3", "node4"]
    assert [(part["PartitionName"], part["MaxTime"]) for part in records(answer("partitions"))] == [
        ("main", "UNLIMITED"), ("short", "00:10:00")]


def test_the_resources_of_each_node_of_a_job_are_found() -> None:
    assert node_resources(records(answer("job-details"))) == {"node1": (1, 1), "node2": (1, 1)}
    assert node_resources(records(answer("job-het"))) == {"node1": (1, 1), "node2": (2, 0), "node3": (1, 0)}


@pytest.mark.parametrize("name", ["squeue", "sinfo", "sacct"])
def test_nothing_of_a_table_is_lost(name: str) -> None:
    text = answer(name)
    columns = [str(number) for number in range(len(text.split("\n")[0].split(SEPARATOR)))]
    assert "\n".join(SEPARATOR.join(row.values()) for row in table(text, columns)) + "\n" == text


def test_names_with_bars_blanks_and_line_breaks_come_through_squeue() -> None:
    names = [row["name"] for row in table(answer("squeue"), ("id", "state", "partition", "name", "reason", "nodes"))]
    assert 'odd | name  with "quotes" \'and\' \\ JobState=COMPLETED #é😀' in names
    assert "two\nlines" in names


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:2", 2), ("gpu:a100:4(IDX:0-3)", 4), ("gpu:a100:4,gpu:v100:2(S:0-1),shard:8", 6), ("(null)", 0), ("", 0),
    ("gpu", 1), ("gres/gpu=3", 3), ("mps:100", 0)])
def test_gpus_are_counted_in_every_form(text: str, count: int) -> None:
    assert gpu_count(text) == count


@pytest.mark.parametrize(("text", "seconds"), [
    ("1-02:03:04", 93784), ("02:03:04", 7384), ("03:04", 184), ("0:07", 7), ("infinite", None), ("UNLIMITED", None),
    ("NOT_SET", None), ("", None)])
def test_durations_are_read(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_any_text_at_all_is_parsed_without_an_exception() -> None:
    chance = random.Random(3)
    pieces = re.findall(r"\S+|\s+", answer("job-het"))
    for _ in range(500):
        text = "".join(chance.choice(pieces) for _ in range(chance.randint(0, 60)))
        node_resources(records(text))
        table(text, ("a", "b"))
