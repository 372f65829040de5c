"""bench.py ddp names planted causes; tune.py combines what gains and keeps the loss."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.programs import ROOT, python
from utils.tools.bench import bench_cli as cli
from utils.tools.bench import causes, scaling, tune, worker
from utils.tools.bench.trials import TrialFailed
from utils.tools.bench.worker import VARIABLE, Phase, Report, Settings, Trial

TRAINING = "tests/bench/training.py"
HEALTHY = Report(host="h1", losses=[], passes=1, exchanges=1, backend="nccl", threads=4, cpus=[0, 1, 2, 3],
                 small_seconds=0.0005, whole_seconds=0.02, gradient_bytes=100 << 20, bucket_bytes=[25 << 20] * 4,
                 phases={"sync": Phase(1.0, 0, 10), "local": Phase(0.9, 0, 10)})


def reports(seconds: float = 0.1, local: float = 0.09, **changes: object) -> list[Report]:
    """Return the reports of four ranks on two hosts with a step of `seconds`, `local` without communication."""
    phases = {"sync": Phase(seconds * 10, 0, 10), "local": Phase(local * 10, 0, 10)}
    return [dataclasses.replace(HEALTHY, **{"host": f"h{rank // 2 + 1}", "phases": phases, **changes,  # type: ignore[arg-type]
                                            "cpus": range(4 * (rank % 2), 4 * (rank % 2) + 4)}) for rank in range(4)]


def weak_scaling(found: list[Report], one_rank: float = 0.09) -> scaling.Point:
    return scaling.split("weak", 2, found, scaling.split("weak", 1, reports(one_rank)[:1], None))


def first_cause(found: list[Report], links: causes.Links | None = None) -> str:
    point = weak_scaling(found)
    return next((cause.name for cause in causes.find_causes(point, links)), "")


def test_healthy_training_has_no_cause() -> None:
    point = weak_scaling(reports(), 0.095)
    assert causes.find_causes(point) == []
    assert causes.explain(point, []) == ("95% efficiency (weak scaling) on 4 ranks, computing 90% of the time: "
                                         "no problem found.")


def test_weak_efficiency_counts_backward_passes() -> None:
    assert weak_scaling(reports(0.2, passes=2), 0.1).efficiency == pytest.approx(1)


def test_causes_by_their_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_cause(reports(0.2, exchanges=4, passes=4)) == "accumulation that communicates each time"
    assert first_cause(reports(0.2, bucket_bytes=[1 << 18] * 400)) == "many small buckets"
    assert first_cause(reports(0.11, hook="mine", find_unused_parameters=True)) == "no overlap"
    assert first_cause(reports(0.1, 0.09, find_unused_parameters=True, small_seconds=0.01)) == "find_unused_parameters"
    assert first_cause(reports(0.12, 0.12, threads=16)) == "too many threads"
    assert first_cause(reports(0.12, 0.12, threads=1, backend="gloo")) == "too few threads"
    assert first_cause(reports(0.09, 0.01, whole_seconds=0.08)) == "too small a micro-batch"
    waiting = {"sync": Phase(1, 0.5, 10), "local": Phase(0.9, 0.5, 10)}
    assert first_cause(reports(phases=waiting)) == "data wait"
    slow = reports(0.2)
    slow[2] = dataclasses.replace(slow[2], phases={"sync": Phase(2, 0, 10), "local": Phase(1.9, 0, 10)})
    assert first_cause(slow) == "one slow rank"
    links = causes.Links({(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1e9}, ["a", "b", "c"])
    assert first_cause(reports(0.2, whole_seconds=0.1), links) == "one slow link"
    warning = "NCCL uses TCP sockets over eth0, although IB is expected (DDPKIT_NETWORK)"
    assert first_cause(reports(0.2, network=warning)) == "sockets instead of the fabric"
    monkeypatch.setenv("DDPKIT_NETWORK", "AWS Libfabric")
    assert first_cause(reports(0.2, backend="gloo", threads=3)) == "sockets instead of the fabric"


def test_ranks_that_share_their_cpus_have_enough_threads() -> None:
    shared = [dataclasses.replace(report, threads=2, cpus=[0, 1, 2, 3])
              for report in reports(0.12, 0.12, backend="gloo")]
    assert first_cause(shared) == ""


def test_numbers_of_ranks() -> None:
    assert [scaling.numbers_of_ranks(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_scaling_of_a_training_is_measured_and_explained(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    done = python("scripts/bench.py", "ddp", "--full-only", "--steps", "4", "--json", str(table), TRAINING,
                  "--plant", "accumulation", ranks=2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"% efficiency \(weak scaling\) on 2 ranks", done.stdout), done.stdout
    points = json.loads(table.read_text())["points"]
    assert [point["ranks"] for point in points] == [1, 2] and points[1]["step"] > 0


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


def run_worker(script: str, folder: Path, world_size: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run rank 0 of a trial; return what it printed, and its report."""
    path, output = folder / "script.py", folder / "report"
    path.write_text(script)
    phases = [("sync", 2), ("local", 3), ("sync", 2)]  # with 2 settling steps before each
    trial = worker.Trial(Settings(), phases, 1, str(output))
    return python("-m", "utils.tools.bench.worker", str(path), env={
        worker.VARIABLE: json.dumps(dataclasses.asdict(trial)), "RANK": "0", "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}), output


def test_all_models_of_a_script_are_measured(tmp_path: Path) -> None:
    done, output = run_worker(SEVERAL_MODELS, tmp_path, 1)
    assert output.exists(), done.stderr
    exchanges = {tuple(line.split()) for line in done.stdout.splitlines()}
    # A local step begins in the backward pass after the first optimizer of the step before.
    for name, first in {"G": 6, "D": 5}.items():
        assert not any((name, str(step)) in exchanges for step in range(first, 10)), exchanges
        assert all((name, str(step)) in exchanges for step in (1, 2, 3, 4, 11, 12)), exchanges
    found = json.loads(output.read_text())
    assert (found["models"], found["passes"], found["exchanges"]) == (2, 2, 2)
    assert found["gradient_bytes"] == sum(found["bucket_bytes"]) == 4 * (20 + 5)


def test_accumulation_is_not_claimed_for_several_models() -> None:
    several = reports(0.2, exchanges=4, passes=4, models=2)
    assert first_cause(several) != "accumulation that communicates each time"


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
    script = tmp_path / "script.py"
    script.write_text(SLOW_RANK)
    done = python("scripts/bench.py", "ddp", "--full-only", "--steps", "3", "--warm-up", "1", str(script), ranks=2)
    found = re.search(r"^1\. one slow rank.* Rank 1 on .* computes (\S+) ms .* median rank (\S+) ms", done.stdout,
                      re.MULTILINE)
    assert found, done.stdout + done.stderr
    assert float(found[1]) >= 150 and 50 <= float(found[2]) < 80  # one call with its wait: 83


WITHOUT_DDP = """
import os, torch, torch.distributed as dist
several = int(os.environ["WORLD_SIZE"]) > 1
model = torch.nn.Linear(4, 1)
if several:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


def test_one_rank_trains_without_ddp(tmp_path: Path) -> None:
    done, output = run_worker(WITHOUT_DDP, tmp_path, 1)
    assert output.exists(), done.stderr
    found = json.loads(output.read_text())
    assert (found["models"], found["passes"], found["exchanges"], found["gradient_bytes"]) == (0, 1, 0, 0)
    assert found["phases"]["local"]["steps"] == 3


def test_several_ranks_need_ddp(tmp_path: Path) -> None:
    done, output = run_worker(WITHOUT_DDP.replace("> 1", "> 2"), tmp_path, 2)
    assert "the script has created no DistributedDataParallel" in done.stderr and not output.exists()


def test_batch_per_rank_keeps_the_global_batch_of_strong_scaling() -> None:
    assert [scaling.batch_per_rank("weak", 8, 6, ranks) for ranks in (1, 4, 6)] == [8, 8, 8]
    assert [scaling.batch_per_rank("strong", 8, 6, ranks) for ranks in (1, 2, 4, 6)] == [48, 24, 12, 8]
    assert scaling.batch_per_rank("strong", 1, 3, 2) is None


class FakeTrials:
    """Trials whose times and losses are computed from the settings."""

    def run(self, ranks: int, settings: Settings, phases: Sequence[tuple[str, int]]) -> list[Report]:
        if settings.fused:
            raise TrialFailed("rank 0 of 2: status 1\nno fused optimizer")
        seconds = 0.1 / {"": 1, "fp16": 1.5, "powersgd-8": 3}.get(settings.hook, 0.9)
        seconds /= 1.2 if settings.ddp.get("static_graph") else 1
        losses = [2.0] + [1.1 if settings.hook == "powersgd-8" else 1.01 if settings.hook else 1.0] * 200
        steps = phases[0][1]
        return [dataclasses.replace(HEALTHY, losses=losses, phases={"sync": Phase(seconds * steps, 0, steps)})] * ranks

    def agree(self, value: bool) -> bool:
        return value


def test_strong_scaling_skips_ranks_that_cannot_share_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    class Recorded(FakeTrials):
        batches: ClassVar[list[tuple[int, int]]] = []

        def run(self, ranks: int, settings: Settings, phases: Sequence[tuple[str, int]]) -> list[Report]:
            self.batches.append((ranks, settings.placeholders["batch"]))
            return [HEALTHY] * ranks

        def hosts(self, ranks: int) -> int:
            return 1

    job = SimpleNamespace(world_size=3, is_main=True)
    monkeypatch.setattr(cli, "start_trials", lambda *_: contextlib.nullcontext((job, Recorded())))
    caplog.set_level("INFO", "ddpkit")
    assert cli.main(["ddp", "--batch", "1", "train.py", "{batch}"]) == 0
    assert Recorded.batches == [(1, 1), (2, 1), (3, 1), (1, 3), (3, 1)]
    assert ("# strong scaling on 2 ranks is not measured: they cannot share a global batch of 3 equally. "
            "Use another --batch") in caplog.messages


def tuner(budget: float = 100, trials: FakeTrials | None = None) -> tune.Tuner:
    return tune.Tuner(trials or FakeTrials(), 2, steps=10, budget=budget, tolerance=0.02)  # type: ignore[arg-type]


def test_tuner_combines_what_gains_and_keeps_the_loss() -> None:
    tuning = tuner()
    best = tuning.search(tune.candidates(4, False))
    assert best.settings == Settings(hook="fp16", ddp={"static_graph": True})
    assert best.gain == pytest.approx(1.8) and best.worse == pytest.approx(0.01)
    problems = {one.name: one.problem.splitlines()[-1] for one in tuning.tried if one.problem}
    assert problems == {"hook powersgd-8": "the loss is 10.0% higher",
                        "hook fp16, static_graph, fused optimizer": "no fused optimizer"}
    assert tune.code(best.settings) == (
        f"import utils.tools.bench.hooks  # utils must be importable: PYTHONPATH={ROOT}\n"
        "ddp = DistributedDataParallel(..., static_graph=True)  # add to your arguments\n"
        "# ddp is your DistributedDataParallel:\n"
        "ddp.register_comm_hook(None, utils.tools.bench.hooks.fp16_hook)")


def test_tuner_keeps_the_script_where_nothing_gains() -> None:
    tuning = tuner()
    assert tuning.search({"bucket": tune.candidates(4, False)["bucket"]}) is tuning.default


def test_tuner_tries_nothing_beyond_its_budget() -> None:
    tuning = tuner(budget=0)
    assert tuning.search(tune.candidates(4, False)) is tuning.default and tuning.tried == []


def test_code_has_only_what_changes() -> None:
    assert tune.code(Settings(threads=2)) == "# before the start: export OMP_NUM_THREADS=2"
    assert "DistributedDataParallel(" not in tune.code(Settings(hook="bf16"))


def run_tune(monkeypatch: pytest.MonkeyPatch, trials: FakeTrials, *words: str) -> int:
    """Run tune.py with these trials."""
    @contextlib.contextmanager
    def start(*_: object) -> Iterator[tuple[object, FakeTrials]]:
        yield SimpleNamespace(world_size=2, is_main=True), trials

    monkeypatch.setattr(tune, "start_trials", start)
    return tune.main([*words, "train.py"])


def test_nothing_tried_is_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert run_tune(monkeypatch, FakeTrials(), "--only", "bucket", "--budget", "0") == 1
    message = r"Nothing was tried: the unchanged script takes up all of --budget 0. Raise it to about \d+ s"
    assert re.search(message, caplog.text)


def test_conclusion_counts_the_values_that_were_not_tried() -> None:
    class Limited(FakeTrials):
        answers = [True, False, False]

        def agree(self, value: bool) -> bool:
            return self.answers.pop(0)

    tuning = tuner(trials=Limited())
    text = tune.conclusion(tuning, tuning.search({"bucket": tune.candidates(4, False)["bucket"]}), 0.02)
    assert "Keep the script as it is. 2 of 3 values were not tried: raise --budget to about " in text


class OtherLosses(FakeTrials):
    """Trials that each have the next of these losses; the last one stays."""

    def __init__(self, *losses: list[float]) -> None:
        self._losses = list(losses)

    def run(self, ranks: int, settings: Settings, phases: Sequence[tuple[str, int]]) -> list[Report]:
        losses = self._losses.pop(0) if len(self._losses) > 1 else self._losses[0]
        return [dataclasses.replace(one, losses=losses) for one in super().run(ranks, settings, phases)]


def test_loss_of_the_unchanged_script_that_is_not_finite(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert run_tune(monkeypatch, OtherLosses([1.0, 2.0] + [float("nan")] * 8), "--only", "bucket") == 1
    assert "the loss of the unchanged script is not finite after 3 micro-batches" in caplog.text


def test_script_that_resumes_in_the_next_trial_is_refused() -> None:
    falling = [2 - 0.05 * i for i in range(20)]
    for losses in ([falling, [1.0] * 20], [falling, falling, [1.0] * 20]):
        with pytest.raises(TrialFailed, match="continues where an earlier trial ended: .* 1.9, and 1 in a later trial"):
            tuner(trials=OtherLosses(*losses)).search({"bucket": tune.candidates(4, False)["bucket"]})


def test_script_without_a_seed_is_tuned_with_a_warning(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpkit")
    losses = [[2 + 0.1 * i] + [1.0] * 20 for i in range(3)]
    assert run_tune(monkeypatch, OtherLosses(*losses), "--only", "bucket") == 0
    assert caplog.text.count("does not start from the same state each time: its first loss was 2, then 2.1.") == 1
    caplog.clear()
    assert run_tune(monkeypatch, FakeTrials(), "--only", "bucket") == 0 and "same state" not in caplog.text


def test_module_instead_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(["--budget", "5", "-m", "package.train", "--epochs", "3"])
    assert "found -m package.train. Expected the path of a script, such as package/train.py" in capsys.readouterr().err


def test_only_without_anything_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(["--only", "accumulation", "train.py"])
    assert "--only accumulation leaves nothing to try" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 4])
def test_iterable_dataset_gets_at_most_one_worker(tmp_path: Path, workers: int) -> None:
    script, report = tmp_path / "script.py", tmp_path / "report"
    script.write_text("from torch.utils.data import DataLoader, IterableDataset\n"
                      "class Numbers(IterableDataset):\n"
                      "    def __iter__(self): return iter(range(4))\n"
                      "print(sorted(DataLoader(Numbers(), None)))\n")
    trial = Trial(Settings(workers=workers), [("sync", 1)], 0, str(report))
    done = python("-m", "utils.tools.bench.worker", str(script), env={VARIABLE: json.dumps(dataclasses.asdict(trial))})
    repeats = "an IterableDataset would repeat its samples in each of 4 workers" in done.stderr
    assert repeats == (workers == 4) and ("[0, 1, 2, 3]" in done.stdout) == (workers == 1), done.stderr


def test_loss_increase_compares_equally_many_losses() -> None:
    assert tune.loss_increase([2, 1, 1, 1, 0.1], [2, 2, 2, 1.1]) == pytest.approx(0.1)
    assert tune.loss_increase([2, 1], [0.5, 0.25]) == 0  # divided by the number of micro-batches
    assert tune.loss_increase([2, 1], [2, float("nan")]) == float("inf")
    assert tune.loss_increase([2, float("nan")], [2, 1]) == float("inf")
    assert tune.loss_increase([-1, -5], [-1, -4]) == pytest.approx(0.2)  # a log-likelihood


def test_nothing_is_recommended_where_the_loss_is_unknown() -> None:
    class WithoutLosses(FakeTrials):
        def run(self, ranks: int, settings: Settings, phases: Sequence[tuple[str, int]]) -> list[Report]:
            return [dataclasses.replace(one, losses=[]) for one in super().run(ranks, settings, phases)]

    tuning = tune.Tuner(WithoutLosses(), 2, steps=10, budget=100, tolerance=0.02)  # type: ignore[arg-type]
    assert tuning.search({"hook": tune.candidates(4, False)["hook"]}) is tuning.default
    assert any(one.problem == "its loss is unknown. Expected calls of loss.backward()" for one in tuning.tried)


def test_terminated_tuner_leaves_no_trial(tmp_path: Path) -> None:
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
                      "time.sleep(600)")
    words = [sys.executable, "scripts/tune.py", "--trial-timeout", "90", str(script)]
    with subprocess.Popen(words, cwd=ROOT) as tuning:
        wait_until(lambda: started.exists() and bool(started.read_text()), "the trial", seconds=60)
        tuning.terminate()
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_trial_that_fails_names_rank_and_output() -> None:
    done = python("scripts/tune.py", TRAINING, "--bad-option", ranks=2)
    assert done.returncode == 1
    assert re.search(r"unchanged script failed.*unrecognized arguments: --bad-option", done.stderr, re.DOTALL)
