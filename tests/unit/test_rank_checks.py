"""Per-rank start-up reports, and what rank 0 finds out from them."""
from __future__ import annotations

import json
from typing import Any

import pytest

from utils.launchers import LaunchError, Placement
from utils.rendezvous.checks import (
    Assignment,
    CheckResult,
    RankReport,
    check_reports,
    make_report,
    ranges,
)


def report(host: str = "n1", **changes: Any) -> RankReport:
    made = make_report(Placement("mpich", 0, 1, None, None), backend="gloo", torch_version="2.13.0",
                       kit_version="0.1.0", device_masks="no device mask is set")
    known = {"host": host, "boot_id": "b", "cores": "f", "host_cores": 4, "omp_num_threads": ""}
    return made | known | changes  # type: ignore[return-value]


def gpus(host: str, *devices: str, **changes: Any) -> RankReport:
    return report(host, **{"backend": "nccl", "devices": list(devices),
                           "device_masks": "CUDA_VISIBLE_DEVICES=0", **changes})


def check(*reports: RankReport) -> CheckResult:
    return check_reports(reports)


def refusal(*reports: RankReport) -> str:
    with pytest.raises(LaunchError) as caught:
        check_reports(reports)
    return str(caught.value)


def values(field: str, *reports: RankReport) -> list[Any]:
    return [assignment[field] for assignment in check(*reports).assignments]  # type: ignore[literal-required]


# What is refused ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("field", "name", "other"), [
    ("torch_version", "torch version", "2.6.0"), ("kit_version", "kit version", "0.2.0"),
    ("launcher", "launcher", "openmpi"), ("backend", "backend", "nccl")])
def test_ranks_that_differ_are_shown_in_a_table(field: str, name: str, other: str) -> None:
    text = refusal(report("n1"), report("n1"), report("n2", **{field: other}))
    assert f"differ in {name}" in text
    assert f"{other}: 1 ranks, the first is rank 2 on n2" in text
    assert f"{report()[field]}: 2 ranks, the first is rank 0 on n1" in text  # type: ignore[literal-required]


def test_two_ranks_on_one_gpu_are_shown_in_a_table() -> None:
    text = refusal(gpus("n1", "GPU-a"), *(
        gpus("n2", "GPU-b", local_rank=rank, local_world_size=2) for rank in range(2)))
    assert "several ranks on n2 use the same GPU" in text and "GPU-a" not in text
    for rank in (1, 2):
        assert (f"rank {rank} (local rank {rank - 1}): index 0 = GPU-b, CUDA_VISIBLE_DEVICES=0"
                in text)


def test_two_ranks_on_one_gpu_without_local_ranks() -> None:
    assert "several ranks on n1 use the same GPU" in refusal(gpus("n1", "GPU-a"), gpus("n1", "GPU-a"))


def test_fewer_gpus_than_ranks_are_refused() -> None:
    text = refusal(*[gpus("n1", "GPU-0", "GPU-1")] * 3)
    for part in ("local rank 0", "sees 2 GPUs for 3 ranks", "CUDA_VISIBLE_DEVICES=0"):
        assert part in text


def test_loopback_for_gloo_is_refused_on_several_hosts_only() -> None:
    check(*[report("n1", gloo_interfaces="lo")] * 2)
    text = refusal(report("n1"), report("n2", gloo_interfaces="eth0,lo"))
    assert "rank 1 on n2 has GLOO_SOCKET_IFNAME=eth0,lo" in text


# Devices -----------------------------------------------------------------------------------------

EIGHT = [f"GPU-{index}" for index in range(8)]


@pytest.mark.parametrize(("devices", "expected"), [
    ([EIGHT[:1], EIGHT[1:2], EIGHT[2:3]], [0, 0, 0]),
    ([EIGHT[:3]] * 3, [0, 1, 2]),
    ([EIGHT] * 3, [0, 1, 2]),
    ([[], []], [None, None])], ids=["one each", "as many as ranks", "more than ranks", "CPU"])
def test_device_of_a_rank(devices: list[list[str]], expected: list[int | None]) -> None:
    assert values("device_index", *(gpus("n1", *visible) for visible in devices)) == expected


def test_one_gpu_name_on_two_hosts_is_two_gpus() -> None:
    assert values("device_index", gpus("n1", "0"), gpus("n2", "0")) == [0, 0]


# Hosts and local ranks ---------------------------------------------------------------------------

@pytest.mark.parametrize(("hosts", "expected"), [
    ("aabb", [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]),
    ("baba", [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]),
    ("abbcbb", [(0, 0, 1), (1, 0, 4), (1, 1, 4), (2, 0, 1), (1, 2, 4), (1, 3, 4)])])
def test_local_ranks_are_counted_per_host(hosts: str, expected: list[tuple[int, ...]]) -> None:
    found: list[Assignment] = check(*map(report, hosts)).assignments
    assert [(one["node_rank"], one["local_rank"], one["local_world_size"])
            for one in found] == expected
    assert {one["num_nodes"] for one in found} == {len(set(hosts))}


@pytest.mark.parametrize(("reported", "expected"), [
    ([(1, 2), (0, 2)], [1, 0]), ([(1, 2), (None, None)], [0, 1])], ids=["kept", "incomplete"])
