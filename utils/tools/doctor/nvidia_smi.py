"""Read the health of NVIDIA GPUs from `nvidia-smi`, without torch.

Its columns: `nvidia-smi --help-query-gpu` and https://docs.nvidia.com/deploy/nvidia-smi/index.html
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SECONDS = 20.0
_QUERIES = {
    "gpu": "index,name,uuid,pci.bus_id,memory.total,memory.used,"
    "ecc.errors.uncorrected.volatile.total,retired_pages.pending,clocks_throttle_reasons.active,"
    "clocks.sm,clocks.max.sm,temperature.gpu,power.draw",
    "remapped-rows": "gpu_uuid,remapped_rows.pending,remapped_rows.failure",
    "compute-apps": "gpu_uuid,pid",
}


@dataclass
class Gpu:
    """One GPU. None: this GPU, driver or user does not show it.

    address: on the PCI bus, "0000:41:00.0". throttle_reasons: a mask of nvmlClocksEventReasons.
    processes: ids of those that compute. nvlinks: how many are up.
    """

    index: int
    name: str = ""
    uuid: str = ""
    address: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    processes: list[int] = field(default_factory=list)
    uncorrected_errors: int | None = None
    pages_pending: bool = False
    rows_pending: bool = False
    rows_failed: bool = False
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    power_watts: str = ""
    temperature: int | None = None
    nvlinks: int = 0


def read_gpus() -> list[Gpu] | None:
    """Return all GPUs of this host that the driver shows; None where nvidia-smi fails."""
    outputs = {
        query: _output(f"--query-{query}={columns}", "--format=csv,noheader,nounits")
        for query, columns in _QUERIES.items()
    }
    return parse(outputs, _output("nvlink", "-s")) if outputs["gpu"] else None


def _output(*words: str) -> str:
    """Return what nvidia-smi prints; "" where it fails or a GPU does not respond."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return done.stdout
    return ""


def parse(outputs: Mapping[str, str], nvlinks: str) -> list[Gpu]:
    """Return the GPUs in the outputs of the queries "gpu", "remapped-rows" and "compute-apps"."""
    rows = {
        query: [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
        for query, text in outputs.items()
    }
    found = []
    for row in rows["gpu"]:
        (
            index,
            name,
            uuid,
            address,
            total,
            used,
            errors,
            pages,
            slowing,
            clock,
            limit,
            hot,
            power,
        ) = row
        remapped = [cells for cells in rows["remapped-rows"] if cells[0] == uuid]
        links = re.search(rf"^GPU {index}:.*((?:\n\s+Link .*)*)", nvlinks, re.MULTILINE)
        found.append(
            Gpu(
                int(index),
                name,
                uuid,
                address.lower()[-12:],  # "00000000:41:00.0" has 16
                _mebibytes(total),
                _mebibytes(used),
                processes=[int(pid) for owner, pid in rows["compute-apps"] if owner == uuid],
                uncorrected_errors=_number(errors),
                pages_pending=pages == "Yes",
                rows_pending=any(cells[1] in ("1", "Yes") for cells in remapped),
                rows_failed=any(cells[2] in ("1", "Yes") for cells in remapped),
                clock_mhz=_number(clock),
                max_clock_mhz=_number(limit),
                throttle_reasons=_number(slowing),
                power_watts=power,
                temperature=_number(hot),
                nvlinks=links[1].count("GB/s") if links else 0,
            )
        )
    return found


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number << 20


def _number(text: str) -> int | None:
    """Return a number such as "81920" or "0x4"; None for "[N/A]" and the like."""
    return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else None


def count_on_bus(root: Path = Path("/")) -> int:
    """Count the NVIDIA GPUs on the PCI bus, also those that the driver has lost."""
    found = 0
    for device in root.glob("sys/bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            # Class 0x0300 and 0x0302 are display controllers; 0x0680 is an NVSwitch.
            found += vendor == "0x10de" and kind.startswith(("0x0300", "0x0302"))
    return found


def xid_errors(lines: Iterator[str]) -> dict[str, list[int]]:
    """Return the Xid errors in lines of the kernel's log, by the PCI address of the GPU."""
    found: dict[str, list[int]] = {}
    for line in lines:
        # "NVRM: Xid (PCI:0000:41:00): 79, pid=1234, GPU has fallen off the bus."
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
        if match:
            address = match[1].lower() + ("" if "." in match[1] else ".0")
            found.setdefault(address, []).append(int(match[2]))
    return found
