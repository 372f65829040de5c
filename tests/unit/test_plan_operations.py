"""What ddpkit plan counts of an operation: as a GPU runs it, and as torch decides on its precision."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.programs import python
from utils.tools.plan import plan_cli as cli
from utils.tools.plan.gpu_forms import FORMS
from utils.tools.plan.operations import TracedOperation
from utils.tools.plan.trace import trace_training

Operations = list[TracedOperation]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def operations(loss: Callable[[Any], torch.Tensor], build: Callable[[], nn.Module],
               optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> Operations:
    return trace_training(build, loss, optimizer).operations


def of_kind(kind: str, found: Operations) -> Operations:
    return [operation for operation in found if operation.kind == kind]


# --- the form of a GPU: each operation that chooses it by the device

def attended(dropout: float, length: int = 64, mask: torch.Tensor | None = None, causal: bool = False,
             dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    def loss(model: nn.Module) -> torch.Tensor:
        qkv = model(torch.zeros(2, 4, length, 1)).expand(2, 4, length, 16).to(dtype)
        return F.scaled_dot_product_attention(qkv, qkv, qkv, mask, dropout, causal).float().sum()
    return trace_training(lambda: nn.Linear(1, 1), loss, sgd, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("mask", "dtype"), [
    (None, torch.bfloat16), (None, torch.float32), (torch.zeros(64, 64), torch.float32)],
    ids=["flash", "float32", "mask"])
def test_attention_is_one_operation_without_scores_in_memory(
        dropout: float, mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    found = attended(dropout, mask=mask, dtype=dtype).operations
    forward, backward = of_kind("attention", found)
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.flops == 4 * 2 * 4 * 64 * 64 * 16 and backward.flops == 2.5 * forward.flops
    assert not of_kind("matmul", found)[4:], "only those of the linear layer"


def test_attention_grows_with_the_square_of_the_length_and_causal_is_half() -> None:
    short, long = (of_kind("attention", attended(0.0, length).operations)[0].flops for length in (64, 256))
    assert long == 16 * short
    assert of_kind("attention", attended(0.1, causal=True).operations)[0].flops == short / 2


def test_dropout_in_attention_needs_no_memory() -> None:
    without, with_dropout = (attended(p, 512).peak().total for p in (0.0, 0.5))
    assert with_dropout == pytest.approx(without, rel=0.01)
    assert attended(0.5, 512, gpu=False).peak().total > 2 * without  # that of the CPU


def test_dropout_keeps_a_mask_of_bytes() -> None:
    def loss(layers: int) -> Callable[[nn.Module], torch.Tensor]:
        def run(model: nn.Module) -> torch.Tensor:
            x = model(torch.zeros(1 << 16, 1))
            for _ in range(layers):
                x = F.dropout(F.dropout(x, 0.1), 0.0)
            return x.sum()
        return run
    one, five = (trace_training(lambda: nn.Linear(1, 1), loss(layers), sgd)
                 for layers in (1, 5))
    assert len(five.operations) - len(one.operations) == 4 * 2  # forward and backward
    assert five.peak().bytes["activations"] - one.peak().bytes["activations"] == pytest.approx(4 << 16, rel=0.1)


def test_autocast_runs_normalisation_and_softmax_in_float32() -> None:
    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = model[0](torch.zeros(8, 32))
            y = model[1](x)
            assert y.dtype == x.softmax(-1).dtype == x.exp().dtype == torch.float32 and x.dtype == torch.bfloat16
            return y.sum()
    found = operations(loss, lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)))
    assert of_kind("normalisation", found)[0].dtype == "float32"


def test_rms_norm_is_one_operation() -> None:
    found = operations(lambda m: m(torch.zeros(8, 32)).sum(), lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)))
    assert [op.phase for op in of_kind("normalisation", found)] == ["forward", "backward"]


def test_a_fused_optimizer_is_one_operation_that_reads_and_writes_its_state() -> None:
    found = operations(lambda m: m(torch.zeros(1, 100)).sum(), lambda: nn.Linear(100, 100, bias=False),
                       lambda parameters: torch.optim.AdamW(parameters, fused=True))
    step, = [op for op in found if op.phase == "optimizer" and op.moved_bytes > 1000]
    # Parameter, gradient and two moments are read; torch says of all four that they are written.
    assert step.moved_bytes == pytest.approx(8 * 40_000, rel=0.01)


def test_each_form_has_a_test() -> None:
    assert set(FORMS) == {"scaled_dot_product_attention", "dropout", "rms_norm"}


def test_operations_of_the_cpu_are_back_after_a_trace() -> None:
    attended(0.1)
    x = torch.randn(2, 4, 8, 16)
    assert F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).shape == F.dropout(x).shape == x.shape


# --- arithmetic

@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_backward_of_a_convolution_has_twice_the_arithmetic_with_any_groups(groups: int, kind: Any) -> None:
    found = of_kind("convolution", operations(
        lambda m: m(torch.zeros(2, 3, 8, 8)).sum(),
        lambda: nn.Sequential(nn.Conv2d(3, 32, 1), kind(32, 32, 3, padding=1, groups=groups, bias=False))))
    forward, backward = found[1], found[2]
    assert forward.flops == 2 * 2 * 32 * 64 * 9 * 32 / groups and backward.flops == 2 * forward.flops
    assert forward.width == 32 // groups


@pytest.fixture
def precision() -> Iterator[None]:
    """Undo what a test permits."""
    yield
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


def dtypes() -> tuple[str, str]:
    found = operations(lambda m: m(torch.zeros(2, 3, 8, 8)).sum(),
                       lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)))
    return of_kind("convolution", found)[0].dtype, of_kind("matmul", found)[0].dtype


def test_tf32_is_counted_where_torch_permits_it(precision: None) -> None:
    assert dtypes() == ("tf32", "float32")  # the defaults of torch
    torch.backends.cudnn.allow_tf32 = False
    assert dtypes() == ("float32", "float32")
    torch.set_float32_matmul_precision("high")
    assert dtypes() == ("float32", "tf32")


# --- scripts

HEAD = """
import sys
import torch
model = torch.nn.Linear({width}, {width}, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(script: str, *words: str, gpu: str = "h100", width: int = 1024) -> dict[str, Any]:
        (tmp_path / "train.py").write_text(HEAD.format(width=width) + script)
        status = cli.main(["--gpu", gpu, "--gpus", "8", "--json", str(tmp_path / "train.py"), *words])
        printed = capfd.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)  # type: ignore[no-any-return]
    return run


