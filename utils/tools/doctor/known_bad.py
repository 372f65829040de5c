"""Find software versions known to hang or crash a training, in one table with sources."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NCCL, OFI_PLUGIN = "NCCL", "aws-ofi-nccl"


@dataclass(frozen=True)
class KnownBad:
    """One row: versions from `first` up to, but not including, `fixed`.

    where: limits it to hosts with this machine or device; "" for all. what: what happens.
    """

    software: str
    first: tuple[int, ...]
    fixed: tuple[int, ...]
    where: str
    what: str
    remedy: str
    source: str


KNOWN_BAD = (
    KnownBad(
        NCCL,
        (0,),
        (2, 29, 3),
        "aarch64",
        "may hang without a message",
        "Use NCCL 2.29.3 or newer",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1",
    ),
    KnownBad(
        NCCL,
        (2, 28, 3),
        (2, 28, 9),
        "",
        "may crash where a process creates its process group again",
        "Use NCCL 2.28.9 or newer",
        "https://nvidia.github.io/nvidia-resiliency-ext/inprocess/usage_guide.html",
    ),
    KnownBad(
        OFI_PLUGIN,
        (1, 6, 0),
        (1, 6, 1),
        "cxi",
        "may hang under FSDP",
        "Use another version of aws-ofi-nccl, or NCCL_NET=Socket, which is slower",
        "https://github.com/saforem2/ezpz/issues/239",
    ),
)


def host_features(root: Path = Path("/")) -> list[str]:
    """Return this host's features that rows may name: its machine, and "cxi" with Slingshot."""
    cxi = ["cxi"] if (root / "sys/class/cxi").exists() else []
    return [platform.machine(), *cxi]


def plugin_version(environ: Mapping[str, str] = os.environ) -> str:
    """Return the version of aws-ofi-nccl in the library paths; "" if they show none."""
    paths = ":".join(environ.get(name, "") for name in ("LD_LIBRARY_PATH", "NCCL_NET_PLUGIN"))
    found = re.search(r"aws-ofi-nccl[-/_@=]v?(\d+(?:\.\d+)+)", paths)
    return found[1] if found else ""


def find_bad(versions: Mapping[str, str], features: list[str]) -> Iterator[tuple[KnownBad, str]]:
    """Yield each matching row with the installed version. features: from host_features()."""
    for row in KNOWN_BAD:
        text = versions.get(row.software, "")
        version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
        is_bad = version and row.first <= version < row.fixed
        if is_bad and (not row.where or row.where in features):
            yield row, text
