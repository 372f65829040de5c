"""bench.py ddp names planted causes."""
from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.programs import ROOT, python
from utils.tools.bench import bench_cli as cli
from utils.tools.bench import scaling, worker
from utils.tools.bench.trials import Trials
from utils.tools.bench.worker import Phase, TrialReport

TRAINING = "tests/bench/training.py"
HEALTHY = TrialReport(host="h1", passes=1, exchanges=1, backend="nccl", whole_seconds=0.02, gradient_bytes=100 << 20,
                 phases={"sync": Phase(1.0, 0, 10), "local": Phase(0.9, 0, 10)})


def reports(seconds: float = 0.1, local: float = 0.09, **changes: object) -> list[TrialReport]:
    """Return the reports of four ranks on two hosts with a step of `seconds`, `local` without communication."""
    phases = {"sync": Phase(seconds * 10, 0, 10), "local": Phase(local * 10, 0, 10)}
    return [dataclasses.replace(HEALTHY, **{"host": f"h{rank // 2 + 1}", "phases": phases, **changes})  # type: ignore[arg-type]
            for rank in range(4)]


def weak_scaling(found: list[TrialReport], one_rank: float = 0.09) -> scaling.MeasuredPoint:
    return scaling.split("weak", 2, found, scaling.split("weak", 1, reports(one_rank)[:1], None))


def first_cause(found: list[TrialReport]) -> str:
    return next((cause.name for cause in scaling.find_causes(weak_scaling(found))), "")


def test_healthy_training_has_no_cause_and_its_efficiency_counts_backward_passes() -> None:
    point = weak_scaling(reports(), 0.095)
    assert scaling.find_causes(point) == []
    assert scaling.explain(point, []) == ("95% efficiency (weak scaling) on 4 ranks, computing 90% of the time: "
                                          "no problem found.")
    assert scaling.explain(weak_scaling(reports(), 1.0), []).endswith("or with more --steps.")
    assert weak_scaling(reports(0.2, passes=2), 0.1).efficiency == pytest.approx(1)


def test_causes_by_their_evidence() -> None:
    assert first_cause(reports(0.09, 0.01, whole_seconds=0.08)) == "too small a micro-batch"
    waiting = {"sync": Phase(1, 0.5, 10), "local": Phase(0.9, 0.5, 10)}
    assert first_cause(reports(phases=waiting)) == "data wait"
    slow = reports(0.2)
    slow[2] = dataclasses.replace(slow[2], phases={"sync": Phase(2, 0, 10), "local": Phase(1.9, 0, 10)})
    assert first_cause(slow) == "one slow rank"


SEVERAL_MODELS = """
import os, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
def hook(name, bucket):
    os.write(1, f"{name} {step}\\n".encode())
    return allreduce_hook(None, bucket)
step, models = 0, {"G": DDP(torch.nn.Linear(4, 4)), "D": DDP(torch.nn.Linear(4, 1))}
generator, discriminator = models.values()
for name, model in models.items():
    model.register_comm_hook(name, hook)
optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (discriminator, generator)]
while True:
    fake = generator(torch.ones(2, 4))
    (discriminator(torch.ones(2, 4)) - discriminator(fake.detach())).mean().backward()
    optimizers[0].step()
    step += 1
    discriminator(fake).mean().backward()
    optimizers[1].step()
"""


def run_worker(script: str, folder: Path, world_size: int) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run rank 0 of a trial; return what it printed, and its report, {} without one."""
    path = folder / "script.py"
    path.write_text(script)
    phases = [("sync", 2), ("local", 3), ("sync", 2)]  # with 2 settling steps before each
    trial = json.dumps(dataclasses.asdict(worker.Trial(phases)))
    done = python("-m", "utils.tools.bench.worker", trial, str(path), warm=True, env={
        "RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    found = re.search(f"^{worker.RESULT}(.*)$", done.stdout, re.MULTILINE)
    return done, json.loads(found[1])[0] if found else {}


def test_all_models_of_a_script_are_measured(tmp_path: Path) -> None:
    done, found = run_worker(SEVERAL_MODELS, tmp_path, 1)
    assert found, done.stderr
    exchanges = {tuple(line.split()) for line in done.stdout.splitlines() if line[:1] in ("G", "D")}
    # A local step begins in the backward pass after the first optimizer of the step before.
    for name, first in {"G": 10, "D": 9}.items():
        steps = {int(step) for model, step in exchanges if model == name}
        assert steps.isdisjoint(range(first, 14)) and steps.issuperset({*range(1, 9), 15, 16}), exchanges
    assert (found["passes"], found["exchanges"]) == (2, 2)
    assert found["gradient_bytes"] == 4 * (20 + 5)


SLOW_RANK = """
import time, torch, torch.distributed as dist
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer, step = torch.optim.SGD(model.parameters(), 0.01), 0
while True:
    loss = model(torch.ones(2, 4)).mean()
    time.sleep(0.15 if dist.get_rank() else 0.05)
    loss.backward()
    optimizer.step()
    mean, step = loss.detach().clone(), step + 1
    if step % 3 == 0:
        all_reduce(mean)
    elif step % 3 == 1:
        dist.all_reduce(mean, async_op=True).wait()
    else:
        dist.all_gather_object([None] * dist.get_world_size(), step)
