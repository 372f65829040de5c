"""A training that goes wrong without an error is reported, with rank and remedy; a right one never is."""
from __future__ import annotations

import json

import pytest

from tests.faults.mistakes import HEALTHY, MISTAKES
from tests.unit.programs import python


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What two ranks have said about each scenario."""
    done = python("tests/faults/mistakes.py", ranks=2)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(said: dict[str, list[str]], name: str) -> None:
    assert any(MISTAKES[name][1] in message for message in said[name]), said[name]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_training_is_no_mistake(said: dict[str, list[str]], name: str) -> None:
    assert not said[name]


LOSS = """\
import torch
from utils import setup_distributed
from utils.metrics import Metrics
with setup_distributed("gloo") as job, Metrics(job) as metrics:
    for step in range(1, 11):
        bad = step in (7, 9) and job.rank == 1
        metrics.log(step, loss=torch.tensor(float("inf") if bad else 1.0), accuracy=torch.tensor(0.5))
"""


def test_a_loss_that_is_not_finite_is_reported_once_with_step_and_rank() -> None:
    done = python("-c", LOSS, ranks=2)
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert done.returncode == 0 and len(errors) == 1, done.stderr
    assert "loss of step 7 is not finite on rank 1." in errors[0]
