"""Write a site profile from what the cluster reports: scheduler, modules, GPUs, interfaces."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import socket

from ...host.gpus import gpu_vendor
from ...job.commands import SchedulerError, run_command
from ...job.notation import format_walltime, parse_duration, parse_number
from ...job.slurm_job import records
from ..schedulers import get_scheduler
from ..schedulers.pbs_scheduler import ServerState, members
from ..schedulers.scheduler import Queue
from ..schedulers.slurm_scheduler import query_partitions

_MODULES = re.compile("nccl|rccl|ofi|libfabric|pytorch|torch|cuda|rocm|conda|frameworks", re.I)
_MAX_MODULES = 20  # modules listed at most
# Pattern of a fabric's interfaces -> name of the network in NCCL's log.
_NETWORKS = {r"hsn\d+": "AWS Libfabric", r"ib[a-z]*\d+": "IB"}


def new_profile() -> str:
    """Return the text of a profile; comments at its end list the values that were not found.

    Raises SchedulerError if this host has the commands of both schedulers, or of none.
    """
    return _Writer(get_scheduler().name).text()


class _Writer:
    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self.lines: list[str] = []
        self.missing: list[str] = []
        self.today = datetime.date.today().isoformat()

    def text(self) -> str:
        query, queues = _slurm() if self.scheduler == "slurm" else _pbs()
        self._head()
        self._queues(queues)
        largest = max(queues, key=lambda queue: queue.gpus_per_node or 0, default=None)
        self._value("gpus_per_node", largest and largest.gpus_per_node or None, query)
        self._value("cores_per_node", largest and largest.cores_per_node, query)
        self._value("gpu_vendor", _vendor(), "nvidia-smi -L", "Run this on a node with GPUs.")
        self._fabric()
        self._modules()
        self.missing.append(
            "binding: no command reports it. Without it, each rank is bound to cores near its GPU, "
            "as sysfs reports the topology"
        )
        self.lines += ["", "# Not found:", *(f"#   {text}" for text in self.missing)]
        return "\n".join(self.lines) + "\n"

    def _head(self) -> None:
        host = socket.gethostname()
        self.lines += [
            f"# The sources are commands that were run on {host}. Give the pages of your site's",
            "# documentation where you can, and add what it recommends for NCCL, RCCL or oneCCL.",
            f"title: {_quoted(f'the cluster of {host}')}",
            f"scheduler: {self.scheduler}",
        ]

    def _value(self, key: str, value: object, query: str, remedy: str = "Ask your site.") -> None:
        if value is None:
            self.missing.append(f"{key}: no {key} in the output of {query}. {remedy}")
            return
        self.lines.append(f"{key}: {{value: {_quoted(str(value))}, {self._origin(query)}}}")

    def _origin(self, query: str) -> str:
        return f"source: {_quoted('$ ' + query)}, read: {self.today}"

    def _queues(self, queues: list[Queue]) -> None:
        default = next((queue.name for queue in queues if queue.is_default), None)
        if default is not None:
            self.lines.append(f"queue: {_quoted(default)}")
        usable = [queue for queue in queues if queue.is_open]
        if not usable:
            self.missing.append("queue: the scheduler reports none. Is it running?")
            return
        self.lines += ["# Queues with their limits. Without overlaps, 'queues' chooses by nodes:"]
        self.lines.append("# queues:")
        for queue in usable:
            seconds = queue.max_walltime_seconds
            limit = f"  # at most {format_walltime(seconds)}" if seconds else ""
            nodes = f"{queue.min_nodes}-{queue.max_nodes or ''}"
            self.lines.append(f"#   - {{nodes: {nodes}, queue: {_quoted(queue.name)}}}{limit}")

    def _fabric(self) -> None:
        names = re.findall(r"^\d+: ([\w.-]+)", _output("ip", "-o", "link"), re.MULTILINE)
        for pattern, network in _NETWORKS.items():
            found = [name for name in names if re.fullmatch(pattern, name)]
            if found:
                self._value("network", network, "ip -o link")
                self._value("interface", ",".join(found), "ip -o link")
                return
        self.missing.append(
            "network, interface: ip link shows no hsn or ib interface here. Run this on a compute "
            "node"
        )

    def _modules(self) -> None:
        words = _output("bash", "-lc", "module -t avail 2>&1").split()
        found = sorted({word for word in words if _MODULES.search(word) and word[-1] not in ":/"})
        if not found:
            self.missing.append("modules: `module avail` shows none for PyTorch or its network")
            return
        self.lines.append("# Modules that may be of use, for 'modules': a list of {value, source}.")
        self.lines += [f"#   {name}" for name in found[:_MAX_MODULES]]


def _quoted(text: str) -> str:
    """Quote a text for YAML if it needs quotes."""
    return text if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", text) else json.dumps(text)


def _output(*words: str) -> str:
    try:
        return run_command(words, timeout_seconds=10.0)
    except SchedulerError:
        return ""


def _vendor() -> str | None:
    return "nvidia" if "GPU 0:" in _output("nvidia-smi", "-L") else gpu_vendor()


def _slurm() -> tuple[str, list[Queue]]:
    """Return the query and the partitions, with the cores that jobs may use (CPUEfctv)."""
    nodes = records(_output("scontrol", "show", "node"))
    queues = []
    for queue in query_partitions():
        cores = [
            parse_number(node.get("CPUEfctv", node.get("CPUTot", ""))) or 0
            for node in nodes
            if queue.name in node.get("Partitions", "").split(",")
        ]
        least = min(cores, default=0) or queue.cores_per_node
        queues.append(dataclasses.replace(queue, cores_per_node=least))
    return "sinfo, scontrol show node", queues


def _pbs() -> tuple[str, list[Queue]]:
    """Return the queries, and the queues with their limits for a job."""
    state = ServerState.query()
    queues = []
    for queue in state.as_queues():
        most = members(state.queues[queue.name], "resources_max")
        least = members(state.queues[queue.name], "resources_min")
        queues.append(
            dataclasses.replace(
                queue,
                max_walltime_seconds=parse_duration(most.get("walltime", "")),
                max_nodes=parse_number(most.get("nodect", "")) or queue.max_nodes,
                min_nodes=parse_number(least.get("nodect", "")) or 1,
            )
        )
    return "qstat -Qf, pbsnodes -a", queues
