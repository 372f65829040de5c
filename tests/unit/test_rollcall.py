"""How rank 0 judges the cards of all ranks."""
from __future__ import annotations

import json
from typing import Any

import pytest

from utils import rollcall
from utils.launchers import Placement
from utils.rollcall import Card, judge, ranges


def card(host: str = "n1", **changes: Any) -> Card:
    return {"host": host, "boot": "b", "pid": 1, "launcher": "mpich", "local_rank": None, "local_world_size": None,
            "cores": "f", "host_cores": 4, "notes": [], "backend": "gloo", "devices": [],
            "mask": "no device mask is set", "torch": "2.13.0", "kit": "0.1.0", "gloo": "", "gloo_loopback": False,
            **changes}


def gpus(host: str, *devices: str, **changes: Any) -> Card:
    return card(host, backend="nccl", devices=list(devices), mask="CUDA_VISIBLE_DEVICES=0", **changes)


def accepted(cards: list[Card]) -> list[dict[str, Any]]:
    wrong, replies = judge(cards)
    assert wrong is None
    assert len(replies) == len(cards)
    return replies


def refused(cards: list[Card]) -> str:
    wrong, replies = judge(cards)
    assert wrong is not None and replies == []
    return wrong


def threads(*cores: str) -> list[int]:
    return [reply["threads"] for reply in accepted([card(cores=mask, host_cores=8) for mask in cores])]


# What is refused -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("what", "other"), [("torch", "2.6.0"), ("kit", "0.2.0"), ("launcher", "openmpi"),
                                             ("backend", "nccl")])
def test_ranks_that_differ_are_refused_with_a_table_of_values_and_hosts(what: str, other: str) -> None:
    wrong = refused([card("n1"), card("n1"), card("n2", **{what: other})])
    assert f"differ in {what}" in wrong
    assert f"{other}: 1 ranks, the first is rank 2 on n2" in wrong
    assert f"{card()[what]}: 2 ranks, the first is rank 0 on n1" in wrong


def test_two_ranks_on_one_gpu_are_refused_with_a_table_of_their_host() -> None:
    wrong = refused([gpus("n1", "GPU-a"), gpus("n2", "GPU-b", local_rank=0, local_world_size=2),
                     gpus("n2", "GPU-b", local_rank=1, local_world_size=2)])
    assert "several ranks on n2 hold one GPU" in wrong
    for rank in (1, 2):
        assert f"rank {rank} (local rank {rank - 1}): index 0 = GPU-b, CUDA_VISIBLE_DEVICES=0" in wrong
    assert "GPU-a" not in wrong


def test_the_same_gpu_name_on_two_hosts_is_two_gpus() -> None:
    accepted([gpus("n1", "0"), gpus("n2", "0")])


def test_two_ranks_on_one_gpu_are_noticed_also_where_the_launcher_tells_no_local_rank() -> None:
    assert "several ranks on n1 hold one GPU" in refused([gpus("n1", "GPU-a"), gpus("n1", "GPU-a")])


def test_one_visible_gpu_is_everybodys_own() -> None:
    assert [reply["device"] for reply in accepted([gpus("n1", f"GPU-{index}") for index in range(4)])] == [0] * 4


@pytest.mark.parametrize("seen", [3, 8])
def test_of_as_many_gpus_as_ranks_or_more_each_rank_takes_that_of_its_local_rank(seen: int) -> None:
    cards = [gpus("n1", *(f"GPU-{index}" for index in range(seen))) for _ in range(3)]
    assert [reply["device"] for reply in accepted(cards)] == [0, 1, 2]


def test_fewer_gpus_than_ranks_are_refused_naming_rank_counts_and_mask() -> None:
    wrong = refused([gpus("n1", "GPU-0", "GPU-1") for _ in range(3)])
    for part in ("local rank 0", "sees 2 GPUs for 3 ranks", "CUDA_VISIBLE_DEVICES=0"):
        assert part in wrong


def test_ranks_on_cpus_have_no_device_index() -> None:
    assert accepted([card()])[0]["device"] is None


