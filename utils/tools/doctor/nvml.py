"""Read the health of NVIDIA GPUs through the driver's library, libnvidia-ml.so.1, without torch.

Functions, structures and constants are those of nvml.h:
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
_CLOCK_SM = 1  # NVML_CLOCK_SM
_TEMPERATURE_GPU, _SLOWDOWN_THRESHOLD = 0, 1
_UNCORRECTED, _VOLATILE = 1, 0  # since the driver was loaded
_NVLINK_ERRORS = {0: "replay", 1: "recovery", 2: "CRC"}
_MAX_PROCESSES = 64
_NOT_KNOWN = (1 << 64) - 1  # memory of a process in a container


@dataclass
class Gpu:
    """One GPU. None: this GPU, driver or user does not show it.

    address: on the PCI bus, "0000:41:00.0". throttle_reasons: a mask of nvmlClocksEventReasons.
    processes: ids and bytes of those that compute. nvlinks: of each link, whether it is up.
    """

    index: int
    name: str = ""
    uuid: str = ""
    address: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    uncorrected_errors: int | None = None
    pages_pending: bool | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    persistence: bool | None = None
    nvlinks: list[bool] = field(default_factory=list)
    nvlink_errors: dict[str, int] = field(default_factory=dict)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy_bus_id", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem")),
        ("bus_id", ctypes.c_char * 32),
    ]


def read_gpus() -> list[Gpu] | None:
    """Return all GPUs of this host that the driver shows; None where there is no driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [_Device(library, index).read() for index in range(count.value)]
    finally:
        library.nvmlShutdown()


class _Device:
    """One device of the library. What it does not support is None."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library, self._index = library, index
        self._handle = ctypes.c_void_p()
        library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(self._handle))

    def _call(self, function: str, *arguments: object) -> bool:
        """Call a function of the device; return whether it succeeded."""
        found = getattr(self._library, function, None)  # None: an older driver
        return found is not None and found(self._handle, *arguments) == 0

    def _number(self, function: str, *arguments: int, wide: bool = False) -> int | None:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        words = [ctypes.c_uint(one) for one in arguments]
        return int(value.value) if self._call(function, *words, ctypes.byref(value)) else None

    def _flag(self, function: str, *arguments: int) -> bool | None:
        value = self._number(function, *arguments)
        return None if value is None else bool(value)

    def _text(self, function: str) -> str:
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode() if self._call(function, buffer, ctypes.c_uint(96)) else ""

    def read(self) -> Gpu:
        """Read everything."""
        gpu = Gpu(self._index, self._text("nvmlDeviceGetName"), self._text("nvmlDeviceGetUUID"))
        pci, memory = _Pci(), _Memory()
        if self._call("nvmlDeviceGetPciInfo_v3", ctypes.byref(pci)):
            gpu.address = pci.bus_id.decode().lower()[-12:]  # "00000000:41:00.0" has 16
        if self._call("nvmlDeviceGetMemoryInfo", ctypes.byref(memory)):
            gpu.memory_bytes, gpu.used_bytes = memory.total, memory.used
        gpu.processes = self._processes()
        gpu.uncorrected_errors = self._number(
            "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE, wide=True
        )
        gpu.pages_pending = self._flag("nvmlDeviceGetRetiredPagesPendingStatus")
        rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failure
        if self._call("nvmlDeviceGetRemappedRows", *map(ctypes.byref, rows)):
            gpu.rows_pending, gpu.rows_failed = bool(rows[2].value), bool(rows[3].value)
        gpu.clock_mhz = self._number("nvmlDeviceGetClockInfo", _CLOCK_SM)
        gpu.max_clock_mhz = self._number("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
        gpu.throttle_reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True)
        power = self._number("nvmlDeviceGetPowerUsage")  # milliwatts
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit")
        gpu.power_watts = None if power is None else power / 1e3
        gpu.power_limit_watts = None if limit is None else limit / 1e3
        gpu.temperature = self._number("nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
        gpu.slowdown_temperature = self._number(
            "nvmlDeviceGetTemperatureThreshold", _SLOWDOWN_THRESHOLD
        )
        gpu.persistence = self._flag("nvmlDeviceGetPersistenceMode")
        for link in range(_MAX_NVLINKS):
            is_up = self._flag("nvmlDeviceGetNvLinkState", link)
            if is_up is None:  # there is no such link
                break
            gpu.nvlinks.append(is_up)
            for counter, name in _NVLINK_ERRORS.items():
                errors = self._number("nvmlDeviceGetNvLinkErrorCounter", link, counter, wide=True)
                if errors:
                    gpu.nvlink_errors[name] = gpu.nvlink_errors.get(name, 0) + errors
        return gpu

    def _processes(self) -> list[tuple[int, int | None]]:
        count = ctypes.c_uint(_MAX_PROCESSES)
        processes = (_Process * _MAX_PROCESSES)()
        function = "nvmlDeviceGetComputeRunningProcesses_v3"
        if not self._call(function, ctypes.byref(count), processes):
            return []
        return [
            (one.pid, None if one.used == _NOT_KNOWN else one.used)
            for one in processes[: count.value]
        ]


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
