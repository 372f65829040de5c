"""Find out which network NCCL or RCCL has chosen, from the log that it writes when it starts.

NCCL uses TCP without a warning if it finds no plugin and no InfiniBand. Only its log shows that:

    NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
    NCCL INFO NET/IB : No device found.
    NCCL INFO NET/Socket : Using [0]hsn0:10.150.0.7<0>
    NCCL INFO Using network Socket

init_process_group(device_id=...) creates the communicator, so the network is final afterwards, and
the log is read once.
NCCL 2.22 and newer connect the channels ("via NET/IB/0/GDRDMA") with the first collective. Until
then the log shows for each adapter, not for each channel, whether GPUDirect RDMA is used.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ONE_HOST, NOT_FOUND = "none (one host)", "none (not found)"

# "node1:4242:4250 [0] NCCL INFO ", "|CCL_WARN| " of oneCCL
_PREFIX = r"^.*?(?:NCCL (?:INFO|WARN)|\|CCL_\w+\||libibverbs: Warning:) +"
_CHOSEN = r"Using network (.+)"
_ONECCL = r"(?:switch to ATL/|CCL_ATL_TRANSPORT: |\batl-(?=mpi|ofi))(\w+)"
_CHANNEL = r"(?:Channel|Ring) [\d/]+ : (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])? .*\bvia "
_LINK = r"\bvia NET/(.+?)/\d+(?:\(\d+\))?((?:/\S+)?)"  # "via NET/IB/0(8)/GDRDMA/Shared"
_RING = r"^Channel [\d/]+ : +(\d+(?: +\d+)+)$"  # "Channel 00/02 :    0   1   2   3"
_OPENED = r"NET/(\w+) ?: Using (\[\d+\].*)"
_LOADED = r"NET/Plugin ?: Loaded net plugin (.+?) \(v\d+\)"
_VERSION = r"NET/(\w+) ver\. \d"  # "NET/GPUDirectTCPX ver. 3.1.8."
_PROVIDER = r"NET/OFI Selected [Pp]rovider is ([\w;+-]+)"
_ADAPTER = r"([\w.+-]+):\d+/([A-Z])"  # "[0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/RoCE"
_HCA = r"GPU Direct RDMA \w+ for HCA \d+ '([^']+)'"
_INTERFACE = r"\[\d+\]([^\s:]+)"  # "[0]eth0:10.0.0.1<0>"
_BOOTSTRAP = r"(?:\bOOB|Bootstrap ?: Using) (.*)"
_GPUDIRECT = (  # the most certain first; the channels come before them
    r"use ring PXN \d GDR (\d)",
    r"GPU Direct RDMA (Enabled|Disabled) for GPU",
    r"GPU Direct RDMA (Enabled|Disabled) for HCA",
)
_FAILURE = r"Failed to initialize any NET plugin|network .+ not found|no socket interface found"
_REMEDY = (
    "Set NCCL_DEBUG=INFO and read the log: is a variable NCCL_NET or NCCL_IB_DISABLE set, is the "
    "plugin's module loaded and its folder in LD_LIBRARY_PATH, does a container have libibverbs "
    "and /dev/infiniband?"
)


class Expected(NamedTuple):
    """The network that NCCL should use, and why."""

    network: str  # "AWS Libfabric", "IB"
    reason: str  # "DDPKIT_NETWORK", "this host has cxi0"


@dataclass(frozen=True)
class Transport:
    """The network that carries the data between hosts."""

    network: str  # "AWS Libfabric", "IB", "RoCE", "Socket", ONE_HOST, NOT_FOUND; "" is unknown
    provider: str  # of libfabric: "cxi", "efa"; "verbs" for IB and RoCE
    devices: str  # "mlx5_0,mlx5_1"
    interface: str  # of the sockets: "hsn0,hsn1"; other networks use sockets for the start only
    gpudirect: bool | None  # GPUDirect RDMA; None is unknown


def classify(lines: Iterable[str], one_host: bool | None = None) -> Transport:
    """Return the network that a log of NCCL or RCCL shows.

    one_host: whether all ranks share one host; None reads it from the log.
    """
    text = "\n".join(re.sub(_PREFIX, "", line).strip() for line in lines)
    links, opened = re.findall(_LINK, text), re.findall(_OPENED, text)
    provider = "".join(_find(_PROVIDER, text)[:1])

    names = [*_find(_CHOSEN, text), *(name for name, _ in links)]
    names += ["oneCCL " + name.lower() for name in _find(_ONECCL, text)]
    if not names and re.search(_FAILURE, text):
        names = [NOT_FOUND]
    # NCCL 2.4 opens sockets first, for its start.
    names += sorted((name for name, _ in opened), key=lambda name: name == "Socket")
    names += _find(_LOADED, text) + _find(_VERSION, text)
    network = [*names, "AWS Libfabric" if provider else ""][0]
    network = re.sub(r"_v\d+$", "", network)  # "GPUDirectTCPX_v7"

    adapters = re.findall(_ADAPTER, "\n".join(line for name, line in opened if name == "IB"))
    devices = list(dict.fromkeys(name for name, _ in adapters))
    if re.search(r"^IB|RDMA Plugin", network):  # "IBext_v8", "NCCL RDMA Plugin v8" of HPC-X
        network = "RoCE" if {layer for _, layer in adapters} == {"R"} else "IB"
        provider = "verbs"
    if network != "Socket":
        devices = devices or _find(_HCA, text)
    sockets = "\n".join(line for name, line in opened if name.endswith("Socket"))
    bootstrap = re.sub(r"^(?=\w)", "[0]", "".join(_find(_BOOTSTRAP, text)[:1]))

    if one_host is None:
        one_host = not links and _is_one_host(text)
    return Transport(
        network=ONE_HOST if one_host else network,
        provider=provider,
        devices=",".join(devices),
        interface=",".join(_find(_INTERFACE, sockets or bootstrap)),
        gpudirect=None if one_host else _gpudirect(links, text),
    )


def _find(pattern: str, text: str) -> list[str]:
    """Return the group of each match, each value once."""
    return list(dict.fromkeys(re.findall(pattern, text, re.MULTILINE)))


def _is_one_host(text: str) -> bool:
    """Return whether all ranks share one host, by a log without channels to the network.

    Before NCCL 2.19 only channels between all ranks show it.
    """
    if hosts := _find(r"\bnNodes (\d+)", text):
        return max(map(int, hosts)) == 1
    sizes = [int(number) for number in _find(r"\bn[rR]anks (\d+)", text)]
    sizes += [len(ring.split()) for ring in _find(_RING, text)]
    connected = {rank for channel in re.findall(_CHANNEL, text) for rank in channel}
    return len(connected | {"0"}) == max(sizes, default=0)


def _gpudirect(links: list[tuple[str, str]], text: str) -> bool | None:
    """Return whether any connection uses GPUDirect RDMA. NCCL may use it for receiving only."""
    if links:
        return any("GDRDMA" in options for _, options in links)
    found = next((values for pattern in _GPUDIRECT if (values := _find(pattern, text))), [])
    return any(value in ("1", "Enabled") for value in found) if found else None


def expected_network(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Expected | None:
    """Return the network that the profile (DDPKIT_NETWORK) names, or that of this host's adapters.

    The result is None if only TCP is expected. root: the folder that contains sys.
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
    """Return the line for the output, and whether it warns of TCP instead of a faster network."""
    network, provider = transport.network, transport.provider
    name = network or f"unknown; NCCL_DEBUG=INFO shows the log of {library}"
    if network == "Socket":
        name = f"TCP sockets over {transport.interface or 'an unknown interface'}"
    elif used := provider.replace("verbs", "") or transport.devices:
        name += f" ({used})"
    name = name.replace(",", ", ")
    is_tcp = "Socket" in network or provider.split(";")[0] in ("tcp", "sockets", "udp")
    if not is_tcp and transport.gpudirect is not None:
        name += ", GPUDirect RDMA" if transport.gpudirect else ", no GPUDirect RDMA"
    if expected is None or not is_tcp or "Socket" in expected.network:
        return f"network: {name}", False

    why = f"although {expected.network} is expected ({expected.reason})"
    return f"{library} uses {name}, {why}. {_REMEDY}", True


@contextlib.contextmanager
def log_of_nccl(
    wanted: bool, environ: MutableMapping[str, str] = os.environ
) -> Iterator[list[str]]:
    """Direct NCCL's log into memory; after the `with` block, the list contains its lines.

    The variables for this are then restored, so that child processes do not inherit them. The list
    stays empty if `wanted` is False, or if the user or the site has set NCCL_DEBUG.
    """
    lines: list[str] = []
    if not wanted or "NCCL_DEBUG" in environ or _is_configured(environ):
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


def _is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether a configuration file of NCCL sets NCCL_DEBUG."""
    for name in (environ.get("NCCL_CONF_FILE", ""), "~/.nccl.conf", "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            if b"NCCL_DEBUG=" in Path(os.path.expanduser(name)).read_bytes():
                return True
    return False