def test_many_ranks_on_the_cpu_share_no_gpu() -> None:
    accepted([card(), card(), card()])


def test_the_loopback_interface_for_gloo_is_refused_on_several_hosts_only() -> None:
    loopback = {"gloo": "lo", "gloo_loopback": True}
    accepted([card("n1", **loopback), card("n1", **loopback)])
    assert "rank 1 on n2 has GLOO_SOCKET_IFNAME=lo" in refused([card("n1"), card("n2", **loopback)])


# Ranks of hosts ------------------------------------------------------------------------------------------------------

def places(hosts: str, **changes: Any) -> list[tuple[int, int, int]]:
    replies = accepted([card(host, **changes) for host in hosts])
    assert {reply["num_nodes"] for reply in replies} == {len(set(hosts))}
    return [(reply["node_rank"], reply["local_rank"], reply["local_world_size"]) for reply in replies]


def test_local_ranks_count_the_ranks_of_a_host_where_the_launcher_says_none() -> None:
    assert places("aabb") == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


def test_hosts_that_take_turns_are_counted_by_their_lowest_rank() -> None:
    assert places("baba") == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    assert places("abbcbb") == [(0, 0, 1), (1, 0, 4), (1, 1, 4), (2, 0, 1), (1, 2, 4), (1, 3, 4)]


def test_what_the_launcher_says_of_local_ranks_is_kept_also_out_of_order() -> None:
    said = [(1, 2), (0, 2)]
    replies = accepted([card(local_rank=rank, local_world_size=size) for rank, size in said])
    assert [(reply["local_rank"], reply["local_world_size"]) for reply in replies] == said


def test_a_host_on_which_one_rank_was_told_nothing_is_counted_for_all() -> None:
    replies = accepted([card(local_rank=1, local_world_size=2), card()])
    assert [reply["local_rank"] for reply in replies] == [0, 1]


def test_containers_with_one_name_on_two_machines_are_two_hosts() -> None:
    replies = accepted([card("localhost", boot="x"), card("localhost", boot="y")])
    assert [reply["node_rank"] for reply in replies] == [0, 1]


def test_two_containers_with_two_names_on_one_machine_are_two_hosts() -> None:
    assert accepted([card("a"), card("b")])[1]["num_nodes"] == 2


# Threads -------------------------------------------------------------------------------------------------------------

def test_ranks_on_the_same_cores_share_them() -> None:
    assert threads("ff", "ff") == [4, 4]
    assert threads("ff", "ff", "ff") == [2, 2, 2]


def test_ranks_on_cores_of_their_own_use_them_all() -> None:
    assert threads("f", "f0") == [4, 4]
    assert threads("1", "fe") == [1, 7]


def test_ranks_on_overlapping_cores_share_the_common_ones() -> None:
    assert threads("f", "3c") == [3, 3]


def test_a_rank_never_gets_less_than_one_thread() -> None:
    assert threads("1", "1", "1") == [1, 1, 1]


def test_ranks_of_another_host_take_no_cores_away() -> None:
    assert [reply["threads"] for reply in accepted([card("a"), card("b"), card("b")])] == [4, 2, 2]


def test_the_threads_of_a_host_are_never_more_than_its_cores() -> None:
    for count in range(1, 40):
        shares = threads(*["ffffffff"] * count)
        assert sum(shares) <= max(32, count) and min(shares) >= 1


# Notes and the table -------------------------------------------------------------------------------------------------

def test_a_note_tells_that_all_ranks_of_a_host_sit_on_one_core() -> None:
    (note,) = accepted([card("a"), card("b", cores="4"), card("b", cores="4")])[0]["notes"]
    assert "all 2 ranks of b may run on core 2 only, of 4" in note


@pytest.mark.parametrize("cores", [("1",), ("1", "2"), ("3", "3")])
def test_there_is_no_such_note_for_one_rank_or_different_cores(cores: tuple[str, ...]) -> None:
    assert accepted([card(cores=mask) for mask in cores])[0]["notes"] == []


