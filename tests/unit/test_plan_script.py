"""ddpkit plan of a training script: a prediction, or a sentence that says what could not be traced."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.programs import python
from utils.tools.plan import plan_cli as cli
from utils.tools.plan.hardware import LAUNCH_SECONDS, Hardware

Planned = Callable[..., dict[str, Any]]
IMPORTS = """
import os, sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""
GLOO = IMPORTS + 'torch.distributed.init_process_group("gloo")\n'
GPU_SCRIPT = IMPORTS + """
torch.distributed.init_process_group("nccl"); os.write(1, b"as gloo of torch 2.8")
gpu = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", gpu)
torch.cuda.set_device(gpu)
model = DDP(nn.Sequential(nn.Linear(1000, 4000), nn.ReLU(), nn.Linear(4000, 1000)).to(gpu), device_ids=[gpu],
            gradient_as_bucket_view=True, bucket_cap_mb=5)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(256, 1000))
for i, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)):
    with model.no_sync() if i % 2 == 0 else torch.enable_grad():
        with torch.autocast("cuda"):
            loss = model(x.to(device, non_blocking=True) + torch.ones(1000, device=gpu).cuda()).square().mean()
        loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
"""
HEAD = """
import sys, time, torch
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def written(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


@pytest.fixture
def planned(capfd: pytest.CaptureFixture[str]) -> Planned:
    def run(*words: str) -> dict[str, Any]:
        status = cli.main(["--json", *words])
        printed = capfd.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)  # type: ignore[no-any-return]
    return run


def test_script_for_torchrun_and_gpus_is_traced_without_them(planned: Planned, tmp_path: Path) -> None:
    found = planned("--site", "polaris", "--nodes", "4", written(tmp_path, GPU_SCRIPT))
    parameters = 2 * 4000 * 1000 + 5000
    assert found["inputs"]["parameters"] == parameters
    memory = found["memory"]
    assert (memory["parameters"], memory["gradients"], memory["buckets"]) == (4 * parameters, 0, 4 * parameters)
    assert memory["optimizer"] == pytest.approx(8 * parameters, rel=1e-4)
    assert any("train.py:24: traced as 1.0" in note for note in found["notes"]), found["notes"]
    assert "Predicted without the communication hook fp16_compress_hook." in found["notes"]
    assert not any("not use DDP" in note for note in found["notes"])
    assert found["inputs"]["accumulate"] == 2
    sent = {row["gpus"]: row["sent_bytes"] for row in found["scaling"]}
    assert sent[16] == 2 * 15 / 16 * 4 * parameters


@pytest.mark.parametrize(("example", "parameters", "inputs"), [
    ("examples/01_ddp_minimal.py", 32 * 64 + 64 + 64 + 1, 64 * 33 * 4),  # inputs and targets, not the data set
    ("examples/05_survive.py --folder {}", 64 * 128 + 128 + 128 * 4 + 4, 96 * (64 * 4 + 8))])
def test_example_is_traced_as_it_is(example: str, parameters: int, inputs: int, tmp_path: Path) -> None:
    """The second one resumes, and primes its buckets. No thread is left, which could abort the process at its end."""
    words = ["plan", "--json", "--gpu", "a100-40", *example.format(tmp_path).split()]
    done = python("-c", f"import sys, threading; from utils.tools.cli.main import main; status = main({words})\n"
                        "sys.exit(status or str(threading.enumerate()[1:]).strip('[]') or None)")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["inputs"]["parameters"] == parameters
    assert found["memory"]["inputs"] == pytest.approx(inputs, rel=0.01)
    assert found["largest_micro_batch"] is None
    assert any("Write {batch} for the micro-batch in its arguments" in note for note in found["notes"])


def test_step_of_two_models_has_all_their_passes_optimizers_and_buckets(planned: Planned, tmp_path: Path) -> None:
    """Without no_sync(), each backward pass exchanges gradients; an unused parameter is exchanged, too."""
    script = written(tmp_path, GLOO + """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(300, 700, bias=False), nn.Linear(300, 300, bias=False)
    def forward(self, x):
        return self.used(x)
