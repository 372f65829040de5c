"""Check the health of NVIDIA GPUs: memory in use, errors, throttling, temperature.

The thresholds are from NVIDIA's documentation; this check has not run on hardware yet.
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
Columns of nvidia-smi: `nvidia-smi --help-query-gpu` and
https://docs.nvidia.com/deploy/nvidia-smi/index.html
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ....host import gpus as host_gpus
from ..check import Check, Finding, Level, Ranks, Reported

_USED_SHARE = 0.05  # share of the memory, before any rank uses the GPU
_NVIDIA_SMI_SECONDS = 20.0
# Exit statuses: wrong argument, not supported, not permitted, no match, no library or function
_NOT_A_GPU = (2, 3, 4, 6, 12, 13)
_QUERIES = {
    "gpu": "index,name,uuid,pci.bus_id,memory.total,memory.used,"
    "ecc.errors.uncorrected.volatile.total,retired_pages.pending,clocks_throttle_reasons.active,"
    "clocks.sm,clocks.max.sm,temperature.gpu,power.draw",
    "remapped-rows": "gpu_uuid,remapped_rows.pending,remapped_rows.failure",
    "compute-apps": "gpu_uuid,pid",
}
_SLOWING = {  # nvmlClocksEventReasons that a healthy GPU does not show
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake by the power supply",
}


@dataclass
class GpuFacts:
    """The GPUs that this rank sees, each with the fields of Gpu.

    problem: nvidia-smi's message if it fails, as it does after the loss of a GPU. lost:
    addresses of GPUs that the driver has but nvidia-smi does not list.
    """

    gpus: list[dict[str, Any]]
    problem: str = ""
    lost: list[str] = field(default_factory=list)


class Gpus(Check[GpuFacts]):
    """Health of the GPUs."""

    name = "GPUs"
    per = "rank"
    quick = True
    seconds = 60.0
    facts = GpuFacts

    def collect(self, ranks: Ranks) -> GpuFacts:
        """Read the GPUs that this rank sees."""
        if host_gpus.gpu_vendor() != "nvidia":
            return GpuFacts([])
        visible = host_gpus.visible_gpu_addresses(os.environ)
        try:
            gpus = read_gpus()
        except NvidiaSmiError as error:
            return GpuFacts([], str(error))
        seen = [gpu for gpu in gpus if not all(visible) or gpu.address in visible or not visible]
        listed = {gpu.address for gpu in gpus}
        lost = (
            [address for address in visible if address and address.lower() not in listed]
            if gpus
            else []
        )
        return GpuFacts([asdict(gpu) for gpu in seen], lost=lost)

    def conclude(self, reported: Sequence[Reported[GpuFacts]]) -> Iterator[Finding]:
        """Report each GPU that is not healthy."""
        seen: dict[tuple[str, str], Gpu] = {}
        findings: list[Finding] = []
        for report in reported:
            host = report.place.host
            for row in report.facts.gpus:
                gpu = Gpu(**row)
                seen.setdefault((host, gpu.uuid or gpu.address or str(gpu.index)), gpu)
        problems = {
            (report.place.host, report.facts.problem) for report in reported if report.facts.problem
        }
        for host, problem in sorted(problems):
            findings.append(
                Finding(
                    Level.BAD,
                    f"nvidia-smi fails on {host}: {problem}. Expected the state of each GPU",
                    f"Exclude {host}, and report it: a lost GPU needs a reset or a reboot",
                    hosts=(host,),
                    exclude=True,
                )
            )
        lost = {
            (report.place.host, address) for report in reported for address in report.facts.lost
        }
        for host, address in sorted(lost):
            findings.append(
                Finding(
                    Level.BAD,
                    f"nvidia-smi does not list the GPU {address} of {host}, which the driver has",
                    f"Exclude {host}, and report it: a lost GPU needs a reset or a reboot",
                    hosts=(host,),
                    exclude=True,
                )
            )
        for (host, _), gpu in seen.items():
            findings += _of_gpu(host, gpu)
        yield from findings
        if seen and not findings:
            names = ", ".join(sorted({gpu.name for gpu in seen.values() if gpu.name}))
            hottest = max((gpu.temperature or 0 for gpu in seen.values()), default=0)
            yield Finding(
                Level.GOOD,
                f"{len(seen)} GPU{'s' * (len(seen) > 1)} ({names}): no errors, not throttled, "
                f"memory free, at most {hottest} degrees Celsius",
            )


def _of_gpu(host: str, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index} of {host}"
    if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > _USED_SHARE * gpu.memory_bytes:
        ids = ", ".join(map(str, gpu.processes))
        by = f"by other processes ({ids})" if ids else "by processes that are not visible here"
        yield Finding(
            Level.WARNING,
            f"{name}: {gpu.used_bytes / 1e9:.1f} of {gpu.memory_bytes / 1e9:.1f} GB are in use "
            f"{by}; expected an unused GPU",
            f"End them if they are yours (`nvidia-smi` on {host}); otherwise exclude {host}",
            hosts=(host,),
            exclude=True,
        )
    if gpu.uncorrected_errors:
        yield Finding(
            Level.BAD,
            f"{name} has had {gpu.uncorrected_errors} uncorrectable ECC errors since the driver "
            "was loaded; expected none",
            f"Exclude {host}; the GPU needs a reset (`nvidia-smi -q -d ECC`)",
            hosts=(host,),
            exclude=True,
        )
    if gpu.rows_failed:
        yield Finding(
            Level.BAD,
            f"{name}: remapping of a damaged memory row has failed",
            f"Exclude {host}; the GPU has to be replaced (`nvidia-smi -q -d ROW_REMAPPER`)",
            hosts=(host,),
            exclude=True,
        )
    elif gpu.rows_pending or gpu.pages_pending:
        what = "a memory row waits to be remapped" if gpu.rows_pending else "pages wait to retire"
        yield Finding(
            Level.WARNING,
            f"{name}: {what}, which takes effect at the next reset",
            f"Ask for a reset of the GPU on {host}; exclude {host} until then",
            hosts=(host,),
            exclude=True,
        )
    slowing = [text for bit, text in _SLOWING.items() if (gpu.throttle_reasons or 0) & bit]
    if slowing:
        yield Finding(
            Level.WARNING,
            f"{name} is slowed down by {' and '.join(slowing)}: {gpu.clock_mhz} of "
            f"{gpu.max_clock_mhz} MHz, {gpu.temperature} degrees Celsius, {gpu.power_watts} W",
            f"Exclude {host}, and report it: check cooling and power supply",
            hosts=(host,),
            exclude=True,
        )


# nvidia-smi --------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """One GPU. A field is None if this GPU, driver or user does not show it.

    address: PCI address, "0000:41:00.0". throttle_reasons: a mask of nvmlClocksEventReasons.
    processes: ids of processes that compute on it.
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


