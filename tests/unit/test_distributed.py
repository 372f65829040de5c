"""The arguments of setup_distributed(), and a mean on the device of a rank."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from utils.distributed import Distributed, setup_distributed


@pytest.mark.parametrize(("argument", "values", "expected"), [
    ("backend", ["mpi", "NCCL", ""], "None or one of gloo, nccl, xccl"),
    ("bind", ["none", True, None], "'auto' or False"),
    ("timeout", [0, -1, float("nan"), 1e9], "seconds above 0"),
    ("collective_timeout", [0, -1, float("nan"), 1e9], "seconds above 0")])
def test_bad_argument_is_a_value_error(argument: str, values: list[object], expected: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument} is .*; expected {expected}"):
            setup_distributed(**{argument: value})


def test_second_initialisation_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="initialised already"):
        setup_distributed()


def test_cpu_tensor_is_reduced_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor) -> None:
        raise ArithmeticError(f"reduced on {tensor.device}")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    job = SimpleNamespace(device=torch.device("meta"), world_size=2)  # meta stands for a GPU
    with pytest.raises(ArithmeticError, match="^reduced on meta$"):
        Distributed.all_reduce_mean(job, torch.ones(2))
