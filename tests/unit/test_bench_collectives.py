"""bench collectives: definitions of nccl-tests, checks, and slow links."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.unit.programs import python
from utils.tools.bench import bench_cli as cli
from utils.tools.bench import collective_operations as operations
from utils.tools.bench import host_pairs, links
from utils.tools.bench.collective_bench import Sweep

EVERY_OPERATION = """
from utils import setup_distributed
from utils.tools.bench.collective_operations import OPERATIONS, Participants
with setup_distributed("gloo") as dist:
    ranks = Participants(dist.rank, dist.world_size, dist.device)
    for name, kind in OPERATIONS.items():
        operation = kind(ranks, 1000)
        assert operation.count_wrong() == 0, name
        run = operation.run
        def spoil():
            run()
            operation.output[-3:] += 1
        operation.run = spoil
        assert operation.count_wrong() == 3, name
    print("checked", flush=True)
"""


@pytest.mark.parametrize("hosts", range(2, 10))
def test_every_pair_meets_once_and_no_host_has_two_partners(hosts: int) -> None:
    rounds = host_pairs.rounds(hosts)
    assert sorted(pair for pairs_ in rounds for pair in pairs_) == [(a, b) for a in range(hosts)
                                                                   for b in range(a + 1, hosts)]
    for pairs_ in rounds:
        partners = [host for pair in pairs_ for host in pair]
        assert len(partners) == len(set(partners))


def test_slow_link_and_slow_host_are_told_apart() -> None:
    choose = random.Random(1)
    for number in range(40):
        bandwidths = {(a, b): choose.uniform(0.9, 1.1) for b in range(8) for a in range(b)}
        link = choose.choice(list(bandwidths))
        for pair in bandwidths:
            if pair == link or number % 2 and link[0] in pair:
                bandwidths[pair] /= 4
        expected = ([link[0]], []) if number % 2 else ([], [link])
        assert host_pairs.find_slow(bandwidths) == expected
    names = [f"n{i}" for i in range(3)]
    said = host_pairs.describe({(0, 1): 1e9, (0, 2): 1e9, (1, 2): 0.25e9}, names)
    assert said.startswith("the link n1 - n2 is 4.0 times slower than the rest; both hosts are")
    assert host_pairs.describe({(0, 1): 1e9}, names).startswith("No slow link among 1: the median is 1 GB/s")


def test_links_are_fitted_to_a_ring() -> None:
    def seconds(size: int, ranks: int) -> float:
        return 2 * (ranks - 1) * 20e-6 + 2 * (ranks - 1) / ranks * size / 5e9

    found = links.fit([(size, seconds(size, 8)) for size in (1 << 10, 1 << 16, 1 << 25)], 8)
    assert found.latency_seconds == pytest.approx(20e-6)
    assert found.bandwidth_bytes_per_second == pytest.approx(5e9)


def test_the_largest_size_is_measured() -> None:
    assert list(Sweep(1 << 10, 1 << 25, 1).sizes()) == [*(1 << 10 + 2 * step for step in range(8)), 1 << 25]
    assert list(Sweep(8, 8, 1).sizes()) == [8] and list(Sweep(8, 32, 1).sizes()) == [8, 32]


def test_percentiles_are_by_nearest_rank() -> None:
    assert [operations.percentile(range(1, 21), percent) for percent in (50, 95, 99)] == [10, 19, 20]


def test_wrong_elements_are_counted() -> None:
    done = python("-c", EVERY_OPERATION, ranks=3, warm=True)
    assert done.returncode == 0 and "checked" in done.stdout, done.stderr


def test_table_of_each_operation_once_json_and_links(tmp_path: Path) -> None:
    saved, measured = tmp_path / "new" / "results.json", tmp_path / "other" / "links.json"
    done = python("utils", "bench", "collectives", "-b", "1000", "-e", "60K", "--iters", "3", "--output", str(saved),
                  "--links", str(measured), *operations.OPERATIONS, "all_gather", ranks=2, warm=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("all_reduce reaches ")
    assert last.endswith("all results are correct.")
    found = json.loads(saved.read_text())
    rows = {(row["operation"], row["size_bytes"]): row for row in found["results"]}
    assert len(found["results"]) == len(rows) == 3 * 4 and ("reduce_scatter", 60 << 10) in rows
    for name, factor in {"all_reduce": 1, "all_gather": 0.5, "reduce_scatter": 0.5}.items():
        row = rows[name, 16000]
        assert row["algorithm_bandwidth"] == pytest.approx(16000 / row["seconds"])
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"]) and row["wrong"] == 0
    assert (found["backend"], found["ranks"], found["hosts"]) == ("gloo", 2, 1)
    links_found = json.loads(measured.read_text())
    assert links_found["inside"]["bandwidth_bytes_per_second"] > 0 and links_found["between"] is None
    assert (links_found["format"], links_found["backend"], links_found["hosts"]) == (1, "gloo", 1)


def test_one_rank_is_refused(one_rank: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collectives"]) == 2
    assert "Expected at least two: start them with a launcher" in capfd.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["collectives", "--iters", "0"], "expected 0 < -b <= -e"),
    (["collectives", "-b", "8", "-e", "4"], "expected 0 < -b <= -e"),
    (["ddp", "--steps", "0", "x.py"], "expected --batch"),
    (["ddp", "--batch", "0", "x.py"], "expected --batch")])
def test_numbers_out_of_range_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "ignored"), [
    (["--pairs", "all_reduce"], "OPERATION"), (["--pairs", "-b", "8"], "--minbytes"),
    (["--pairs", "--png", "x.png", "--links", "x.json"], "--png, --links")])
def test_option_that_pairs_would_ignore_is_an_error(
        words: list[str], ignored: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["collectives", *words])
    assert f"and ignores {ignored}. Leave that out" in capsys.readouterr().err
