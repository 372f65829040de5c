"""Which rank is slow: in numbers, and in a training on four ranks."""
from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.faults.programs import run_ranks
from utils.tools.bench import charts
from utils.training.step_timer import StepTimer, append, describe_slowest, split

HOSTS = ["h1", "h1", "h2", "h2", "h3", "h3"]


def measured(slow_rank: int | None, milliseconds: float = 6.0) -> list[list[float]]:
    """Steps of 20 ms, plus what the slow rank needs; data of 1 ms; the others wait for the slow one in exchange."""
    longer = 0.0 if slow_rank is None else milliseconds / 1e3
    return [[0.020 + longer, 0.001, 0.010 + longer * (rank != slow_rank)] for rank in range(len(HOSTS))]


def test_time_beyond_the_shortest_exchange_is_waiting() -> None:
    times = split(measured(4), HOSTS)
    assert [round(1e3 * one.waiting) for one in times] == [6, 6, 6, 6, 0, 6]
    assert [round(1e3 * one.work) for one in times] == [20, 20, 20, 20, 26, 20]


@pytest.mark.parametrize(("steps", "hosts", "share", "expected"), [
    (measured(4), HOSTS, 0.2, "rank 4 on h3 is slow: it works 26.0 ms in each step (data 1.0, computation 25.0), the "
                              "median of the other hosts is 20.0 ms"),
    (measured(4), HOSTS, 0.4, ""), (measured(None), HOSTS, 0.2, ""), (measured(None)[:1], ["h1"], 0.2, ""),
    (measured(4), ["h1"] * 6, 0.2, "rank 4 on h1 is slow")])
def test_slowest_host_or_rank_of_a_host_is_named(
        steps: list[list[float]], hosts: list[str], share: float, expected: str) -> None:
    found = describe_slowest(split(steps, hosts), share)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_file_has_a_line_for_each_rank_and_comparison_and_is_drawn(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (100, 200):
        append(str(tmp_path / "steps.csv"), step, split(measured(4), HOSTS))
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [(row["step"], row["rank"]) for row in rows] == [(step, str(rank)) for step in ("100", "200")
                                                           for rank in range(6)]
    pytest.importorskip("matplotlib")
    assert charts.main([str(tmp_path / "steps.csv")]) == 0
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert charts.main([str(tmp_path / "other.csv")]) == 2
    assert "other.csv has no step times. Expected the file of a StepTimer" in capsys.readouterr().err


PROGRAM = """\
import sys, time, torch, torch.distributed
from utils import setup_distributed
from utils.training.step_timer import StepTimer
with setup_distributed("gloo") as dist:
    timer = StepTimer(dist, every=10)
    for step in timer.batches(range(20)):
        time.sleep(0.03 if dist.rank == 2 else 0.01)
        with timer.exchange():
            torch.distributed.all_reduce(torch.ones(4))
"""


def test_slow_rank_of_a_training_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = run_ranks(tmp_path, str(program), (4, []))
    assert "steps 1 to 10: rank 2 on " in output and "steps 11 to 20: rank 2 on " in output, output


def test_times_of_a_gpu_are_means_over_the_steps_that_were_measured(tmp_path: Path) -> None:
    """Every eighth step, of windows of ten: two steps of the first and one of the second."""
    dist = SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu"))
    timer = StepTimer(dist, every=10, file=str(tmp_path / "steps.csv"))
    timer._sample = 8
    for _ in timer.batches(range(20)):
        time.sleep(0.01)
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [0.009 < float(row["computation"]) < 0.018 for row in rows] == [True, True], rows