def test_there_is_no_such_note_on_a_host_with_one_core() -> None:
    assert accepted([card(cores="1", host_cores=1)] * 2)[0]["notes"] == []


def test_a_note_of_many_ranks_is_told_once_with_their_number() -> None:
    assert accepted([card(notes=["RANK=7 was ignored"])] * 3)[0]["notes"] == ["RANK=7 was ignored (3 ranks)"]


def test_of_many_different_notes_three_are_told() -> None:
    notes = accepted([card(notes=[f"note {rank}"]) for rank in range(10)])[0]["notes"]
    assert notes[:3] == ["note 0", "note 1", "note 2"] and "7 more" in notes[3] and len(notes) == 4


def test_the_table_has_a_row_for_each_host_with_ranks_device_cores_and_threads() -> None:
    lines = accepted([card("login", cores="ff"), card("node17", cores="3"), card("login", cores="ff")])[0]["table"]
    assert [line.split() for line in lines.splitlines()] == [
        ["host", "ranks", "device", "cores/rank", "threads"], ["login", "0,2", "cpu", "8", "4"],
        ["node17", "1", "cpu", "2", "2"]]


def test_the_table_of_many_hosts_shows_sixteen_and_counts_the_others() -> None:
    table = accepted([card(f"n{number}") for number in range(40)])[0]["table"]
    assert len(table.splitlines()) == 1 + 16 + 1 and table.endswith("... and 24 more hosts")
    exact = accepted([card(f"n{number}") for number in range(16)])[0]["table"]
    assert len(exact.splitlines()) == 1 + 16


@pytest.mark.parametrize(("ranks", "text"), [([], ""), ([3], "3"), ([1, 2, 3, 7], "1-3,7"), ([0, 2, 4], "0,2,4"),
                                             ([0, 1], "0-1")])
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


def test_a_long_list_of_ranks_is_cut() -> None:
    assert ranges(list(range(0, 100, 2))).endswith("38 ...")


def test_a_card_survives_json_and_carries_the_placement() -> None:
    one = rollcall.card(Placement("slurm", 3, 8, 1, 4, ("note",)), devices=[], error="no GPU")
    assert json.loads(json.dumps(one)) == one
    assert (one["launcher"], one["local_rank"], one["local_world_size"], one["notes"], one["error"]) == (
        "slurm", 1, 4, ["note"], "no GPU")
    assert int(one["cores"], 16) > 0


def test_four_thousand_ranks_are_judged_in_no_time() -> None:
    accepted([card(f"n{rank // 8}", notes=[f"note {rank}"]) for rank in range(4000)])


# Several agents of torchrun on one host ------------------------------------------------------------------------------

def agent_card(local_rank: int, *devices: str) -> Card:
    """A rank of an agent with two workers."""
    return gpus("n1", *devices, launcher="torchrun", local_rank=local_rank, local_world_size=2)


def test_two_agents_on_one_host_share_its_local_ranks() -> None:
    replies = accepted([card(launcher="torchrun", local_rank=rank % 2, local_world_size=2) for rank in range(4)])
    assert [(one["local_rank"], one["local_world_size"], one["num_nodes"]) for one in replies] == [
        (rank, 4, 1) for rank in range(4)]


@pytest.mark.parametrize(("masks", "expected"), [
    ((["a", "b"], ["c", "d"]), [0, 1, 0, 1]), ((["a", "b", "c", "d"], ["a", "b", "c", "d"]), [0, 1, 2, 3])])
def test_two_agents_on_one_host_hold_a_gpu_for_each_rank(masks: tuple[list[str], ...], expected: list[int]) -> None:
    replies = accepted([agent_card(rank % 2, *masks[rank // 2]) for rank in range(4)])
    assert [one["device"] for one in replies] == expected


def test_two_agents_on_one_host_with_one_mask_of_two_gpus_are_refused() -> None:
    assert "sees 2 GPUs for 4 ranks" in refused([agent_card(rank % 2, "a", "b") for rank in range(4)])
