"""Count the GPUs that this host shows to a process, without torch or a driver's library."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Variables that hide devices.
NVIDIA_MASKS = ("CUDA_VISIBLE_DEVICES",)
AMD_MASKS = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "CUDA_VISIBLE_DEVICES",
)
INTEL_MASKS = ("ZE_AFFINITY_MASK",)
VENDORS = ("nvidia", "amd", "intel")
MASKS = tuple(dict.fromkeys(NVIDIA_MASKS + AMD_MASKS + INTEL_MASKS))


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Count the GPUs of the first vendor found that the masks leave visible; 0 without GPUs.

    root: the folder that holds proc, dev and sys.
    """
    vendor = gpu_vendor(root)
    if vendor is None:
        return 0
    count, masks = _BY_VENDOR[vendor]
    masked = [_count_entries(environ[name]) for name in masks if name in environ]
    return min([count(root), *masked])


def gpu_vendor(root: Path = Path("/")) -> str | None:
    """Return the vendor of this host's GPUs, one of VENDORS, whatever the masks hide."""
    return next((vendor for vendor, (count, _) in _BY_VENDOR.items() if count(root)), None)


def visible_gpu_addresses(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of the GPUs that the masks leave visible, in the order of the masks.

    An unknown address is "".
    """
    vendor = gpu_vendor(root)
    if vendor == "nvidia":
        addresses = list(_nvidia_addresses(root))
        masks = [environ.get(name) for name in NVIDIA_MASKS]
    elif vendor == "amd":
        addresses = list(_amd_addresses(root))
        by_index = [environ[name] for name in AMD_MASKS[1:] if name in environ]
        masks = [environ.get(AMD_MASKS[0]), *by_index[:1]]  # by_index: other names of one mask
    elif vendor == "intel" and not any(name in environ for name in INTEL_MASKS):
        return intel_addresses(root)
    else:
        return []
    for mask in masks:
        if mask is not None:
            entries = mask.split(",")[: _count_entries(mask)]
            addresses = [_entry_address(entry.strip(), addresses, root) for entry in entries]
    return addresses


def _entry_address(entry: str, addresses: Sequence[str], root: Path) -> str:
    """Return the PCI address for an entry of a mask, which is an index or a UUID."""
    if entry.isdecimal():
        return addresses[int(entry)] if int(entry) < len(addresses) else ""
    return nvidia_address(entry, root) if entry.startswith("GPU-") else ""


def intel_addresses(root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of Intel's data-centre GPUs, such as "0000:18:00.0", in order."""
    found = []
    for device in (root / "sys/class/drm").glob("card[0-9]*"):
        with contextlib.suppress(OSError):
            vendor_id = (device / "device" / "vendor").read_text().strip()
            device_id = (device / "device" / "device").read_text().strip()
            is_connector = not device.name[4:].isdigit()  # "card0-HDMI-A-1"
            # The same driver serves the graphics of laptops, which is no accelerator.
            if not is_connector and vendor_id == "0x8086" and device_id.startswith("0x0b"):
                found.append((device / "device").resolve().name)
    return sorted(found)


def nvidia_address(uuid: str, root: Path = Path("/")) -> str:
    """Return the PCI address of the GPU with a UUID; "" where the driver does not list it."""
    with contextlib.suppress(OSError):
        for gpu in (root / "proc/driver/nvidia/gpus").iterdir():
            # "GPU UUID:        GPU-3f2a..."; torch leaves "GPU-" out
            if uuid and uuid.removeprefix("GPU-") in (gpu / "information").read_text():
                return gpu.name
    return ""


def _nvidia_addresses(root: Path) -> Iterator[str]:
    """Yield the PCI address of each GPU that this process may use, in CUDA's order.

    The driver lists all GPUs of the host. The cgroup of a job may deny access to some of them;
    CUDA_VISIBLE_DEVICES then counts the others only.
    """
    gpus = root / "proc/driver/nvidia/gpus"
    has_devices = bool(_names(root / "dev", r"nvidia\d+"))
    for address in sorted(_names(gpus, r"[0-9a-fA-F:.]+")):
        with contextlib.suppress(OSError):
            text = (gpus / address / "information").read_text()
            minor = re.search(r"Device Minor:\s*(\d+)", text)
            if not (minor and has_devices) or os.access(root / f"dev/nvidia{minor[1]}", os.W_OK):
                yield address


def _count_entries(mask: str) -> int:
    """Count the devices that a mask leaves: "0,2" -> 2, "" and "-1" -> 0.

    Drivers ignore everything after an invalid entry.
    """
    found = 0
    for entry in map(str.strip, mask.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        found += 1
    return found


def _count_nvidia(root: Path) -> int:
    by_driver = _names(root / "proc/driver/nvidia/gpus", r"[0-9a-fA-F:.]+")
    return len(by_driver or _names(root / "dev", r"nvidia\d+"))


def _count_amd(root: Path) -> int:
    return sum(1 for _ in _amd_addresses(root))


def _amd_addresses(root: Path) -> Iterator[str]:
    """Yield the PCI address of each node of the KFD topology that has compute units.

    CPUs are nodes without them.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for name in sorted(_names(nodes, r"\d+"), key=int):
        with contextlib.suppress(OSError):
            text = (nodes / name / "properties").read_text()
            values = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, re.M)}
            if values.get("simd_count"):
                place, domain = values.get("location_id", 0), values.get("domain", 0)
                yield f"{domain:04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"


def _count_intel(root: Path) -> int:
    return len(intel_addresses(root))


def _names(folder: Path, pattern: str) -> list[str]:
    """Return the names in a folder that match a pattern."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    return []


_BY_VENDOR: dict[str, tuple[Callable[[Path], int], tuple[str, ...]]] = {
    "nvidia": (_count_nvidia, NVIDIA_MASKS),
    "amd": (_count_amd, AMD_MASKS),
    "intel": (_count_intel, INTEL_MASKS),
}
