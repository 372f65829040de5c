"""How often to save: Young's and Daly's formula, and the same steps on all ranks."""
from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.faults.programs import run_ranks
from utils.checkpoint import Checkpointer
from utils.checkpoint.interval import best_interval

PROGRAM = """\
import sys, time, torch
from utils import setup_distributed
from utils.checkpoint import Checkpointer
with setup_distributed("gloo") as dist, Checkpointer(sys.argv[1], every="auto", mtbf_hours=0.01) as checkpoints:
    state, saved = {"weight": torch.ones(1000)}, []
    for step in range(1, 401):
        time.sleep(0.002 + 0.004 * (dist.rank == 1))
        if checkpoints.is_due(step):
            time.sleep(0.05 * dist.rank)
            checkpoints.save(step, state)
            saved.append(step)
    print(f"rank {dist.rank} saved {saved}", flush=True)
"""


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """Expected share of the time that is lost where times to failures are exponential and restarts take no time."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval - 1


@pytest.mark.parametrize(("cost", "mtbf"), [(0.1, 86400), (30.0, 86400), (60.0, 3600), (600.0, 7200), (50.0, 20.0)])
def test_interval_loses_least(cost: float, mtbf: float) -> None:
    found = best_interval(cost, mtbf)
    least = min(lost_share(found * factor / 50, cost, mtbf) for factor in range(5, 500))
    assert lost_share(found, cost, mtbf) <= least * 1.01
    assert cost > 1 or found == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.01)  # Young


def test_all_ranks_save_after_the_same_steps_and_rank_0_says_how_often(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    output = run_ranks(tmp_path, str(tmp_path / "program.py"), (3, [str(tmp_path / "saved")]))
    saved = re.findall(r"rank \d saved (.*)", output)
    assert len(saved) == 3 and len(set(saved)) == 1, output
    steps = [int(step) for step in re.findall(r"\d+", saved[0])]
    assert steps[:2] == [51, 101] and len(steps) > 2, output
    assert re.search(r"a checkpoint every \d+ steps, \d+ s: a save adds 0\.\d+ s, a failure", output)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9]), ("auto", [])])
def test_steps_that_are_due(every: int | str, steps: list[int], tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=every) as checkpoints:
        assert [step for step in range(1, 10) if checkpoints.is_due(step)] == steps


@pytest.mark.parametrize("arguments", [{"every": 0}, {"every": "often"}, {"every": "auto", "mtbf_hours": 0}])
def test_what_is_refused(arguments: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a number of steps or"):
        Checkpointer(tmp_path, **arguments)
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(ValueError, match="every="):
        checkpoints.is_due(1)
