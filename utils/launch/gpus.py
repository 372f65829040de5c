"""How many GPUs this host shows to a process, without loading torch or a driver's library.

Not here: which of them is a rank's (device.py).
"""
from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

# Variables that hide devices: of each kind the first that is set counts.
NVIDIA_MASKS = ("CUDA_VISIBLE_DEVICES",)
AMD_MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
INTEL_MASKS = ("ZE_AFFINITY_MASK",)
VENDORS = ("nvidia", "amd", "intel")
MASKS = tuple(dict.fromkeys(NVIDIA_MASKS + AMD_MASKS + INTEL_MASKS))


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """GPUs of the first kind found (NVIDIA, AMD, Intel) that the masks leave visible; 0 where there is none.

    root: the folder that holds proc, dev and sys.
    """
    vendor = gpu_vendor(root)
    if vendor is None:
        return 0
    count, masks = _KINDS[vendor]
    return min([count(root), *(_entries(environ[name]) for name in masks if name in environ)])


def gpu_vendor(root: Path = Path("/")) -> str | None:
    """Whose GPUs this host has, one of VENDORS, whatever the masks hide; None where there is none."""
    return next((vendor for vendor, (count, _) in _KINDS.items() if count(root)), None)


def _entries(mask: str) -> int:
    """The devices that a mask leaves: "0,2" -> 2, "" and "-1" -> 0; what follows an invalid entry does not count."""
    found = 0
    for entry in mask.split(","):
        if not entry.strip() or entry.strip().startswith("-") or entry.strip() == "NoDevFiles":
            break
        found += 1
    return found


def _nvidia(root: Path) -> int:
    return (_names(root / "proc/driver/nvidia/gpus", r"[0-9a-fA-F:.]+")
            or _names(root / "dev", r"nvidia\d+"))


def _amd(root: Path) -> int:
    """Nodes of the KFD topology with compute units; those of the CPUs have none."""
    found = 0
    with contextlib.suppress(OSError):
        for node in (root / "sys/class/kfd/kfd/topology/nodes").iterdir():
            with contextlib.suppress(OSError):
                simd = re.search(r"^simd_count (\d+)$", (node / "properties").read_text(), re.MULTILINE)
                found += bool(simd and int(simd[1]))
    return found


def _intel(root: Path) -> int:
    """Cards of the data-centre line; a laptop's graphics by the same driver is no accelerator for training."""
    found = 0
    for card in (root / "sys/class/drm").glob("card[0-9]*"):
        with contextlib.suppress(OSError):
            vendor, device = ((card / "device" / name).read_text().strip() for name in ("vendor", "device"))
            found += card.name[4:].isdigit() and vendor == "0x8086" and device.startswith("0x0b")
    return found


def _names(folder: Path, pattern: str) -> int:
    with contextlib.suppress(OSError):
        return sum(re.fullmatch(pattern, entry.name) is not None for entry in folder.iterdir())
    return 0


_KINDS: dict[str, tuple[Callable[[Path], int], tuple[str, ...]]] = dict(zip(
    VENDORS, ((_nvidia, NVIDIA_MASKS), (_amd, AMD_MASKS), (_intel, INTEL_MASKS)), strict=True))
