"""Name the network that NCCL or RCCL has chosen, from the log that it writes when it starts.

NCCL uses TCP sockets without a word when it finds no plugin and no InfiniBand. Its log shows that:

    NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
    NCCL INFO NET/IB : No device found.
    NCCL INFO NET/Socket : Using [0]hsn0:10.150.0.7<0>
    NCCL INFO Using network Socket

The log is read once, after init_process_group(device_id=...): torch creates the communicator
there, and the network is final. NCCL 2.22 and newer connect the channels ("via NET/IB/0/GDRDMA")
with the first collective; until then the log shows GPUDirect RDMA for each adapter only.
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

_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
_LOG_FILE = "NCCL_DEBUG_FILE"
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; RCCL has its own names.
_CONFIGURATION = ("~/.nccl.conf", "/etc/nccl.conf", "~/.rccl.conf", "/etc/rccl.conf")

_PREFIX = r"^.*?NCCL (?:INFO|WARN) "  # "node1:4242:4250 [0] NCCL INFO "
_CHOSEN = r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$"
_CHANNEL = r"(?:Channel|Ring) [\d/]+ : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])? .*?\bvia (\S.*)"
_CHANNEL_NETWORK = r"NET/(.+?)/\d+(?:\(\d+\))?((?:/\S+)?)"  # "NET/IB/0(8)/GDRDMA/Shared"
_OPENED = r"NET/(\w+) ?: Using (?=\[\d+\])(.*)"
_LOADED = r"NET/Plugin ?: Loaded net plugin (.+?) \(v\d+\)"
_PROVIDER = r"NET/OFI Selected [Pp]rovider is ([\w;+-]+)"
_ADAPTER = r"([\w.+-]+):\d+/(?:IB|RoCE)"  # "[0]mlx5_0:1/IB/SHARP"
_INTERFACE = r"\[\d+\]([^\s:]+):"  # "[0]eth0:10.0.0.1<0>"
_BOOTSTRAP = r"(?:\bOOB|Bootstrap ?: Using) (?:\[0\])?([^\s:]+):"
_NUM_HOSTS, _NUM_RANKS = r"\bnNodes (\d+)", r"\bn[rR]anks (\d+)"
_GPUDIRECT = (  # the most certain first; the channels come before them
    r"use ring PXN \d GDR (\d)",
    r"GPU Direct RDMA (Enabled|Disabled) for GPU",
    r"GPU Direct RDMA (Enabled|Disabled) for HCA",
)
_CAUSES = {  # what the log shows before NCCL falls back, or fails
    "not found": r"network .+ not found|Failed to initialize any NET plugin",
    "variable": r"NCCL_(?:NET|NET_PLUGIN|IB_DISABLE) set by environment to (?i:socket|none|1)\b",
    "plugin": r"NET/Plugin ?:.*(?:not find|No plugin found|load(?: \(.*\))? returned|cannot open)"
    r"|NET/Plugin ?:.*undefined symbol|External network plugin .* is unsupported"
    r"|NET/OFI .*(?i:failed|couldn't|unable|no data available)",
    "verbs": r"NET/IB ?: No (?:device|IP interface) found|Failed to open libibverbs",
}
_TCP_PROVIDERS = ("tcp", "sockets", "udp")  # of libfabric; "tcp;ofi_rxm" is one of them
_ADVICE = {
    "variable": "Unset this variable",
    "plugin": "Load the module that contains the plugin, or add its folder to LD_LIBRARY_PATH",
    "verbs": "Check the ports with ibstat, and NCCL_IB_HCA. A container needs libibverbs and "
    "/dev/infiniband",
    "provider": "Unset FI_PROVIDER, and use the libfabric of this cluster",
    "": "Set NCCL_DEBUG=INFO to see the whole log",
}


class Cause(NamedTuple):
    """Why NCCL does not use a faster network."""

    kind: str  # of _CAUSES
    text: str  # "NET/IB : No device found"


@dataclass(frozen=True)
class Transport:
    """What carries the data between hosts."""

    network: str = ""  # "AWS Libfabric", "IB", "Socket", ONE_HOST, NOT_FOUND; "" is unknown
    provider: str = ""  # of libfabric: "cxi", "efa"; "verbs" for IB
    devices: str = ""  # "mlx5_0,mlx5_1"
    interface: str = ""  # "hsn0,hsn1": of the sockets, with other networks only for the start
    gpudirect: bool | None = None  # GPUDirect RDMA: None is unknown
    causes: tuple[Cause, ...] = ()  # of a fall-back, the likeliest first

    @property
    def cause(self) -> str:
        """The likeliest cause of a fall-back; "" where there is none."""
        return self.causes[0].text if self.causes else ""

    @property
    def is_tcp(self) -> bool:
        """Whether the data goes over TCP sockets."""
        return "Socket" in self.network or self.provider.split(";")[0] in _TCP_PROVIDERS


class Expected(NamedTuple):
    """The network that NCCL should use, and why."""

    network: str  # "AWS Libfabric", "IB"
    reason: str  # "DDPKIT_NETWORK", "this host has cxi0"


def classify(lines: Iterable[str], num_hosts: int | None = None) -> Transport:
    """Return what the lines of a log of NCCL or RCCL show.

    num_hosts: of the job; None reads it from the log.
    """
    messages = [re.sub(_PREFIX, "", line).strip() for line in lines]
    text = "\n".join(messages)
    channels = _find(_CHANNEL, text)
    links = [found for one in channels for found in re.findall(_CHANNEL_NETWORK, one)]
    opened = re.findall(_OPENED, text)
    provider = next(iter(_find(_PROVIDER, text)), "")

    candidates = [
        *_find(_CHOSEN, text),
        *(name for name, _ in links),
        *(name for name, _ in opened),
        *_find(_LOADED, text),
        *(["AWS Libfabric"] if provider else []),
    ]
    network = _family(candidates[0]) if candidates else ""
    provider = "verbs" if network == "IB" else provider
    causes = _causes(messages) if network in ("", "Socket") else ()
    if not network and causes and causes[0].kind == "not found":
        network = NOT_FOUND

    devices = _find(_ADAPTER, "\n".join(used for name, used in opened if name == "IB"))
    if network not in ("", "Socket"):
        devices = devices or _find(r"GPU Direct RDMA \w+ for HCA \d+ '([^']+)'", text)
    sockets = [used for name, used in opened if name.endswith("Socket")]
    interfaces = _find(_INTERFACE, "\n".join(sockets)) or _find(_BOOTSTRAP, text)

    gpudirect = _gpudirect(links, text)
    if _is_one_host(num_hosts, text, channels, links) and network:
        network, gpudirect = ONE_HOST, None
    elif network == "Socket":
        gpudirect = False  # sockets send from host memory only
    return Transport(
        network=network,
        provider=provider,
        devices=",".join(devices),
        interface=",".join(interfaces),
        gpudirect=gpudirect,
        causes=causes,
    )


def _find(pattern: str, text: str) -> list[str]:
    """Return the group of each match, each value once."""
    return list(dict.fromkeys(re.findall(pattern, text, re.MULTILINE)))


def _family(name: str) -> str:
    """Return the name of a network without the version of its plugin.

    "IBext_v8" and "NCCL RDMA Plugin v8" are NVIDIA's plugin for InfiniBand, part of HPC-X.
    """
    if name.startswith("IBext") or "RDMA Plugin" in name:
        return "IB"
    return re.sub(r"_v\d+$", "", name)  # "GPUDirectTCPX_v7"


def _is_one_host(
    num_hosts: int | None, text: str, channels: list[str], links: list[tuple[str, str]]
) -> bool:
    """Whether all ranks share one host. Before NCCL 2.19 only the channels show it."""
    hosts = [num_hosts] if num_hosts else [int(number) for number in _find(_NUM_HOSTS, text)]
    if hosts:
        return max(hosts) == 1
    ranks = [int(number) for number in _find(_NUM_RANKS, text)]
    return max(ranks, default=0) == 1 or (bool(channels) and not links)


def _gpudirect(links: list[tuple[str, str]], text: str) -> bool | None:
    """Whether any connection uses GPUDirect RDMA: NCCL may use it only for receiving."""
    if links:
        return any("GDRDMA" in options for _, options in links)
    found = next((values for pattern in _GPUDIRECT if (values := _find(pattern, text))), [])
    return any(value in ("1", "Enabled") for value in found) if found else None


def _causes(messages: list[str]) -> tuple[Cause, ...]:
    """Return what may have caused a fall-back: an explicit choice first, then the last message."""
    found = [
        Cause(kind, message.removeprefix("Error: ").rstrip(". "))
        for message in reversed(messages)
        for kind, pattern in _CAUSES.items()
        if re.search(pattern, message)
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda one: one.kind in ("plugin", "verbs")))


def expected_network(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Expected | None:
    """Return the network that the profile or this host's adapters lead to; None for none.

    DDPKIT_NETWORK: what NCCL should report. root: the folder that holds sys.
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
    """Return the line for the output, and whether it warns of TCP where more is expected."""
    name = transport.network or f"unknown; NCCL_DEBUG=INFO shows the log of {library}"
    if transport.network == "Socket":
        name = f"TCP sockets over {transport.interface or 'an unknown interface'}"
    elif used := transport.provider.replace("verbs", "") or transport.devices:
        name += f" ({used})"
    if not transport.is_tcp or expected is None or expected.network in (transport.network, name):
        if not transport.is_tcp and transport.gpudirect is not None:
            name += ", GPUDirect RDMA" if transport.gpudirect else ", no GPUDirect RDMA"
        return f"network: {name}", False

    wanted = "plugin" if "Libfabric" in expected.network else "verbs"
    causes = sorted(transport.causes, key=lambda one: one.kind not in ("variable", wanted))
    cause = next(iter(causes), Cause("", "not found in its log"))
    if transport.network != "Socket":
        cause = Cause("provider", f"libfabric has chosen the provider {transport.provider}")
    return (
        f"{library} uses {name}, although {expected.network} is expected ({expected.reason}). "
        f"Likely cause: {cause.text}. {_ADVICE[cause.kind]}"
    ), True


@contextlib.contextmanager
def log_of_nccl(
    wanted: bool, environ: MutableMapping[str, str] = os.environ
) -> Iterator[list[str]]:
    """Let NCCL write its log into memory; the list contains its lines afterwards.

    The variables for this are removed again, so that child processes do not inherit them. The
    list stays empty where it is not wanted, and where the user has set NCCL_DEBUG.
    """
    lines: list[str] = []
    if not wanted or "NCCL_DEBUG" in environ or _is_configured(environ):
        yield lines
        return
    with open(os.memfd_create("nccl-log"), errors="replace") as log:
        variables = _LOG | {_LOG_FILE: f"/proc/self/fd/{log.fileno()}"}
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
    """Whether a configuration file of NCCL sets NCCL_DEBUG."""
    text = ""
    for path in (environ.get("NCCL_CONF_FILE", ""), *_CONFIGURATION):
        with contextlib.suppress(OSError):
            text += Path(path).expanduser().read_text(errors="replace") + "\n"
    return re.search(r"^NCCL_DEBUG=", text, re.MULTILINE) is not None
