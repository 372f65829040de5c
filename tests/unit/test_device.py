"""Which of the visible devices is this rank's, and which backend goes with it."""
from __future__ import annotations

import pytest
import torch

from utils import device
from utils.launchers import LaunchError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 0)


def test_the_mask_is_shown_for_every_vendor_that_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
                 "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    assert device.masks() == "no device mask is set"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.masks() == "CUDA_VISIBLE_DEVICES= ROCR_VISIBLE_DEVICES=0,1"


@pytest.mark.parametrize(("present", "backend"), [([], "gloo"), (["cuda"], "nccl"), (["xpu"], "xccl"),
                                                  (["cuda", "xpu"], "nccl")])
def test_the_backend_follows_the_accelerator(present: list[str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: int(kind in present))
    assert device.choose_backend(None) == backend


@pytest.mark.parametrize(("backend", "kind"), [("nccl", "cuda"), ("xccl", "xpu")])
def test_the_backend_of_a_gpu_that_is_not_there_is_a_launch_error(backend: str, kind: str, no_gpu: None,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(LaunchError, match=f"backend {backend} was asked for.*no {kind} device.*CUDA_VISIBLE_DEVICES=5"):
        device.choose_backend(backend)


def test_gloo_can_be_asked_for_also_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 8)
    assert device.choose_backend("gloo") == "gloo"
    assert device.visible("gloo") == [] and device.numbered("gloo", None) == torch.device("cpu")


@pytest.mark.parametrize("backend", ["mpi", "NCCL", ""])
def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones(backend: str) -> None:
    with pytest.raises(ValueError, match="expected None or one of gloo, nccl, xccl"):
        device.choose_backend(backend)


def test_the_visible_devices_are_told_by_identity_in_the_order_of_their_indices(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 2)
    monkeypatch.setattr(device, "_identity", lambda kind, index: f"GPU-{index}")
    assert device.visible("nccl") == ["GPU-0", "GPU-1"]
    assert device.numbered("nccl", 1) == torch.device("cuda", 1)


def test_devices_that_name_themselves_alike_are_told_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 2)
    monkeypatch.setattr(device, "_identity", lambda kind, index: "GPU-XX no device mask is set")
    assert len(set(device.visible("nccl"))) == 2


@pytest.mark.parametrize(("gpus", "seen", "told"), [(4, 0, True), (4, 4, False), (0, 0, False)])
def test_gpus_that_torch_cannot_use_are_told(gpus: int, seen: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: seen)
    monkeypatch.setattr("utils.launch.gpus.count_gpus", lambda: gpus)
    assert ("has 4 GPU(s)" in device.unused()) == told


def test_an_instance_of_a_shared_gpu_is_told_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert [device._identity("cuda", index) for index in range(2)] == ["MIG-a", "MIG-b"]


def test_the_mask_is_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 4)
    monkeypatch.setattr(device, "_identity", lambda kind, index: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    device.visible("nccl")
    device.pin(torch.device("cpu"))
    assert device.masks() == "CUDA_VISIBLE_DEVICES=4,5,6,7"
