"""Which of the visible devices is this rank's, and which backend goes with it."""
from __future__ import annotations

import pytest
import torch

from utils import device
from utils.launchers import LaunchError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 0)


@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_one_visible_device_is_everybodys_own(local_rank: int) -> None:
    assert device.pick(1, local_rank, 4, "CUDA_VISIBLE_DEVICES=2") == 0


@pytest.mark.parametrize("visible", [4, 8])
@pytest.mark.parametrize("local_rank", range(4))
def test_of_as_many_devices_as_ranks_or_more_each_rank_takes_that_of_its_local_rank(
        visible: int, local_rank: int) -> None:
    assert device.pick(visible, local_rank, 4, "") == local_rank


def test_fewer_devices_than_ranks_are_an_error_that_names_rank_counts_and_mask() -> None:
    with pytest.raises(LaunchError) as caught:
        device.pick(2, 3, 4, "CUDA_VISIBLE_DEVICES=2,3")
    for part in ("local rank 3", "sees 2 GPUs for 4 ranks", "CUDA_VISIBLE_DEVICES=2,3"):
        assert part in str(caught.value)


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
    assert device.choose("gloo", 3, 4) == device.Choice(torch.device("cpu"), "gloo", "")
    assert device.choose_backend("gloo") == "gloo"


@pytest.mark.parametrize("backend", ["mpi", "NCCL", ""])
def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones(backend: str) -> None:
    with pytest.raises(ValueError, match="expected None or one of gloo, nccl, xccl"):
        device.choose_backend(backend)


def test_each_rank_of_a_host_gets_its_own_device_and_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 2)
    monkeypatch.setattr(device, "_identity", lambda kind, index: f"GPU-{index}")
    chosen = [device.choose("nccl", local_rank, 2) for local_rank in range(2)]
    assert chosen == [device.Choice(torch.device("cuda", index), "nccl", f"GPU-{index}") for index in range(2)]


def test_an_instance_of_a_shared_gpu_is_told_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert [device._identity("cuda", index) for index in range(2)] == ["MIG-a", "MIG-b"]


def test_the_mask_is_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count", lambda kind: 4)
    monkeypatch.setattr(device, "_identity", lambda kind, index: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    device.choose("nccl", 2, 4)
    device.pin(torch.device("cpu"))
    assert device.masks() == "CUDA_VISIBLE_DEVICES=4,5,6,7"
