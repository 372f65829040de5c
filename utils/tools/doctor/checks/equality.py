"""Check that all ranks have the same software and variables.

torch is not imported. Its version is read from its files.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .... import __version__
from ..check import Check, Finding, Level, RankPlace, Ranks, Reported
from ..networking import names_of, show

_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "FI_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "UCX_",
    "TORCH_",
)
_PATHS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
_OTHERS = (
    *_PATHS,
    "PYTHONHOME",
    "PYTHONHASHSEED",
    "DDPKIT_CPU_BIND",
    "DDPKIT_NETWORK",
)
_OF_RANK = ("CUDA_VISIBLE_DEVICES",)
# Suffixes of variables that scripts set for each local rank, such as UCX_NET_DEVICES.
_OF_LOCAL_RANK = ("_DEVICES", "_DEVICE", "_HCA", "_IFNAME", "_PLACES")
_SHOWN = 60  # characters shown of a value
_UNSET = "(unset)"
_TORCH = "torch"
_VERSIONS = ("Python", _TORCH, "kit version", "NCCL")
_ONE_ENVIRONMENT = "Use one environment on all hosts"


@dataclass(frozen=True)
class EqualityFacts:
    """Software and variables that should be equal on all ranks. software: name -> version."""

    software: dict[str, str]
    variables: dict[str, str]


class Equality(Check[EqualityFacts]):
    """Software and variables of all ranks."""

    name = "equality"
    per = "rank"
    quick = True
    seconds = 15.0
    facts = EqualityFacts

    def collect(self, ranks: Ranks) -> EqualityFacts:
        return EqualityFacts(software(), relevant_variables(os.environ))

    def conclude(self, reported: Sequence[Reported[EqualityFacts]]) -> Iterator[Finding]:
        findings: list[Finding] = []
        for name in _names(report.facts.software for report in reported):
            values = {report.place: report.facts.software.get(name, "none") for report in reported}
            level = Level.BAD if name in _VERSIONS else Level.WARNING
            findings += compare(name, values, level, _ONE_ENVIRONMENT)
        for name in _names(report.facts.variables for report in reported):
            values = {report.place: report.facts.variables.get(name, _UNSET) for report in reported}
            remedy = f"Set {name} to the same value on all ranks, or unset it on all"
            if _depends_on_local_rank(name, values):
                continue
            findings += compare(name, values, Level.WARNING, remedy)
        if not findings and reported:
            facts = reported[0].facts
            versions = ", ".join(
                f"{name} {facts.software[name]}" for name in _VERSIONS if name in facts.software
            )
            same = "; the same variables on all ranks"
            findings = [Finding(Level.GOOD, versions + (same if len(reported) > 1 else ""))]
        yield from findings


# Facts of this rank -------------------------------------------------------------------------------


def software() -> dict[str, str]:
    """Return the versions of training software; torch's is "none" if it is not on this host."""
    found = {"Python": platform.python_version(), _TORCH: "none", "kit version": __version__}
    folder = torch_folder()
    if folder is not None:
        values = torch_build()
        builds = [f"{name} {values[name]}" for name in ("cuda", "hip") if values.get(name)]
        build = f" ({', '.join(builds)})" if builds else ""
        found[_TORCH] = values.get("__version__", "unknown") + build
        # "nvidia_nccl_cu12-2.21.5.dist-info"
        for info in sorted(folder.parent.glob("nvidia_nccl_*.dist-info")):
            found["NCCL"] = info.name.removesuffix(".dist-info").rpartition("-")[2]
    if driver := driver_version():
        found["GPU driver"] = driver
    return found


def torch_folder() -> Path | None:
    """Return torch's folder without importing it; None without torch."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def torch_build() -> dict[str, str]:
    """Return the non-empty values in torch/version.py: __version__, cuda, hip, git_version."""
    folder = torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return {}
    # "__version__ = '2.6.0+cu124'", "cuda: Optional[str] = '12.4'", "hip: ... = None"
    return dict(re.findall(r"^(\w+)(?:: [^=]+)? = ['\"]([^'\"]*)['\"]$", text, re.MULTILINE))


def driver_version() -> str:
    """Return the version of the GPU driver's kernel module; "" without one."""
    for module in (Path("/sys/module/nvidia"), Path("/sys/module/amdgpu")):
        try:
            return (module / "version").read_text().strip()
        except OSError:
            if module.is_dir():
                return f"of kernel {os.uname().release}"
    return ""


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a training runs."""
    found = {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(_PREFIXES) or name in _OTHERS) and name not in _OF_RANK
    }
    for name in _PATHS:  # Open MPI repeats entries, and adds empty ones on other hosts
        if name in found:
            entries = filter(None, found[name].split(os.pathsep))
            found[name] = os.pathsep.join(dict.fromkeys(entries))
    return {name: value for name, value in found.items() if value or name not in _PATHS}


# What rank 0 concludes ----------------------------------------------------------------------------


def _names(values: Iterable[Mapping[str, str]]) -> list[str]:
    """Return all names in these mappings, in order of their first appearance."""
    return list(dict.fromkeys(name for names in values for name in names))


def compare(
    name: str,
    values: Mapping[RankPlace, str],
    level: Level,
    remedy: str,
) -> Iterator[Finding]:
    """Yield a finding that names the ranks that differ from most others."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    common, count = counts.most_common(1)[0]
    odd = [place for place, value in values.items() if value != common]
    others = list(dict.fromkeys(values[place] for place in odd))
    parts = [
        f"{_where([place for place in odd if values[place] == value], values)}: "
        f"{_shorten(value, common)}"
        for value in others[:4]
    ]
    if len(others) > 4:
        parts.append(f"{len(others) - 4} other values")
    rest = "the other ranks" if len(counts) == 2 else f"{count} ranks"
    yield Finding(
        level,
        f"{name} differs. {'; '.join(parts)}; {rest}: {_shorten(common, others[0])}",
        remedy,
        tuple(place.rank for place in odd),
        tuple(dict.fromkeys(place.host for place in odd)),
    )


def _depends_on_local_rank(name: str, values: Mapping[RankPlace, str]) -> bool:
    """Whether a variable is set in the same way on each host, for each local rank."""
    of_hosts: dict[int, list[str]] = {}
    for place, value in values.items():
        of_hosts.setdefault(place.node, []).append(value)
    if len(of_hosts) == 1:
        return name.endswith(_OF_LOCAL_RANK)
    return len({tuple(of_host) for of_host in of_hosts.values()}) == 1


def _where(odd: Sequence[RankPlace], values: Mapping[RankPlace, str]) -> str:
    """Return "h3" if all of its ranks differ, else "rank 3 on h2"."""
    hosts = {place.node: place.host for place in odd}
    is_whole = len([place for place in values if place.node in hosts]) == len(odd)
    return names_of(list(hosts.values())) if is_whole else show(odd)


def _shorten(value: str, other: str) -> str:
    """Return a value for a message; from a long list of paths, the entries that another lacks."""
    if len(value) <= _SHOWN:
        return value or "(empty)"
    entries = other.split(os.pathsep)
    own = [entry for entry in value.split(os.pathsep) if entry not in entries]
    shown = os.pathsep.join(own) or value
    return f"...{shown[-_SHOWN:]}" if len(shown) > _SHOWN else f"...{shown}..."