"""


def test_slow_rank_is_found_although_the_script_waits_for_it(tmp_path: Path) -> None:
    script, table = tmp_path / "script.py", tmp_path / "table.json"
    script.write_text(SLOW_RANK)
    done = python("utils", "bench", "ddp", "--full-only", "--steps", "3", "--output", str(table), "-n", "2",
                  str(script))
    assert re.search(r"% efficiency \(weak scaling\) on 2 ranks", done.stdout), done.stdout + done.stderr
    points = json.loads(table.read_text())["points"]
    assert [point["ranks"] for point in points] == [1, 2] and points[1]["step"] > 0
    found = re.search(r"^1\. one slow rank.* Rank 1 on .* computes (\S+) ms .* median rank (\S+) ms", done.stdout,
                      re.MULTILINE)
    assert found, done.stdout + done.stderr
    assert float(found[1]) >= 150 and 50 <= float(found[2]) < 80  # one call with its wait: 83


WITHOUT_DDP = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_need_ddp_but_one_rank_trains_without(tmp_path: Path, ranks: int) -> None:
    done, found = run_worker(WITHOUT_DDP, tmp_path, ranks)
    if ranks > 1:
        assert "the script has created no DistributedDataParallel" in done.stderr and not found
        return
    assert found, done.stderr
    assert (found["passes"], found["exchanges"], found["gradient_bytes"]) == (1, 0, 0)
    assert found["phases"]["local"]["steps"] == 3


class FakeTrials(Trials):
    """Trials that take no time, on hosts with these numbers of ranks."""

    def __init__(self, *ranks_of_hosts: int) -> None:
        self.batches: list[tuple[int, int]] = []
        self._ranks_of_hosts, self.world_size = ranks_of_hosts, sum(ranks_of_hosts)

    def run(self, ranks: int, batch: int, phases: Sequence[tuple[str, int]]) -> list[TrialReport]:
        self.batches.append((ranks, batch))
        return [HEALTHY] * ranks


def bench_ddp(monkeypatch: pytest.MonkeyPatch, trials: FakeTrials, *words: str) -> list[tuple[int, int]]:
    """Run `bench ddp` with such trials; return ranks and batch of each."""
    monkeypatch.setattr(cli, "Trials", lambda *_: trials)
    assert cli.main(["ddp", *words]) == 0
    return trials.batches


def test_strong_scaling_skips_ranks_that_cannot_share_the_batch(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    batches = bench_ddp(monkeypatch, FakeTrials(6), "--batch", "1", "train.py", "{batch}")
    assert batches == [*((ranks, 1) for ranks in (1, 2, 4, 6)), (1, 6), (2, 3), (6, 1)]
    assert ("# strong scaling on 4 ranks is not measured: they cannot share a global batch of 6 equally. "
            "Use another --batch") in capsys.readouterr().out


def test_hosts_have_the_same_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = bench_ddp(monkeypatch, FakeTrials(3, 3, 3), "train.py")
    assert [ranks for ranks, _ in batches] == [1, 2, 4, 9]  # 8 cannot be divided among three hosts


def test_ranks_of_another_launch_are_refused(tmp_path: Path) -> None:
    """Each would start all ranks."""
    done = python("utils", "bench", "ddp", TRAINING, ranks=2, warm=True)
    assert done.returncode == 2 and "It starts all ranks itself. Run it once, without a launcher" in done.stderr


def test_terminated_command_leaves_no_trial(tmp_path: Path) -> None:
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
                      "time.sleep(600)")
    words = [sys.executable, "utils", "bench", "ddp", "--trial-timeout", "90", str(script)]
    with subprocess.Popen(words, cwd=ROOT) as tuning:
        wait_until(lambda: started.exists() and bool(started.read_text()), "the trial", seconds=60)
        tuning.terminate()
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_trial_that_fails_names_rank_and_output() -> None:
    done = python("utils", "bench", "ddp", "-n", "2", TRAINING, "--bad-option")
    assert done.returncode == 1
    assert re.search(r"1 ranks: exit status 2.*unrecognized arguments: --bad-option", done.stderr, re.DOTALL)
