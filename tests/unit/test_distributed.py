"""The arguments of setup_distributed(), and a mean on the device of a rank."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from utils.distributed import Distributed, setup_distributed


@pytest.mark.parametrize("backend", ["mpi", "NCCL", ""])
def test_unknown_backend_is_a_value_error(backend: str) -> None:
    with pytest.raises(ValueError, match="expected None or one of gloo, nccl, xccl"):
        setup_distributed(backend)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e9])
def test_bad_timeout_is_a_value_error(seconds: float) -> None:
    with pytest.raises(ValueError, match="^timeout is .*; expected seconds above 0"):
        setup_distributed(timeout=seconds)
    with pytest.raises(ValueError, match="collective_timeout is .*; expected seconds above 0"):
        setup_distributed(collective_timeout=seconds)


def test_second_initialisation_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="initialised already"):
        setup_distributed()


def test_cpu_tensor_is_reduced_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reduced(Exception):
        """The collective was called; the meta device returns no values."""

    def all_reduce(tensor: torch.Tensor) -> None:
        raise Reduced(str(tensor.device))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    job = SimpleNamespace(device=torch.device("meta"), world_size=2)  # meta stands for a GPU
    with pytest.raises(Reduced, match="^meta$"):
        Distributed.all_reduce_mean(job, torch.ones(2))  # type: ignore[type-var]
