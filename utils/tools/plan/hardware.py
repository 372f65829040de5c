"""Read the table of accelerators, links and sites: jobs/hardware.yaml."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..submission.paths import JOBS, KIT
from .communication import Link, PlanError

PROGRAM = "plan.py" if (KIT / "scripts" / "plan.py").exists() else "ddpkit plan"
TABLE = JOBS / "hardware.yaml"
_DTYPES: tuple[str, ...] = ("float32", "tf32", "float16", "bfloat16")
_OVERHEAD_SECONDS = 5e-6  # to launch a kernel; an assumption


@dataclass(frozen=True)
class Accelerator:
    """A device as PyTorch counts them."""

    name: str
    memory: float  # bytes that tensors may use: without context, workspaces and gaps
    bandwidth: float  # attainable bytes per second of its memory
    flops: dict[str, float]  # attainable per second, by data type
    source: str

    def seconds(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Return the time of an operation: the limit is arithmetic, memory or the launch."""
        if flops and dtype not in self.flops:
            raise PlanError(
                f"jobs/hardware.yaml has no peak of {self.name} for {dtype}. Expected one of "
                f"{', '.join(self.flops)}. Choose another precision, or give --compute-seconds."
            )
        arithmetic = flops / self.flops[dtype] if flops else 0.0
        return max(arithmetic, moved_bytes / self.bandwidth, _OVERHEAD_SECONDS)


@dataclass(frozen=True)
class Node:
    """What a node of a site has."""

    gpu: str
    gpus_per_node: int
    inside: Link
    between: Link


class Hardware:
    """The table of accelerators, links and sites."""

    def __init__(self, path: Path = TABLE) -> None:
        try:
            import yaml
        except ImportError:
            raise PlanError(
                "PyYAML is not installed, and the table of accelerators is a YAML file. Install "
                "it with `python -m pip install pyyaml`."
            ) from None
        self._table: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))

    def accelerator(self, name: str) -> Accelerator:
        entry, shares = self._entry("accelerators", name), self._table["attainable"]
        flops: dict[str, float] = {
            dtype: entry[dtype] * 1e12 * shares["flops"] for dtype in _DTYPES if dtype in entry
        }
        bandwidth = entry["bandwidth"] * 1e9 * shares["memory_bandwidth"]
        memory = (entry["memory"] * shares["memory"] - sum(self._table["process"].values())) * 1e9
        return Accelerator(name, memory, bandwidth, flops, self._source(entry))

    def memory_note(self, gpu: Accelerator) -> str:
        """Return what the usable memory of a GPU excludes."""
        process = self._table["process"].items()
        return (
            f"Usable on {gpu.name}: {self._table['attainable']['memory']:.0%} of its memory (the "
            "rest is fragmentation), minus the memory that no tensor uses, in GB: "
            f"{', '.join(f'{name} {size}' for name, size in process)} (jobs/hardware.yaml)."
        )

    def link(self, text: str) -> Link:
        """Return a link: "nvlink3", or several in parallel: "4 slingshot-200"."""
        count, _, name = text.rpartition(" ")
        entry = self._entry("links", name)
        return Link(int(count or 1) * entry["bandwidth"] * 1e9, entry["latency"] / 1e6)

    def node(self, site: str) -> Node:
        entry = self._entry("sites", site)
        inside, between = self.link(entry["inside"]), self.link(entry["between"])
        return Node(entry["gpu"], entry["gpus_per_node"], inside, between)

    def has_site(self, site: str) -> bool:
        return site in self._table["sites"]

    def _source(self, entry: dict[str, Any]) -> str:
        page = self._table["sources"][entry["source"]]
        return f"{page['url']} (read {page['read']})"

    def check(self) -> None:
        """Raise KeyError where an entry has no source."""
        for section in ("accelerators", "links", "sites"):
            for entry in self._table[section].values():
                self._source(entry)

    def _entry(self, section: str, name: str) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = self._table[section]
        if name not in entries:
            near = difflib.get_close_matches(name, entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                f"{name!r} is not one of the {section} in {TABLE.name}.{hint} Expected one of "
                f"{', '.join(entries)}."
            )
        return entries[name]
