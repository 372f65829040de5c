"""A training that goes wrong without an error is reported, with rank and remedy; a right one never is."""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.faults import mistakes
from tests.faults.mistakes import HEALTHY, MISTAKES, UNNOTICED
from tests.faults.programs import run_ranks
from tests.unit.programs import python


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What two ranks have said about each scenario."""
    output = run_ranks(tmp_path_factory.mktemp("said"), mistakes.__file__, (2, []))
    [line] = [line for line in output.splitlines() if line.startswith('{"ddp_forgotten')]
    return json.loads(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(said: dict[str, list[str]], name: str) -> None:
    assert any(MISTAKES[name][1] in message for message in said[name]), said[name]


@pytest.mark.parametrize("name", UNNOTICED)
def test_what_is_not_noticed_is_documented(said: dict[str, list[str]], name: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert not said[name] and UNNOTICED[name][1] in pages


@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_training_is_no_mistake(said: dict[str, list[str]], name: str) -> None:
    assert not said[name]


SEARCH = """\
import sys, threading
from torch import nn
from utils.consistency import comparison
sys.setswitchinterval(1e-5)
model, done = nn.Linear(2, 2), threading.Event()
def search():
    for _ in range(20):
        assert "weight differs" in comparison.describe_divergence("differs", model.weight).text
    done.set()
threading.Thread(target=search, daemon=True).start()
while not done.is_set():
    tuple(number for number in range(50))
"""


def test_a_tuple_that_is_built_during_the_search_for_a_cause() -> None:
    """Of all objects of the process: it raised SystemError in the training."""
    done = python("-c", SEARCH)
    assert done.returncode == 0, done.stderr


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


UNEQUAL = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(100, 50))
for step in range(5 - 2 * dist.get_rank()):
    model(torch.randn(4, 100)).sum().backward()
{then}
dist.destroy_process_group()
"""
TWO_RANKS = [str(ROOT / "scripts" / "launch.py"), "--launcher", "local", "-n", "2", "--hang-timeout", "5"]


@pytest.mark.parametrize(("then", "expected"), [
    ("dist.all_reduce(torch.zeros(1))",  # such as of a metric
     r"ddpkit launch: rank 1 on \S+ was aborted by gloo \(SIGABRT, exit status 134\): rank 0 (waits|was) in .* at "
     r"\S+train\.py, line 7, in <module>, and rank 1 entered another, smaller collective\. Different numbers of "
     r"batches on the ranks do this: use drop_last=True or DistributedDataParallel\.join\(\)\. .*"),
    ("dist.barrier()",  # without data: gloo aborts nothing
     r"ddpkit launch: rank 0 on \S+ \(pid \d+\) entered a different collective (\d+): all_reduce of \[\[5050\]\] at "
     r"\S+train\.py, line 7, in <module>; rank 1 on \S+ \(pid \d+\) entered a different collective \1: barrier at "
     r"\S+train\.py, line 8, in <module>\. .* Different numbers of batches on the ranks do this, too: .*")])
def test_unequal_batches_before_another_collective(tmp_path: Path, then: str, expected: str) -> None:
    (tmp_path / "train.py").write_text(UNEQUAL.format(then=then))
    done = python(*TWO_RANKS, "train.py", cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == (134 if "all_reduce" in then else 1) and re.fullmatch(expected, last), done.stderr


STATE = """\
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from utils import setup_distributed
from utils.checkpoint import Checkpointer
from utils.data import resumable_loader
with setup_distributed("gloo") as job, Checkpointer(sys.argv[1]) as checkpoints:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(other.parameters())]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    loader = resumable_loader(TensorDataset(torch.ones(8, 2)), job, 2)
    for (inputs,) in loader:
        model(inputs).sum().backward()
        for one in (*optimizers, schedule):
            one.step()
    state = {"model": model, "optimizer": optimizers[0]}
    if sys.argv[2] == "all":
        state |= {"second": [optimizers[1]], "schedule": schedule, "loader": loader}
    if sys.argv[2] == "plain":
        state = {"all": [one.state_dict() for one in (model, *optimizers, schedule)], "loader": loader}
    checkpoints.save_and_wait(1, state)
"""


@pytest.mark.parametrize(("state", "said"), [
    ("part", "lacks the learning-rate scheduler of SGD, the optimizer Adam, the ResumableDataLoader:"), ("all", ""),
    ("plain", "")])
def test_what_the_saved_state_lacks_is_named(state: str, said: str, tmp_path: Path) -> None:
    done = python("-c", STATE, str(tmp_path), state)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert done.returncode == 0 and len(warnings) == bool(said) and all(said in line for line in warnings), done.stderr
