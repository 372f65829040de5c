"""Choose the backend and this rank's device: CUDA and ROCm (nccl), Intel XPU (xccl), CPU (gloo).

The scheduler's mask decides which devices are visible. The mask itself is never changed.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from ..errors import LaunchError
from .cores import pci_node
from .masks import MASKS_OF, set_masks

BACKENDS = {"gloo": "cpu", "nccl": "cuda", "xccl": "xpu"}  # backend -> device type


def choose_backend(backend: str | None) -> str:
    """Return `backend`, else the backend of the accelerator that torch sees, else gloo.

    Raises LaunchError if the backend needs an accelerator that torch does not see.
    """
    if backend is None:
        return "nccl" if _count("cuda") else "xccl" if _count("xpu") else "gloo"
    device_type = BACKENDS[backend]
    if device_type != "cpu" and not _count(device_type):
        raise LaunchError(
            f"backend {backend} was requested, but torch {torch.__version__} sees no "
            f"{device_type} device on {socket.gethostname()} ({set_masks()}). Request GPUs from "
            "the scheduler, install a torch build for them, or leave the backend out to use gloo",
            host=socket.gethostname(),
        )
    return backend


def visible_devices(backend: str) -> list[str]:
    """Return an identity of each device that this process may use, in index order.

    Empty for the CPU. Two ranks on one host with the same identity share a device.
    """
    device_type = BACKENDS[backend]
    found = [_identity(device_type, index) for index in range(_count(device_type))]
    if len(set(found)) == len(found):
        return found
    # Some AMD drivers give all GPUs one placeholder, or a GPU's partitions the UUID of the GPU.
    return [f"{identity} index {index}" for index, identity in enumerate(found)]


def device_nodes(backend: str) -> list[int | None]:
    """Return the NUMA node of each device in visible_devices(backend); None where unknown."""
    device_type = BACKENDS[backend]
    count = _count(device_type)
    addresses = (_pci_address(device_type, index, count) for index in range(count))
    return [pci_node(address) if address else None for address in addresses]


def device_at(backend: str, index: int | None) -> torch.device:
    """Return the visible device with an index. index: None for the CPU."""
    device_type = BACKENDS[backend]
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def pin(device: torch.device) -> None:
    """Make `device` this process's current device."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def unused_gpus() -> str:
    """Return a warning if this host has GPUs that its torch cannot use, else ""."""
    from . import gpus

    count = gpus.count_gpus()
    if not count or _count("cuda") or _count("xpu"):
        return ""
    return (
        f"{socket.gethostname()} has {count} GPU(s) ({gpus.gpu_vendor()}), but torch "
        f"{torch.__version__} detects none; training runs on CPUs. Install a torch build for them, "
        "or pass backend='gloo' to train on CPUs without this warning"
    )


def _count(device_type: str) -> int:
    """Return the number of visible devices of a type; 0 if torch does not support it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return 0
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _properties(device_type: str, index: int) -> Any:
    return torch.get_device_module(torch.device(device_type)).get_device_properties(index)


def _identity(device_type: str, index: int) -> str:
    # MIG instances of one GPU share its UUID, but may belong to several ranks.
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(mask) and mask[index].startswith("MIG-"):
        return mask[index]

    properties = _properties(device_type, index)
    uuid = getattr(properties, "uuid", None)
    if not uuid:
        return f"{set_masks()} index {index}"
    return f"{uuid} {set_masks()}" if torch.version.hip else str(uuid)


def _pci_address(device_type: str, index: int, count: int) -> str:
    """Return the PCI address of a device, such as "0000:c1:00.0"; "" if it is unknown.

    count: number of visible devices.
    """
    from . import gpus  # not needed for a start on CPUs

    if device_type == "xpu":  # torch does not report it; each tile may be a device
        addresses = gpus.intel_addresses()
        whole = bool(addresses) and count % len(addresses) == 0
        masked = any(name in os.environ for name in MASKS_OF["intel"])
        return addresses[index * len(addresses) // count] if whole and not masked else ""

    properties = _properties(device_type, index)
    if hasattr(properties, "pci_domain_id"):
        bus, number = properties.pci_bus_id, properties.pci_device_id
        return f"{properties.pci_domain_id:04x}:{bus:02x}:{number:02x}.0"
    return gpus.nvidia_address(str(properties.uuid)) if hasattr(properties, "uuid") else ""