def test_local_ranks_of_the_launcher(reported: list[tuple[int, int]], expected: list[int]) -> None:
    reports = [report(local_rank=rank, local_world_size=size) for rank, size in reported]
    assert values("local_rank", *reports) == expected
    assert values("local_world_size", *reports) == [2, 2]


def test_host_names_and_boot_ids_tell_hosts_apart() -> None:
    localhosts = report("localhost", boot_id="x"), report("localhost", boot_id="y")
    assert values("node_rank", *localhosts) == [0, 1]
    assert values("num_nodes", report("a"), report("b")) == [2, 2]


# Several agents of torchrun on one host ----------------------------------------------------------

def agents_report(rank: int, *devices: str) -> RankReport:
    """The report of a rank of two agents with two workers each."""
    return gpus("n1", *devices, launcher="torchrun", local_rank=rank % 2, local_world_size=2)


def test_two_agents_on_one_host_share_its_local_ranks() -> None:
    reports = [agents_report(rank) for rank in range(4)]
    assert values("local_rank", *reports) == [0, 1, 2, 3]
    assert values("local_world_size", *reports) == [4] * 4
    assert values("num_nodes", *reports) == [1] * 4


@pytest.mark.parametrize(("masks", "expected"), [
    (("ab", "cd"), [0, 1, 0, 1]), (("abcd", "abcd"), [0, 1, 2, 3])])
def test_two_agents_on_one_host_hold_a_gpu_per_rank(masks: tuple[str, str],
                                                    expected: list[int]) -> None:
    reports = [agents_report(rank, *masks[rank // 2]) for rank in range(4)]
    assert values("device_index", *reports) == expected


def test_two_agents_on_one_host_with_one_mask_are_refused() -> None:
    reports = [agents_report(rank, "a", "b") for rank in range(4)]
    assert "sees 2 GPUs for 4 ranks" in refusal(*reports)


# Threads -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("masks", "expected"), [
    (["ff", "ff"], [4, 4]), (["ff"] * 3, [2, 2, 2]), (["f", "f0"], [4, 4]), (["1", "fe"], [1, 7]),
    (["f", "3c"], [3, 3]), (["1"] * 3, [1, 1, 1])])
def test_threads_share_the_cores(masks: list[str], expected: list[int]) -> None:
    assert values("threads", *(report(cores=mask) for mask in masks)) == expected


def test_threads_are_shared_within_a_host_only() -> None:
    assert values("threads", report("a"), report("b"), report("b")) == [4, 2, 2]


def test_threads_of_a_host_never_exceed_its_cores() -> None:
    for count in range(1, 40):
        threads = values("threads", *[report(cores="ffffffff")] * count)
        assert sum(threads) <= max(32, count) and min(threads) >= 1


# Notes and the table -----------------------------------------------------------------------------

def test_all_ranks_of_a_host_on_one_core_are_noted() -> None:
    (note,) = check(report("a"), report("b", cores="4"), report("b", cores="4")).notes
    assert "all 2 ranks of b may run on core 2 only, of 4" in note


@pytest.mark.parametrize(("masks", "host_cores"), [
    (["1"], 4), (["1", "2"], 4), (["3", "3"], 4), (["1", "1"], 1)])
def test_other_core_masks_are_not_noted(masks: list[str], host_cores: int) -> None:
    assert check(*(report(cores=mask, host_cores=host_cores) for mask in masks)).notes == []


def test_equal_notes_are_counted_and_different_ones_cut() -> None:
    assert check(*[report(notes=["RANK=7 was ignored"])] * 3).notes == [
        "RANK=7 was ignored (3 ranks)"]
    notes = check(*(report(notes=[f"note {rank}"]) for rank in range(10))).notes
    assert notes[:3] == ["note 0", "note 1", "note 2"] and "7 more" in notes[3] and len(notes) == 4


def test_table_has_one_row_per_host() -> None:
    table = check(report("login", cores="ff"), report("node17", cores="3"),
                  report("login", cores="ff")).table
    assert [line.split() for line in table.splitlines()] == [
        ["host", "ranks", "device", "cores/rank", "threads"], ["login", "0,2", "cpu", "8", "4"],
        ["node17", "1", "cpu", "2", "2"]]


@pytest.mark.parametrize(("hosts", "lines", "last"), [(40, 18, "... and 24 more hosts"),
                                                      (16, 17, "4")])
def test_table_of_many_hosts_is_cut(hosts: int, lines: int, last: str) -> None:
    table = check(*(report(f"n{number}") for number in range(hosts))).table
    assert len(table.splitlines()) == lines and table.endswith(last)


@pytest.mark.parametrize(("ranks", "text"), [
    ([], ""), ([3], "3"), ([1, 2, 3, 7], "1-3,7"), ([0, 2, 4], "0,2,4"), ([0, 1], "0-1"),
    ([*range(0, 100, 2)], ",".join(map(str, range(0, 40, 2))) + " ...")])
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


def test_report_survives_json_and_carries_the_placement() -> None:
    one = make_report(Placement("slurm", 3, 8, 1, 4, ("note",)), error="no GPU")
    assert json.loads(json.dumps(one)) == one
    assert (one["launcher"], one["local_rank"], one["local_world_size"], one["notes"],
            one["error"]) == ("slurm", 1, 4, ["note"], "no GPU")
    assert int(one["cores"], 16) > 0


def test_four_thousand_ranks_are_checked() -> None:
    check(*(report(f"n{rank // 8}", notes=[f"note {rank}"]) for rank in range(4000)))