critic, maker = DDP(Critic(), find_unused_parameters=True), DDP(nn.Linear(10, 300, bias=False))
optimizers = [torch.optim.AdamW(model.parameters()) for model in (critic, maker)]
for _ in range(3):
    for _ in range(2):
        critic(torch.zeros(4, 300)).sum().backward()
    optimizers[0].step()
    critic(maker(torch.zeros(4, 10))).sum().backward()
    optimizers[1].step()
""")
    found = planned("--gpu", "a100-40", "--gpus", "2", script)
    used, unused, maker = 4 * 300 * 700, 4 * 300 * 300, 4 * 3000
    assert found["memory"]["optimizer"] == pytest.approx(2 * (used + maker), rel=1e-4)
    assert found["memory"]["buckets"] == used + unused + maker and found["inputs"]["accumulate"] == 3
    sent = {row["gpus"]: row["sent_bytes"] for row in found["scaling"]}
    assert sent[2] == 3 * used + unused + maker


def test_closures_recomputation_small_last_batches_and_clean_up_are_traced(planned: Planned, tmp_path: Path) -> None:
    script = written(tmp_path, GLOO + """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
    def forward(self, x):
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
with torch.device("meta"):
    model = Model()
model = DDP(model.to_empty(device="cpu").bfloat16())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for x in 3 * [torch.zeros(1000, 100).bfloat16(), torch.zeros(10, 100).bfloat16()]:
        def closure():
            optimizer.zero_grad()
            loss = model(x.requires_grad_()).sum()
            loss.backward()
            return loss
        optimizer.step(closure)
finally:
    raise RuntimeError(f"no file system for {model}")
