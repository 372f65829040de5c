"""Which accelerator is mine, and which backend goes with it: CUDA and ROCm (nccl), Intel XPU (xccl), CPU (gloo).

The visible devices are those that the scheduler's mask leaves; the mask itself is never changed.
"""
from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

from .launchers import LaunchError

BACKENDS = {"gloo": "cpu", "nccl": "cuda", "xccl": "xpu"}
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
          "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Choice:
    device: torch.device
    backend: str
    identity: str  # the same for two ranks of one host exactly when they hold the same device; empty on CPU


def choose_backend(backend: str | None) -> str:
    """The backend to use: the one asked for, else the one of the accelerator that torch sees, else gloo.

    LaunchError when a GPU's backend is asked for and torch sees no such GPU; ValueError for an unknown name.
    """
    if backend is None:
        if _count("cuda"):
            return "nccl"
        return "xccl" if _count("xpu") else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected None or one of {', '.join(BACKENDS)}")
    kind = BACKENDS[backend]
    if kind != "cpu" and not _count(kind):
        raise LaunchError(f"backend {backend} was asked for, but torch {torch.__version__} sees no {kind} device on "
                          f"{socket.gethostname()} ({masks()}). Ask the scheduler for GPUs, install a torch build for "
                          "them, or leave the backend out to use gloo")
    return backend


def choose(backend: str, local_rank: int, local_world_size: int) -> Choice:
    """The device of this rank for `backend`, of which the caller makes it current with `pin`.

    One visible device: that one. At least as many as ranks on this host: the one of the local rank. Otherwise the
    mask and the number of ranks contradict each other, which is a LaunchError.
    """
    kind = BACKENDS[backend]
    if kind == "cpu":
        return Choice(torch.device("cpu"), backend, "")
    visible = _count(kind)
    index = pick(visible, local_rank, local_world_size, masks())
    return Choice(torch.device(kind, index), backend, _identity(kind, index))


def pick(visible: int, local_rank: int, local_world_size: int, mask: str) -> int:
    """The index of this rank's device among `visible` ones."""
    if visible == 1:
        return 0
    if visible >= local_world_size:
        return local_rank
    raise LaunchError(f"local rank {local_rank} on {socket.gethostname()} sees {visible} GPUs for {local_world_size} "
                      f"ranks ({mask}); expected one GPU, or one for each rank of the host. Start at most {visible} "
                      "ranks per host, ask for more GPUs, or let the launcher give each rank its own")


def pin(device: torch.device) -> None:
    """Make `device` the current one of this process."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def masks() -> str:
    """The variables that hide devices, for messages."""
    return " ".join(f"{name}={os.environ[name]}" for name in _MASKS if name in os.environ) or "no device mask is set"


def _count(kind: str) -> int:
    module = torch.cuda if kind == "cuda" else getattr(torch, "xpu", None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _identity(kind: str, index: int) -> str:
    masked = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(masked) and masked[index].startswith("MIG-"):
        return masked[index]  # several ranks may share a GPU by its MIG instances, which have one UUID
    properties = torch.get_device_module(torch.device(kind)).get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return str(uuid) if uuid else f"{masks()} index {index}"
