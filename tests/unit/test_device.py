"""Which backend is chosen, and which visible device this rank uses; the accelerators are replaced."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from utils.host import device
from utils.host.masks import MASKS

Install = Callable[..., None]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replace what torch sees: accelerator(type, uuids of the devices). No mask is set."""
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)

    def install(kind: str | None, uuids: Sequence[str] = ()) -> None:
        current = torch.device(kind) if kind else None
        module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    return install


@pytest.mark.parametrize(("kind", "uuids", "backend"), [
    (None, [], "gloo"), ("cuda", ["a"], "nccl"), ("xpu", ["a"], "xccl"), ("cuda", [], "gloo"), ("mps", ["a"], "gloo")])
def test_backend_follows_the_accelerator(
        accelerator: Install, kind: str | None, uuids: list[str], backend: str) -> None:
    accelerator(kind, uuids)
    assert device.choose_backend(None) == backend
    assert device.choose_backend("gloo") == "gloo"
    assert device.visible_devices("gloo") == [] and device.device_at("gloo", None) == torch.device("cpu")


@pytest.mark.parametrize(("uuids", "mask", "identities"), [
    (["GPU-0", "GPU-1"], None, ["GPU-0", "GPU-1"]),
    (["GPU-0", "GPU-0"], "MIG-a,MIG-b", ["MIG-a", "MIG-b"]),  # instances of a shared GPU
    (["GPU-XX", "GPU-XX"], None, ["GPU-XX index 0", "GPU-XX index 1"]),  # a placeholder
    (["", ""], None, ["no device mask is set index 0", "no device mask is set index 1"]),
    (["", ""], "0,1", ["CUDA_VISIBLE_DEVICES=0,1 index 0", "CUDA_VISIBLE_DEVICES=0,1 index 1"])])
def test_visible_devices_are_identified_in_order(
        accelerator: Install, monkeypatch: pytest.MonkeyPatch, uuids: list[str], mask: str | None,
        identities: list[str]) -> None:
    accelerator("cuda", uuids)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert device.visible_devices("nccl") == identities
    assert device.device_at("nccl", 1) == torch.device("cuda", 1)


@pytest.mark.parametrize(("gpus", "uuids", "warned"), [(4, [], True), (4, ["a"], False), (0, [], False)])
def test_gpus_that_torch_cannot_use_are_reported(
        accelerator: Install, monkeypatch: pytest.MonkeyPatch, gpus: int, uuids: list[str], warned: bool) -> None:
    accelerator("cuda", uuids)
    monkeypatch.setattr("utils.host.gpus.count_gpus", lambda: gpus)
    assert ("has 4 GPU(s)" in device.unused_gpus()) == warned
