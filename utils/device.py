"""Which accelerator is mine, and which backend goes with it: CUDA and ROCm (nccl), Intel XPU (xccl), CPU (gloo).

The visible devices are those that the scheduler's mask leaves; the mask itself is never changed.
"""
from __future__ import annotations

import os
import socket

import torch

from .launchers import LaunchError

BACKENDS = {"gloo": "cpu", "nccl": "cuda", "xccl": "xpu"}
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
          "ZE_AFFINITY_MASK")


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


def visible(backend: str) -> list[str]:
    """The devices that this process may use with `backend`, each by what tells it from the others of its host.

    In the order of their indices; empty for the CPU.
    """
    kind = BACKENDS[backend]
    found = [] if kind == "cpu" else [_identity(kind, index) for index in range(_count(kind))]
    # Some drivers of AMD give all GPUs one placeholder, or the partitions of a GPU its own UUID.
    return found if len(set(found)) == len(found) else [f"{one} index {index}" for index, one in enumerate(found)]


def numbered(backend: str, index: int | None) -> torch.device:
    """The device of that index among the visible ones; None for the CPU."""
    return torch.device(BACKENDS[backend]) if index is None else torch.device(BACKENDS[backend], index)


def pin(device: torch.device) -> None:
    """Make `device` the current one of this process."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def unused() -> str:
    """What to tell where this host shows GPUs to the process that its torch cannot use; empty where there are none."""
    from .launch.gpus import count_gpus, gpu_vendor

    count = count_gpus()
    if not count or any(map(_count, ("cuda", "xpu"))):
        return ""
    return (f"{socket.gethostname()} has {count} GPU(s) by {gpu_vendor()}, but torch {torch.__version__} sees none: "
            "this trains on CPUs. Install a torch build for them, or ask for backend gloo if this is meant")


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
    if uuid and torch.version.hip:
        return f"{uuid} {masks()}"
    return str(uuid) if uuid else f"{masks()} index {index}"
