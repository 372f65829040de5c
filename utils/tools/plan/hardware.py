"""The table of accelerators, links and sites (jobs/hardware.yaml); all-reduces on these links.

A ring all-reduce of S bytes over N ranks sends 2 (N-1)/N S bytes from each rank in 2 (N-1) messages
(Thakur, Rabenseifner, Gropp 2005, https://doi.org/10.1177/1094342005051521). The bandwidth is
the "busbw" of nccl-tests, in which this factor is already taken out:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.missing_files import why_no_yaml
from ..submission.paths import JOBS
from .figures import seconds_text

if TYPE_CHECKING:
    from .operations import TracedOperation

TABLE = JOBS / "hardware.yaml"
_DTYPES: tuple[str, ...] = ("float32", "tf32", "float16", "bfloat16")
_GIB = 2**30
NARROW = 16  # channels per group; below, a convolution does not use tensor cores
_SHORTEST_KERNEL_SECONDS = 5e-6  # seconds on the GPU; an assumption
# Seconds the CPU needs to start an operation of eager PyTorch, including its views. Measured:
# example 03 with GPT-2's layers and 4 sequences of 1,024 tokens has 1,221 operations in a step,
# which took 33.8 ms on a host with an H100 and 16 CPUs, torch 2.11 (docs/performance.md).
LAUNCH_SECONDS = 33.8e-3 / 1221


class PredictionError(ValueError):
    """A prediction cannot be made: something is missing or wrong. The message says what to do."""


class TooFewSteps(PredictionError):
    """A script ended before two optimizer steps, for example because it has too little data."""


@dataclass(frozen=True)
class Link:
    """A class of links; values are for one direction."""

    bandwidth: float  # bytes per second
    latency: float  # seconds per message


@dataclass(frozen=True)
class Network:
    """The links of a job.

    inside: bandwidth of each GPU to the others of its node. between: bandwidth of a whole node to
    other nodes, over all its network ports. tree: whether the library may use trees, like NCCL;
    gloo uses rings only, and overlaps latency with transfers.
    """

    inside: Link
    between: Link
    gpus_per_node: int
    tree: bool = True

    def all_reduce_seconds(self, size: float, gpus: int) -> float:
        """Return the seconds of one all-reduce of `size` bytes."""
        if gpus <= 1:
            return 0.0
        latency, transfer = self._latency(gpus), sent_bytes(size, gpus) / self.bandwidth(gpus)
        if self.tree:
            return latency + transfer
        # gloo first reduces the blocks, then gathers them. In both passes it sends half of a block
        # while the other half is on its way, and waits for the first half.
        steps = gpus - 1
        return max(transfer + latency / steps, transfer / 2 * (1 + 1 / steps) + latency)

    def bandwidth(self, gpus: int) -> float:
        """Return the bandwidth of the slowest link in the ring."""
        nodes = math.ceil(gpus / self.gpus_per_node)
        if nodes == 1:
            return self.inside.bandwidth
        if self.gpus_per_node == 1:
            return self.between.bandwidth
        return min(self.inside.bandwidth, self.between.bandwidth)

    def _latency(self, gpus: int) -> float:
        nodes = math.ceil(gpus / self.gpus_per_node)
        inside = (gpus - nodes) * self.inside.latency
        ring = 2 * (inside + (nodes - 1) * self.between.latency)
        if not self.tree:
            return ring
        # A tree of nodes; each node has a chain of its GPUs.
        depth = math.ceil(math.log2(nodes))
        chain = (min(gpus, self.gpus_per_node) - 1) * self.inside.latency
        return min(ring, 2 * (chain + depth * self.between.latency))


def sent_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Node:
    """The parts of a node: a site's node, or the usual node for an accelerator.

    inside, between: links in the form of Hardware.link(), such as "4 slingshot-200".
    """

    gpu: str
    gpus_per_node: int
    inside: str
    between: str


@dataclass(frozen=True)
class Attainable:
    """Shares of accelerators' peaks that training attains, fitted to published measurements.

    `python -m tests.published --fit` finds these numbers.
    """

    matmul_float32: float  # share of the peak
    matmul_tensor: float  # share of tensor cores' peak, for wide matrices
    matmul_width: float  # width at which a matrix product attains half of that
    convolution_float32: float
    convolution_narrow: float  # share of the float32 peak, with few channels per group
    bandwidth: float  # share of the memory bandwidth
    bandwidth_gddr: float  # share on cards with GDDR and a large cache
    layout_float32: float  # bytes moved for tensor cores' layout, per byte of the convolution
    layout_16_bit: float

    def matmul(self, width: int) -> float:
        """Return the share of the peak of tensor cores."""
        return self.matmul_tensor * width / (width + self.matmul_width)


@dataclass(frozen=True)
class Accelerator:
    """A device, as PyTorch counts devices."""

    name: str
    memory: float  # bytes for tensors: without context, workspaces and gaps
    bandwidth: float  # peak, bytes per second
    flops: dict[str, float]  # data type -> peak per second
    gddr: bool
    attainable: Attainable
    source: str
    node: Node  # its usual node

    def seconds(self, operation: TracedOperation) -> float:
        """Return an operation's seconds, limited by arithmetic, memory or the kernel's start."""
        _, kind, flops, moved, dtype, width, channels_last = operation
        if dtype == "tf32" and dtype not in self.flops:
            dtype = "float32"
        if flops and dtype not in self.flops:
            raise PredictionError(
                f"jobs/hardware.yaml has no peak of {self.name} for {dtype}. Expected one of "
                f"{', '.join(self.flops)}. Choose another precision, or give --compute-seconds."
            )
        shares, is_convolution = self.attainable, kind == "convolution"
        arithmetic, traffic = 0.0, float(moved)
        if flops and is_convolution and width < NARROW:
            arithmetic = flops / (self.flops["float32"] * shares.convolution_narrow)
        elif flops and dtype == "float32":
            share = shares.convolution_float32 if is_convolution else shares.matmul_float32
            arithmetic = flops / (self.flops[dtype] * share)
        elif flops:
            share = shares.matmul_tensor if is_convolution else shares.matmul(max(1, width))
            arithmetic = flops / (self.flops[dtype] * share)
        if is_convolution and dtype != "float32" and not channels_last:
            traffic *= 1 + (shares.layout_float32 if dtype == "tf32" else shares.layout_16_bit)
        share = shares.bandwidth_gddr if self.gddr else shares.bandwidth
        return max(arithmetic, traffic / (self.bandwidth * share), _SHORTEST_KERNEL_SECONDS)


class Hardware:
    """The table of accelerators, links and sites."""

    def __init__(self, path: Path = TABLE) -> None:
        try:
            import yaml
        except ImportError as error:
            text = why_no_yaml(error, "the table of accelerators is a YAML file")
            raise PredictionError(text) from None
        self._table: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))

    def accelerator(self, name: str) -> Accelerator:
        entry = self._entry("accelerators", name)
        flops: dict[str, float] = {
            dtype: entry[dtype] * 1e12 for dtype in _DTYPES if dtype in entry
        }
        free = entry["memory"] * _GIB * self._table["memory"]
        free -= sum(self._table["process"].values()) * 1e9
        node = Node(name, entry["node"], entry["inside"], entry["between"])
        return Accelerator(
            name,
            free,
            entry["bandwidth"] * 1e9,
            flops,
            entry.get("gddr", False),
            Attainable(**self._table["attainable"]),
            self._source(entry),
            node,
        )

    def peak_flops(self, device: str) -> float:
        """Return the 16-bit peak of a device by torch's name for it; 0 if it is unknown.

        "NVIDIA GH200 480GB" contains gh200 and h200: the longest name counts.
        """
        written = device.lower().replace(" ", "").replace("-", "")
        best, peak = 0, 0.0
        for name, entry in self._table["accelerators"].items():
            family = re.sub(r"-(16|32|40|80)$", "", name).replace("-", "")  # drops the memory size
            if family in written and len(family) > best:
                best, peak = len(family), entry["float16"] * 1e12
        return peak

    def memory_note(self, gpu: Accelerator) -> str:
        """Return what is excluded from a GPU's usable memory."""
        process = self._table["process"].items()
        return (
            f"Usable on {gpu.name}: {self._table['memory']:.1%} of its memory (the "
            "rest is the driver's, and fragmentation), minus what no tensor uses, in GB: "
            f"{', '.join(f'{name} {size}' for name, size in process)} (jobs/hardware.yaml)."
        )

    def start_note(self, nodes: int) -> str:
        """Return how long a job's ranks need to import their packages."""
        start = self._table["start"]
        growth = nodes / start["nodes"]
        shared = ", ".join(
            f"{seconds_text(seconds * growth)} from {name}"
            for name, seconds in start["shared"].items()
        )
        known = f"measured on {start['nodes']} nodes"
        if nodes > start["nodes"]:
            known = f"extrapolated from {start['nodes']} nodes"
        return (
            f"To import their packages, the ranks on {nodes} nodes need about {shared} ({known}), "
            f"or {seconds_text(start['copy'])} from a copy on each node: `ddpkit launch --stage`, "
            f"which takes {seconds_text(start['copying'])} the first time (jobs/hardware.yaml)."
        )

    def link(self, text: str) -> Link:
        """Return a link from its name: "nvlink3", or several in parallel: "4 slingshot-200"."""
        count, _, name = text.rpartition(" ")
        entry = self._entry("links", name)
        return Link(int(count or 1) * entry["bandwidth"] * 1e9, entry["latency"] / 1e6)

    def node(self, site: str) -> Node:
        entry = self._entry("sites", site)
        return Node(entry["gpu"], entry["gpus_per_node"], entry["inside"], entry["between"])

    def has_site(self, site: str) -> bool:
        return site in self._table["sites"]

    def _source(self, entry: dict[str, Any]) -> str:
        page = self._table["sources"][entry["source"]]
        read = f" (read {page['read']})" if "read" in page else ""
        return f"{page['url']}{read}"

    def check(self) -> None:
        """Raise KeyError if an entry has no source."""
        for section in ("accelerators", "links", "sites"):
            for entry in self._table[section].values():
                self._source(entry)

    def _entry(self, section: str, name: str) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = self._table[section]
        if name not in entries:
            near = difflib.get_close_matches(name, entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PredictionError(
                f"{name!r} is not one of the {section} in {TABLE.name}.{hint} Expected one of "
                f"{', '.join(entries)}."
            )
        return entries[name]


def read_links(path: Path, gpus_per_node: int) -> tuple[Link, Link]:
    """Read the links inside and between nodes that `ddpkit bench collectives --links FILE` wrote.

    The file has the mean latency of all messages in a ring through `hosts` nodes. Messages inside
    the nodes are subtracted from it. Raises PlanError.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != 1:
            raise PredictionError(
                f"{path} has format {found['format']!r}. Expected 1. Measure the links again with "
                "`ddpkit bench collectives --links FILE`."
            )
        inside, between = (_link(found.get(name)) for name in ("inside", "between"))
        hosts = int(found["hosts"])
    except OSError as error:
        raise PredictionError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PredictionError):
            raise
        raise PredictionError(
            f"{path} is not a file of measured links: {error!r}. Write one with "
            "`ddpkit bench collectives --links FILE`."
        ) from None
    measured = inside or between
    if measured is None:
        raise PredictionError(
            f"{path} has neither 'inside' nor 'between'. Measure the links again."
        )
    if inside and between and hosts > 1:
        ranks = hosts * gpus_per_node
        sum_between = (ranks - 1) * between.latency - (ranks - hosts) * inside.latency
        latency = max(between.latency, sum_between / (hosts - 1))
        between = Link(between.bandwidth, latency)
    return inside or measured, between or measured


def _link(entry: dict[str, float] | None) -> Link | None:
    if entry is None:
        return None
    return Link(float(entry["bandwidth_bytes_per_second"]), float(entry["latency_seconds"]))