""")
    found = planned("--gpu", "a100-40", script)
    assert found["inputs"]["accumulate"] == 1
    memory = {name: found["memory"][name] for name in ("parameters", "inputs", "buckets")}
    assert memory == {"parameters": 40_000, "inputs": 202_000, "buckets": 40_000}  # both batches are kept
    assert found["peak"].startswith("backward"), found["peak"]


@pytest.mark.parametrize(("script", "words"), [
    ("while True: model(torch.zeros(1, 10)).sum().backward(); optimizer.step()", None),
    ("optimizer.step(); optimizer.step()", "no backward pass"),
    ("raise ValueError('no such data')", "train.py:5"),
    ("optimizer.step()", "1 optimizer steps too early"),
    ("model(torch.zeros(1, 9))", "at train.py:5. Expected a script that trains as the only rank"),
    ("sys.exit('no data here')", "no data here")])
def test_what_cannot_be_traced_is_said(
        tmp_path: Path, script: str, words: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main([written(tmp_path, HEAD + script)])
    output, errors = capsys.readouterr()
    if words is None:
        assert status == 0 and "does not use DDP" in output, errors
    else:
        assert status == 1 and words in errors and "Traceback" not in errors, errors


# It holds a lock, and waits for it where no signal interrupts it.
NO_RETURN = "import ctypes; lock = ctypes.create_string_buffer(99); call = ctypes.CDLL(None).pthread_mutex_lock; " \
            "call(lock), call(lock)"


@pytest.mark.parametrize("step", [
    "model(torch.zeros(1, 10)).sum().backward(); time.sleep(0.1)", NO_RETURN])
def test_script_without_an_optimizer_step_is_ended(tmp_path: Path, step: str) -> None:
    done = python("utils", "plan", "--trace-timeout", "8", written(tmp_path, f"{HEAD}while True: {step}"))
    assert done.returncode == 1 and "within 8 s" in done.stderr and "Traceback" not in done.stderr, done.stderr


VALUES = GLOO + """
device = torch.device("cuda")
best = 1e9
x = torch.randn(32, 99, device=device)
model = DDP(nn.Linear(99, 9).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(40):
    optimizer.zero_grad()
    y = model(x)
    loss = y.square().mean()
    {}
    optimizer.step()
"""


@pytest.mark.parametrize("body", [
    "loss.backward(); print((y.argmax(1) == 3).sum().item())",
    "loss.backward(); print(y.detach().cpu().numpy().std())",
    "loss.backward()\n    if loss < best: best = loss.detach()",
    "y.argmax(1).unique(return_inverse=True); loss.backward()",
    "if loss.isfinite(): loss.backward()",
    "torch.optim.LBFGS(model.parameters()).step(lambda: ((again := model(x).sum()).backward(), again)[1])",
    "y[y > 0].sum().backward()"])
def test_script_whose_values_decide_is_to_be_measured(
        tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, VALUES.format(body))
    line = next(i for i, text in enumerate(Path(script).read_text().splitlines(), 1) if body.splitlines()[-1] in text)
    assert cli.main([script]) == 1
    assert f"It needs values at train.py:{line}: measure a step" in capsys.readouterr().err


def test_script_with_fully_shard_is_to_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = HEAD + "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n"
    assert cli.main([written(tmp_path, script)]) == 1
    assert "It calls fully_shard() at train.py:6. Memory and steps under" in capsys.readouterr().err


BATCH = HEAD + """
while True:
    y = model(torch.zeros(int(sys.argv[1]), 10))
    (y @ y.T).exp().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("script", ["", BATCH], ids=["factory", "script"])
def test_largest_batch_of_each_gpu_fits_and_one_more_does_not(planned: Planned, tmp_path: Path, script: str) -> None:
    """The memory of the factory grows linearly with the batch, that of the script does not."""
    source = [written(tmp_path, script), "{batch}"] if script else ["--model", "tests.unit.plan_models:planned_gpt"]
    largest = planned("--gpu", "a100-40", "--batch", "32", *source)["largest_micro_batch"]
    assert largest["gpu"] == "a100-40" and not largest["unconfirmed"] and largest["samples"] > 100
    used, too_much = (sum(planned("--gpu", "a100-40", "--batch", str(batch), *source)["memory"].values())
                      for batch in (largest["samples"], largest["samples"] + 1))
    assert used <= Hardware().accelerator("a100-40").memory < too_much


DATA = HEAD.replace("10, 10", "10, 100_000") + """
data = torch.utils.data.DataLoader(torch.zeros(200, 10), int(sys.argv[1]), drop_last={})
for _ in range({}):
    for x in data:
        model(x).exp().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("drop_last", "epochs", "expected"), [(True, 1, 64), (False, 9, 128)])
def test_largest_batch_is_at_least_that_at_which_the_data_ended(
        drop_last: bool, epochs: int, expected: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """200 samples: two steps of up to 100 without the last batch; with it, larger batches hold 200 samples."""
    script = written(tmp_path, DATA.format(drop_last, epochs))
    assert cli.main(["--gpu", "a100-40", "--batch", "32", script, "{batch}"]) == 0
    text = capfd.readouterr().out
    assert f"Largest micro-batch on a100-40: at least {expected} samples: the data ended\n" in text, text


def test_step_of_short_operations_takes_the_time_to_start_them(planned: Planned, tmp_path: Path) -> None:
    script = written(tmp_path, BATCH)
    short, long = planned("--gpu", "h100", script, "8"), planned("--gpu", "h100", script, "300000")
    note, = (note for note in short["notes"] if note.startswith("The CPU limits the step: it starts "))
    operations = int(note.split()[7])
    assert short["scaling"][0]["step_seconds"] == pytest.approx(operations * LAUNCH_SECONDS) and operations > 5
    assert long["scaling"][0]["step_seconds"] > 100 * short["scaling"][0]["step_seconds"]
    assert not any("CPU limits" in note for note in long["notes"])
    measured = planned("--gpu", "h100", "--compute-seconds", "1e-5", script, "8")
    assert measured["scaling"][0]["computation_seconds"] < 2e-5
