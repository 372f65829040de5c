"""Find out which network NCCL or RCCL has chosen, from its log at the start.

NCCL uses TCP without a warning if it finds no plugin and no InfiniBand. Only its log shows that:

    NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
    NCCL INFO NET/IB : No device found.
    NCCL INFO NET/Socket : Using [0]hsn0:10.150.0.7<0>
    NCCL INFO Using network Socket

init_process_group(device_id=...) creates the communicator. The network is final afterwards, and the
log is read once. NCCL 2.22 and newer connect the channels ("via NET/IB/0/GDRDMA") in the first
collective. Before that, the log shows only for each adapter, not for each channel, whether
GPUDirect RDMA is used.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

_PREFIX = r"^.*?(?:NCCL (?:INFO|WARN)|libibverbs: Warning:) +"  # "node1:4242:4250 [0] NCCL INFO "
_NETWORK = (  # the most reliable pattern first
    r"Using network (.+)",
    r"\bvia NET/(.+?)/\d",
    r"NET/(?!Socket)(\w+) ?: Using \[\d+\]",
    r"NET/(Socket) ?: Using \[\d+\]",  # NCCL 2.4 opens sockets first, for its start-up
    r"NET/Plugin ?: Loaded net plugin (.+?) \(v\d+\)",
    r"NET/(\w+) ver\. \d",  # "NET/GPUDirectTCPX ver. 3.1.8."
)
_GPUDIRECT = (  # the most reliable pattern first
    r"\bvia NET/.+?/\d+(?:\(\d+\))?((?:/\S+)?)",  # "via NET/IB/0(8)/GDRDMA/Shared"
    r"use ring PXN \d GDR (\d)",
    r"GPU Direct RDMA (Enabled|Disabled) for GPU",
    r"GPU Direct RDMA (Enabled|Disabled) for HCA",
)
_PROVIDER = r"NET/OFI Selected [Pp]rovider is ([\w;+-]+)"
_ADAPTER = r"([\w.+-]+):\d+/([A-Z])"  # "[0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/RoCE"
_HCA = r"GPU Direct RDMA \w+ for HCA \d+ '([^']+)'"
_SOCKETS = r"NET/Socket ?: Using (\[\d+\].*)"
_INTERFACE = r"\[\d+\]([^\s:]+):"  # "[0]eth0:10.0.0.1<0>"
_REMEDY = (
    "Set NCCL_DEBUG=INFO and read the log: is a variable NCCL_NET or NCCL_IB_DISABLE set, is the "
    "plugin's module loaded and its folder in LD_LIBRARY_PATH, does a container have libibverbs "
    "and /dev/infiniband?"
)


class Expected(NamedTuple):
    """The network that NCCL should use, and why."""

    network: str  # "AWS Libfabric", "IB"
    reason: str  # "DDPKIT_NETWORK", "this host has cxi0"


class Transport(NamedTuple):
    """The network that carries data between hosts."""

    network: str  # "AWS Libfabric", "IB", "RoCE", "Socket"; "": unknown
    uses: str  # libfabric provider, adapters or interfaces: "cxi", "hsn0"
    gpudirect: bool | None  # whether GPUDirect RDMA is used; None: unknown


def classify(lines: Iterable[str]) -> Transport:
    """Return the network between hosts according to a log of NCCL or RCCL."""
    text = "\n".join(re.sub(_PREFIX, "", line).strip() for line in lines)
    provider = "".join(_find([_PROVIDER], text)[:1])
    adapters = re.findall(_ADAPTER, text)

    network = [*_find(_NETWORK, text), "AWS Libfabric" if provider else ""][0]
    network = re.sub(r"_v\d+$", "", network)  # "GPUDirectTCPX_v7"
    if re.search(r"^IB|RDMA Plugin", network):  # "IBext_v8"; HPC-X: "NCCL RDMA Plugin v8"
        network = "RoCE" if {layer for _, layer in adapters} == {"R"} else "IB"

    if network == "Socket":
        uses = _find([_INTERFACE], "\n".join(_find([_SOCKETS], text)))
    else:
        devices = list(dict.fromkeys(name for name, _ in adapters)) or _find([_HCA], text)
        uses = [provider] if provider else devices
    direct = _find(_GPUDIRECT, text)  # NCCL may use it for receiving only
    is_direct = any(value in ("1", "Enabled") or "GDRDMA" in value for value in direct)
    return Transport(network, ", ".join(uses), is_direct if direct else None)


def _find(patterns: Iterable[str], text: str) -> list[str]:
    """Return all matches of the first pattern that matches, without duplicates."""
    found = (re.findall(pattern, text, re.MULTILINE) for pattern in patterns)
    return list(dict.fromkeys(next(filter(None, found), [])))


def expected_network(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Expected | None:
    """Return the network in DDPKIT_NETWORK (the profile), else the network of this host's adapters.

    Returns None if only TCP is expected. root: the folder that contains sys.
    """
    if name := environ.get("DDPKIT_NETWORK"):
        return Expected(name, "DDPKIT_NETWORK")
    if adapters := sorted(root.glob("sys/class/cxi/*")):
        return Expected("AWS Libfabric", f"this host has {adapters[0].name}")
    for adapter in sorted(root.glob("sys/class/infiniband/*")):
        if (adapter / "device/driver").resolve().name == "efa":
            return Expected("AWS Libfabric", f"this host has the EFA adapter {adapter.name}")
        for port in adapter.glob("ports/*"):
            with contextlib.suppress(OSError):
                layer, state = ((port / name).read_text() for name in ("link_layer", "state"))
                if "InfiniBand" in layer and "ACTIVE" in state:  # "4: ACTIVE"
                    return Expected("IB", f"this host has InfiniBand {adapter.name}")
    return None


def describe(
    transport: Transport, expected: Expected | None, library: str = "NCCL"
) -> tuple[str, bool]:
    """Return a line for the output, and whether it warns of TCP instead of a faster network."""
    network, uses, gpudirect = transport
    name = network or f"unknown; NCCL_DEBUG=INFO shows the log of {library}"
    if network == "Socket":
        name = f"TCP sockets over {uses or 'an unknown interface'}"
    elif uses:
        name += f" ({uses})"
    is_tcp = "Socket" in network or uses.split(";")[0] in ("tcp", "sockets", "udp")
    if not is_tcp and gpudirect is not None:
        name += ", GPUDirect RDMA" if gpudirect else ", no GPUDirect RDMA"
    if expected is None or not is_tcp or "Socket" in expected.network:
        return f"network: {name}", False

    why = f"although {expected.network} is expected ({expected.reason})"
    return f"{library} uses {name}, {why}. {_REMEDY}", True


@contextlib.contextmanager
def log_of_nccl(
    environ: MutableMapping[str, str] = os.environ,
) -> Iterator[list[str]]:
    """Write NCCL's log into memory; after the `with` block, the list contains its lines.

    Afterwards the variables for this are restored, so that child processes do not inherit them.
    The list stays empty if the user or the site has set NCCL_DEBUG.
    """
    lines: list[str] = []
    if "NCCL_DEBUG" in environ or _is_configured(environ):
        yield lines
        return
    with open(os.memfd_create("nccl-log"), errors="replace") as log:
        variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
        variables["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{log.fileno()}"
        before = {name: environ[name] for name in variables if name in environ}
        environ.update(variables)
        try:
            yield lines
        finally:
            for name in variables:
                del environ[name]
            environ.update(before)
            lines += log.read().splitlines()
            _discard_later_output(log.fileno())


def _discard_later_output(log: int) -> None:
    """Make NCCL write to /dev/null instead of this file.

    NCCL reads the variables once per process, and keeps the file open until the process ends. Each
    later communicator would fill the memory with its lines.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # os.listdir()'s own descriptor is closed by now
            if int(name) != log and os.path.sameopenfile(int(name), log):
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _is_configured(environ: Mapping[str, str]) -> bool:
    """Whether a configuration file of NCCL sets NCCL_DEBUG."""
    for name in (environ.get("NCCL_CONF_FILE", ""), "~/.nccl.conf", "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            if b"NCCL_DEBUG=" in Path(os.path.expanduser(name)).read_bytes():
                return True
    return False