class NvidiaSmiError(RuntimeError):
    """nvidia-smi fails or does not respond; the message has its own words."""


def read_gpus() -> list[Gpu]:
    """Return all GPUs of this host that the driver shows; empty without nvidia-smi.

    Raises NvidiaSmiError if nvidia-smi reports that it cannot reach a GPU.
    """
    return parse(
        {
            query: _output(f"--query-{query}={columns}", "--format=csv,noheader,nounits")
            for query, columns in _QUERIES.items()
        }
    )


def _output(*words: str) -> str:
    """Return nvidia-smi's output; "" without nvidia-smi, or if it does not know a column."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=False,
        )
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"it has not responded for {_NVIDIA_SMI_SECONDS:.0f} s") from None
    if not done.returncode:
        return done.stdout
    if done.returncode in _NOT_A_GPU:
        return ""
    said = " ".join(f"{done.stdout} {done.stderr}".split())[:300].rstrip(".")
    raise NvidiaSmiError(said or f"exit status {done.returncode}")


def parse(outputs: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs in the outputs of the queries "gpu", "remapped-rows" and "compute-apps"."""
    rows = {
        query: [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
        for query, text in outputs.items()
    }
    found = []
    for cells in rows["gpu"]:
        row = dict(zip(_QUERIES["gpu"].split(","), cells, strict=True))
        remapped = [columns for columns in rows["remapped-rows"] if columns[0] == row["uuid"]]
        found.append(
            Gpu(
                int(row["index"]),
                row["name"],
                row["uuid"],
                row["pci.bus_id"].lower()[-12:],  # "00000000:41:00.0" has 16 characters
                _mebibytes(row["memory.total"]),
                _mebibytes(row["memory.used"]),
                processes=[int(pid) for uuid, pid in rows["compute-apps"] if uuid == row["uuid"]],
                uncorrected_errors=_number(row["ecc.errors.uncorrected.volatile.total"]),
                pages_pending=row["retired_pages.pending"] == "Yes",
                rows_pending=any(columns[1] in ("1", "Yes") for columns in remapped),
                rows_failed=any(columns[2] in ("1", "Yes") for columns in remapped),
                clock_mhz=_number(row["clocks.sm"]),
                max_clock_mhz=_number(row["clocks.max.sm"]),
                throttle_reasons=_number(row["clocks_throttle_reasons.active"]),
                power_watts=row["power.draw"],
                temperature=_number(row["temperature.gpu"]),
            )
        )
    return found


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number << 20


def _number(text: str) -> int | None:
    """Return a number such as "81920" or "0x4"; None for "[N/A]" and similar text."""
    return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else None
