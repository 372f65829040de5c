"""Identify the GPUs that this rank sees, without torch or a driver's library."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..gpus import MASKS


def identities(addresses: Sequence[str]) -> list[str]:
    """Return an identity of each GPU: its UUID, its PCI address, or its entry in the mask."""
    entries = next((os.environ[name] for name in MASKS if os.environ.get(name)), "").split(",")
    found = []
    for index, address in enumerate(addresses):
        entry = entries[index] if index < len(entries) else str(index)
        found.append((_uuid(address) or address) if address else entry)
    # The partitions of a GPU of AMD have one address.
    seen: Counter[str] = Counter()
    for index, identity in enumerate(found):
        seen[identity] += 1
        if seen[identity] > 1:
            found[index] = f"{identity} partition {seen[identity] - 1}"
    return found


def _uuid(address: str) -> str:
    """Return the UUID of a GPU of NVIDIA, such as "GPU-3f2a..."; "" if it is unknown."""
    try:
        text = Path("/proc/driver/nvidia/gpus", address, "information").read_text()
    except OSError:
        return ""
    words = text.partition("GPU UUID:")[2].split()
    return words[0] if words and "?" not in words[0] else ""


def device_masks() -> str:
    """Return the variables that hide devices, for messages."""
    found = [f"{name}={os.environ[name]}" for name in MASKS if name in os.environ]
    return " ".join(found) or "no device mask is set"
