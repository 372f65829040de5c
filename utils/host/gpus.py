"""Count the GPUs that a process can see on this host, without torch or a driver's library."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import process
from .masks import MASKS_OF

_NVIDIA_GPUS = "proc/driver/nvidia/gpus"


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Count the GPUs that the masks leave visible, of the first vendor found; 0 without GPUs.

    root: the folder that contains proc, dev and sys.
    """
    vendor = gpu_vendor(root)
    if vendor is None:
        return 0
    masked = [_count_entries(environ[name]) for name in MASKS_OF[vendor] if name in environ]
    return min([len(_ADDRESSES[vendor](root)), *masked])


def gpu_vendor(root: Path = Path("/")) -> str | None:
    """Return the vendor of this host's GPUs, one of masks.VENDORS, even if masks hide the GPUs."""
    return next((vendor for vendor, find in _ADDRESSES.items() if find(root)), None)


def visible_gpu_addresses(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of visible GPUs, in the order of the masks.

    An unknown address is "".
    """
    vendor = gpu_vendor(root)
    if vendor is None:
        return []
    addresses = _ADDRESSES[vendor](root)
    masks = [environ[name] for name in MASKS_OF[vendor] if name in environ]
    if vendor == "intel":  # an entry may name a tile
        return [] if masks else addresses
    if vendor == "amd":  # AMD's other variables are one mask
        masks = masks[: 2 if "ROCR_VISIBLE_DEVICES" in environ else 1]
    for mask in masks:
        entries = mask.split(",")[: _count_entries(mask)]
        addresses = [_entry_address(entry.strip(), addresses, root) for entry in entries]
    return addresses


def _entry_address(entry: str, addresses: Sequence[str], root: Path) -> str:
    """Return the PCI address for an entry of a mask: an index or a UUID."""
    if entry.isdecimal():
        return addresses[int(entry)] if int(entry) < len(addresses) else ""
    return nvidia_address(entry, root) if entry.startswith("GPU-") else ""


def intel_addresses(root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of Intel's data-centre GPUs, such as "0000:18:00.0", in order."""
    found = []
    for device in (root / "sys/class/drm").glob("card[0-9]*"):
        vendor_id, device_id = (_read(device / "device" / name) for name in ("vendor", "device"))
        is_connector = not device.name[4:].isdigit()  # "card0-HDMI-A-1"
        # The same driver serves laptop graphics, which are no accelerator.
        if not is_connector and vendor_id == "0x8086" and device_id.startswith("0x0b"):
            found.append((device / "device").resolve().name)
    return sorted(found)


def nvidia_address(uuid: str, root: Path = Path("/")) -> str:
    """Return the PCI address of the GPU with a UUID; "" if the driver does not list it."""
    for address in _names(root / _NVIDIA_GPUS, ".*"):
        # "GPU UUID:        GPU-3f2a..."; torch omits "GPU-"
        if uuid and uuid.removeprefix("GPU-") in _read(
            root / _NVIDIA_GPUS / address / "information"
        ):
            return address
    return ""


def _nvidia_addresses(root: Path) -> list[str]:
    """Return the PCI address of each GPU that this process may use, in CUDA's order.

    The driver lists all GPUs of the host. If the job's cgroup denies access to some of them,
    CUDA_VISIBLE_DEVICES counts only the others. An address that is not listed is "".
    """
    devices = _names(root / "dev", r"nvidia\d+")
    listed = sorted(_names(root / _NVIDIA_GPUS, r"[0-9a-fA-F:.]+"))
    found = []
    for address in listed:
        text = _read(root / _NVIDIA_GPUS / address / "information")
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if not (minor and devices) or os.access(root / f"dev/nvidia{minor[1]}", os.W_OK):
            found.append(address)
    return found if listed else [""] * len(devices)


def _count_entries(mask: str) -> int:
    """Count the devices that a mask leaves: "0,2" -> 2, "" and "-1" -> 0.

    Drivers ignore all entries after an invalid one.
    """
    found = 0
    for entry in map(str.strip, mask.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        found += 1
    return found


def _amd_addresses(root: Path) -> list[str]:
    """Return the PCI address of each KFD topology node with compute units.

    Nodes without them are CPUs.
    """
    found = []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for name in sorted(_names(nodes, r"\d+"), key=int):
        lines = re.findall(r"^(\w+) (\d+)$", _read(nodes / name / "properties"), re.MULTILINE)
        values = {key: int(value) for key, value in lines}
        if values.get("simd_count"):
            place, domain = values.get("location_id", 0), values.get("domain", 0)
            bus, device = place >> 8 & 255, place >> 3 & 31
            found.append(f"{domain:04x}:{bus:02x}:{device:02x}.{place & 7}")
    return found


def _read(path: Path) -> str:
    return process.read(str(path)).decode().strip()


def _names(folder: Path, pattern: str) -> list[str]:
    """Return the names in a folder that match a pattern."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    return []


_ADDRESSES = {"nvidia": _nvidia_addresses, "amd": _amd_addresses, "intel": intel_addresses}


# Messages of a broken GPU, which no program can cause. Source: NVIDIA's table of Xid errors, and
# messages of the CUDA runtime and nvidia-smi.
GPU_ERRORS = (
    "NVRM: Xid",
    "SXid (",
    "uncorrectable ECC error",
    "fallen off the bus",
    "Unable to determine the device handle for GPU",
    "GPU is lost",
)
