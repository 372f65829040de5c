"""Per-rank start-up reports, and what rank 0 finds out from them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from utils.launchers import LaunchError, Placement
from utils.ranges import name_ranks
from utils.startup.reports import RankReport, check_reports, make_report


def report(host: str = "n1", **changes: Any) -> RankReport:
    made = make_report(Placement("mpich", 0, 1, None, None), backend="gloo", torch_version="2.13.0")
    known = {"host": host, "boot_id": "b", "cores": "f", "host_cores": 4, "topology": "", "binding": "",
             "omp_num_threads": "", "openmp_binding": ""}
    return made | known | changes


def gpus(host: str, *devices: str, **changes: Any) -> RankReport:
    return report(host, **{"backend": "nccl", "devices": list(devices), "device_nodes": [None] * len(devices),
                           "device_masks": "CUDA_VISIBLE_DEVICES=0", **changes})


def two_agents(*masks: str) -> list[RankReport]:
    """Two agents of torchrun with two workers each on one host; the GPUs that each agent sees."""
    return [gpus("n1", *masks[rank // 2], launcher="torchrun", local_rank=rank % 2, local_world_size=2)
            for rank in range(4)]


def bound(*masks: str, **changes: Any) -> list[RankReport]:
    return [report(cores=mask, **changes) for mask in masks]


# Two NUMA nodes of two cores with two threads; GPU 0 is on node 1, GPU 1 on node 0.
TWO_NODES = "0:0+4,1+5;1:2+6,3+7"


def two_gpus(*masks: str, **changes: Any) -> list[RankReport]:
    """Ranks of a host with two GPUs; its topology comes from local rank 0 only."""
    return [gpus("n1", "a", "b", **{"cores": mask, "local_rank": rank, "local_world_size": len(masks), "host_cores": 8,
                                    "device_nodes": [1, 0], "topology": "" if rank else TWO_NODES, **changes})
            for rank, mask in enumerate(masks)]


ASSIGNED: dict[str, tuple[Sequence[RankReport], dict[str, list[int | None]]]] = {
    "uneven hosts in any order": ([report(host) for host in "abbcbb"], {
        "node_rank": [0, 1, 1, 2, 1, 1], "local_rank": [0, 0, 1, 0, 2, 3],
        "local_world_size": [1, 4, 4, 1, 4, 4], "num_nodes": [3] * 6, "threads": [4, 1, 1, 4, 1, 1]}),
    "two processes below each rank of launch.py": (
        [report(launch_rank=text) for text in ("0/2", "0/2", "1/2", "1/2")], {"local_rank": [0, 1, 2, 3]}),
    "two hosts with one name": (
        [report("localhost", boot_id="x"), report("localhost", boot_id="y")], {"node_rank": [0, 1]}),
    "local ranks of the launcher": (
        [report(local_rank=rank, local_world_size=2) for rank in (1, 0)], {"local_rank": [1, 0]}),
    "one GPU each": ([gpus("n1", name) for name in "abc"], {"device_index": [0, 0, 0]}),
    "more GPUs than ranks": ([gpus("n1", *"abcdefgh")] * 3, {"device_index": [0, 1, 2]}),
    "one GPU name on two hosts": ([gpus("n1", "0"), gpus("n2", "0")], {"device_index": [0, 0]}),
    "two agents on one host": (two_agents("", ""), {
        "local_rank": [0, 1, 2, 3], "local_world_size": [4] * 4, "num_nodes": [1] * 4}),
    "two agents with their own GPUs": (two_agents("ab", "cd"), {"device_index": [0, 1, 0, 1]}),
    "two agents with the same GPUs": (two_agents("abcd", "abcd"), {"device_index": [0, 1, 2, 3]}),
    "three ranks on 8 cores": (bound("ff", "ff", "ff"), {"threads": [2, 2, 2]}),
    "three ranks on 2 cores": (bound("3", "3", "3"), {"threads": [1, 1, 1]}),
    "cores of their own": (bound("1", "fe"), {"threads": [1, 7]}),
    "cores partly shared": (bound("f", "3c"), {"threads": [3, 3]}),
}


@pytest.mark.parametrize(("reports", "expected"), ASSIGNED.values(), ids=ASSIGNED)
def test_assignments(reports: Sequence[RankReport], expected: dict[str, list[int | None]]) -> None:
    found = check_reports(reports).assignments
    assert {field: [one[field] for one in found] for field in expected} == expected


REFUSED: dict[str, tuple[Sequence[RankReport], list[str]]] = {
    "a part of the ranks of launch.py": ([report(launch_rank="1/4", launcher="torchrun")] * 2, [
        "torchrun has started a group of 2 ranks below rank 1 of ddpkit launch, which started 4 ranks",
        "Expected one group of all 4", "--independent"]),
    **{name: ([report("n1"), report("n1"), report("n2", **{field: other})], [
        f"differ in {name}", f"{other}: 1 ranks, the first is rank 2 on n2", ": 2 ranks, the first is rank 0 on n1"])
       for field, name, other in [
           ("torch_version", "torch version", "2.6.0"), ("kit_version", "kit version", "0.2.0"),
           ("launcher", "launcher", "openmpi"), ("backend", "backend", "nccl")]},
    "two ranks on one GPU": (
        [gpus("n1", "GPU-a"), *(gpus("n2", "GPU-b", local_rank=rank, local_world_size=2) for rank in (0, 1))],
        ["several ranks on n2 use the same GPU", "rank 2 (local rank 1): index 0 = GPU-b, CUDA_VISIBLE_DEVICES=0"]),
    "fewer GPUs than ranks": (
        [gpus("n1", "GPU-0", "GPU-1")] * 3, ["local rank 0", "sees 2 GPUs for 3 ranks", "CUDA_VISIBLE_DEVICES=0"]),
    "two agents with too few GPUs": (two_agents("ab", "ab"), ["sees 2 GPUs for 4 ranks"]),
    **{f"DDPKIT_CPU_BIND={binding}": (two_gpus("ff", "ff", binding=binding), [message]) for binding, message in [
        ("cores", "DDPKIT_CPU_BIND is 'cores'. Expected"),
        ("list:0", "has CPUs for 1 local ranks, but there is a local rank 1")]},
    "loopback for gloo": (
        [report("n1"), report("n2", gloo_interfaces="eth0,lo")], ["rank 1 on n2 has GLOO_SOCKET_IFNAME=eth0,lo"]),
}


@pytest.mark.parametrize(("reports", "parts"), REFUSED.values(), ids=REFUSED)
def test_ranks_that_cannot_train_together_are_refused(reports: Sequence[RankReport], parts: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        check_reports(reports)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("reports", "notes"), [
    ([report("a"), *bound("4", "4", host="b")], ["all 2 ranks of b may run on core 2 only, of 4"]),
    (bound("1"), []), (bound("1", "2"), []), (bound("3", "3"), []), (bound("1", "1", host_cores=1), []),
    ([report(gloo_interfaces="lo")] * 2, []),
    (bound("11", "11", host_cores=8, topology="0:0+4,1+5,2+6,3+7"), ["all 2 ranks of n1 may run on core 0,4 only"]),
    (bound("33", "33", host_cores=8, topology="0:0+4,1+5,2+6,3+7"), []),
    (bound("1", "1", openmp_binding="OMP_PLACES=cores"), [
        "all 2 ranks of n1 may run on core 0 only, of 4. Unset OMP_PLACES=cores, which binds them"]),
    (bound("1", "2", openmp_binding="OMP_PROC_BIND=close"), [
        "OMP_PROC_BIND=close binds each rank when torch is imported: rank 0 on n1 and its DataLoader "]),
    (bound("1", "2", openmp_binding="OMP_PROC_BIND=close", binding="none"), []),
    *((reports, []) for reports in (two_gpus("ff", "ff"), two_gpus("c", "3"), two_gpus("3", "c", bind=False))),
    (two_gpus("3", "c"), [
        "rank 0 on n1 runs on CPUs 0-1 of NUMA node 0, but its GPU is on node 1 (2 ranks of this host are far from "
        "their GPU). Request the whole host and start with --cpu-bind=none"]),
    (two_gpus("33", "33"), [
        "rank 0 on n1 runs on CPUs 0-1,4-5 of NUMA node 0, but its GPU is on node 1. Request the whole host"]),
    (two_gpus("ff", "ff", binding="list:0:1"), [
        "rank 0 on n1 runs on CPUs 0 of NUMA node 0, but its GPU is on node 1. Correct or unset DDPKIT_CPU_BIND"]),
    (two_gpus("4", "1", binding="list:2,6:0"), [
        "DDPKIT_CPU_BIND gives CPUs 2,6 to rank 0 on n1, which may run on 2 only; it runs on 2. Request whole nodes"]),
    ([report(notes=["RANK=7 was ignored"])] * 3, ["RANK=7 was ignored (3 ranks)"]),
    ([report(notes=[f"note {rank}"]) for rank in range(10)], ["note 0", "note 1", "note 2", "... and 7 more"])])
def test_notes_for_the_user(reports: Sequence[RankReport], notes: list[str]) -> None:
    found = check_reports(reports).notes
    assert len(found) == len(notes) and all(map(str.startswith, found, notes)), found


@pytest.mark.parametrize(("reports", "cpus", "threads"), [
    pytest.param(two_gpus("ff", "ff"), ["2-3,6-7", "0-1,4-5"], [2, 2], id="beside the GPUs"),
    pytest.param(two_gpus("ff", "ff")[::-1], ["0-1,4-5", "2-3,6-7"], [2, 2], id="by local rank"),
    pytest.param(two_gpus("f", "f"), ["2-3", "0-1"], [2, 2], id="without the second threads"),
    pytest.param(two_gpus("3", "c"), ["", ""], [2, 2], id="bound by the launcher"),
    pytest.param(two_gpus("ff", "ff", bind=False), ["", ""], [4, 4], id="not to be bound"),
    pytest.param(two_gpus("ff", "ff", topology=""), ["", ""], [4, 4], id="unknown topology"),
    pytest.param([gpus("n1", cores="ff", topology=TWO_NODES)] * 4, [""] * 4, [1] * 4, id="a core each"),
    pytest.param([gpus("n1", cores="ff", topology=TWO_NODES)] * 2, ["0-1,4-5", "2-3,6-7"], [2] * 2, id="no GPU"),
    pytest.param(two_gpus("ff", "ff", binding="list:2:0-1"), ["2", "0-1"], [1, 2], id="as given"),
    pytest.param(two_gpus("f", "f", binding="list:2,6:0-1,4-5"), ["2", "0-1"], [1, 2], id="as given, in the mask"),
    pytest.param(two_gpus("ff", "ff", binding="list:2:3", topology=""), ["2", "3"], [1, 1], id="as given only")])
@pytest.mark.parametrize("launcher", ["slurm", "pals", "openmpi", "mpich", "torchrun", "environment"])
def test_ranks_of_a_host_get_the_same_cores_from_every_launcher(
        launcher: str, reports: Sequence[RankReport], cpus: list[str], threads: list[int]) -> None:
    found = check_reports([{**one, "launcher": launcher} for one in reports]).assignments
    assert [one["cpus"] for one in found] == cpus
    assert [one["threads"] for one in found] == threads


@pytest.mark.parametrize(("reports", "lines"), [
    ([report("login", cores="ff"), report("node17", cores="3"), report("login", cores="ff")],
     ["login 0,2 cpu 8 ? 4", "node17 1 cpu 2 ? 2"]),
    (two_gpus("ff", "ff"), ["n1 0-1 cuda:0,cuda:1 2 1,0 2", "CPUs of ranks 0-1: 2-3,6-7:0-1,4-5"])])
def test_table_has_one_row_per_host(reports: Sequence[RankReport], lines: list[str]) -> None:
    table = check_reports(reports).table
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "host ranks device cores/rank NUMA threads", *lines]


def test_long_lists_are_cut() -> None:
    table = check_reports([report(f"n{number}") for number in range(40)]).table
    assert len(table.splitlines()) == 18 and table.endswith("... and 24 more hosts")
    assert name_ranks([1, 2, 3, 7]) == "ranks 1-3,7" and name_ranks([5]) == "rank 5"
    assert name_ranks(range(0, 100, 2)) == "ranks " + ",".join(map(str, range(0, 40, 2))) + " ..."


def test_number_of_threads_that_a_rank_was_given_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert make_report(Placement("mpich", 0, 1, None, None))["omp_num_threads"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert make_report(Placement("mpich", 0, 1, None, None))["omp_num_threads"] == ""
