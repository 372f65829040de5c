"""List the variables that hide devices of this host from a process."""

from __future__ import annotations

import os

MASKS_OF = {  # vendor -> variables that hide its devices
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": (
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "CUDA_VISIBLE_DEVICES",
    ),
    "intel": ("ZE_AFFINITY_MASK",),
}
VENDORS = tuple(MASKS_OF)
MASKS = tuple(dict.fromkeys(name for names in MASKS_OF.values() for name in names))


def set_masks() -> str:
    """Return the variables that hide devices and are set, for messages."""
    found = [f"{name}={os.environ[name]}" for name in MASKS if name in os.environ]
    return " ".join(found) or "no device mask is set"