def test_clipping_does_not_hide_the_all_reduce(planned: Callable[..., dict[str, Any]]) -> None:
    script = """
for _ in range(3):
    model(torch.zeros(1024, 4096, device="cuda")).sum().backward()
    if "clip" in sys.argv:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
    plain, clipped = (planned(script, *words, width=4096)["scaling"] for words in ([], ["clip"]))
    at_8 = [next(row for row in rows if row["gpus"] == 8) for rows in (plain, clipped)]
    assert at_8[0]["exposed_seconds"] == pytest.approx(at_8[1]["exposed_seconds"]) and at_8[0]["exposed_seconds"] > 0
    assert at_8[1]["computation_seconds"] > at_8[0]["computation_seconds"]


def test_initialisation_is_skipped(planned: Callable[..., dict[str, Any]]) -> None:
    """Some of it repeats until all values are inside."""
    found = planned("""
from torch.nn import init
init.trunc_normal_(model.weight, std=0.02)
init.orthogonal_(model.weight)
for _ in range(3):
    model(torch.zeros(8, 1024)).sum().backward()
    optimizer.step()
""")
    assert found["memory"]["parameters"] == 4 << 20


def test_tf32_of_a_script_ends_with_it(planned: Callable[..., dict[str, Any]]) -> None:
    script = "torch.set_float32_matmul_precision('high')\nfor _ in range(3):\n" \
             "    model(torch.zeros(99, 1024)).sum().backward()\n    optimizer.step()\n"
    planned(script)
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("bandwidth", ["nan", "inf", "0", "-1", "1e999", "-inf"])
def test_an_impossible_bandwidth_is_one_line(bandwidth: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--parameters", "1e8", "--compute-seconds", "0.1", "--gpus", "16", f"--inside={bandwidth}"]) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and bandwidth in printed


def test_infinity_is_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("--parameters 1e8 --compute-seconds 0.1 --gpus 16 --inside infinity".split()) == 0
    assert "50 GB/s within a node" in capsys.readouterr().out


@pytest.mark.parametrize("copied", ["torch.optim.swa_utils.AveragedModel(model)", "copy.deepcopy(model)"])
def test_an_ema_copy_is_listed_as_such(planned: Callable[..., dict[str, Any]], copied: str) -> None:
    found = planned(f"""
import copy
average = {copied}
for _ in range(3):
    model(torch.zeros(8, 1024)).sum().backward()
    optimizer.step()
""")
    assert found["memory"]["EMA copy"] == found["memory"]["parameters"] == 4 << 20


def test_a_frozen_model_counts_as_parameters(planned: Callable[..., dict[str, Any]]) -> None:
    found = planned("""
teacher = torch.nn.Linear(1024, 512, bias=False)
for _ in range(3):
    teacher(model(torch.zeros(8, 1024))).sum().backward()
    optimizer.step()
""")
    assert found["memory"]["parameters"] == 6 << 20 and not found["memory"]["EMA copy"]


def test_an_evaluation_before_the_first_step_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD.format(width=64) + """
with torch.no_grad():
    while True:
        model(torch.zeros(8, 64))
""")
    done = python("utils", "plan", "--trace-timeout", "8", str(script))
    assert done.returncode == 1 and "as in an evaluation before the first step" in done.stderr, done.stderr


def test_warnings_about_fake_tensors_are_not_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD.format(width=64) + """
attention = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.1)
import copy
for _ in range(3):
    copy.deepcopy(attention)(model(torch.zeros(8, 64))).sum().backward()
    optimizer.step()
""")
    done = python("utils", "plan", str(script))
    assert done.returncode == 0 and "FakeTensor" not in done.stderr, done.stderr


@pytest.mark.parametrize(("gpu", "factor"), [("v100-16", 1), ("mi250x", 1), ("a100-80", 8)])
def test_tf32_speeds_up_what_has_it(planned: Callable[..., dict[str, Any]], gpu: str, factor: float) -> None:
    """Where the accelerator has none, float32 is computed, as torch does."""
    script = """
torch.set_float32_matmul_precision(sys.argv[1])
for _ in range(3):
    model(torch.zeros(8192, 8192)).sum().backward()
    optimizer.step()
"""
    slow, fast = (planned(script, word, gpu=gpu, width=8192)["scaling"][0]["computation_seconds"]
                  for word in ("highest", "high"))
    assert slow / fast == pytest.approx(factor, rel=0.35)
