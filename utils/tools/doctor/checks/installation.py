"""Check the software on each host: torch's match with GPUs and driver, stale variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....errors import LaunchError
from ....host import gpus
from ....job.commands import SchedulerError
from ....launchers.detect import find_launcher
from ....launchers.launcher import shown
from ....launchers.rank_variables import RANK_VARIABLES
from ...launch.programs import Programs
from ...schedulers import get_scheduler
from .. import known_bad
from ..check import Check, Finding, Level, Ranks, Reported
from .equality import driver_version, software, torch_build, torch_folder

_BUILDS = {"nvidia": "CUDA", "amd": "ROCm"}
# CUDA's major version -> NVIDIA's oldest driver for it, by minor version compatibility:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_RANK_VARIABLES = [name for name in RANK_VARIABLES if name not in ("NODE_RANK", "GROUP_RANK")]


@dataclass(frozen=True)
class InstallationFacts:
    """The installation on a host.

    torch, cuda, hip, driver: versions, "" if missing. stale: variables of another launch. gpus:
    number of GPUs of gpu_vendor that the driver shows without masks. mpiexec: "TITLE (PATH)".
    nccl, ofi_plugin: versions, "" if missing. features: from known_bad.host_features().
    """

    scheduler: str
    stale: str
    torch: str
    cuda: str
    hip: str
    driver: str
    gpus: int
    gpu_vendor: str
    mpiexec: str
    nccl: str = ""
    ofi_plugin: str = ""
    features: list[str] = field(default_factory=list)


class Installation(Check[InstallationFacts]):
    """Installed software, and whether it matches."""

    name = "installation"
    per = "host"
    quick = True
    facts = InstallationFacts

    def __init__(self, quick: bool) -> None:
        """quick: skip checks that start other programs."""
        self._quick = quick

    def collect(self, ranks: Ranks) -> InstallationFacts:
        single = len(ranks.everyone) == 1
        build, has_torch = torch_build(), torch_folder() is not None
        return InstallationFacts(
            scheduler=_scheduler() if single else "",
            stale=shown(os.environ, _RANK_VARIABLES) if _has_no_launcher() else "",
            torch=build.get("__version__", "unknown") if has_torch else "",
            cuda=build.get("cuda", ""),
            hip=build.get("hip", ""),
            driver=driver_version(),
            gpus=gpus.count_gpus({}),
            gpu_vendor=gpus.gpu_vendor() or "",
            mpiexec="" if self._quick else _mpiexec(),
            nccl=software().get(known_bad.NCCL, ""),
            ofi_plugin=known_bad.plugin_version(),
            features=known_bad.host_features(),
        )

    def conclude(self, reported: Sequence[Reported[InstallationFacts]]) -> Iterator[Finding]:
        findings = [
            found for report in reported for found in _check_torch(report.facts, report.place.host)
        ]
        first = reported[0] if reported else None
        if first is not None and first.facts.stale:
            names = [word.partition("=")[0] for word in first.facts.stale.split()]
            findings.append(
                Finding(
                    Level.WARNING,
                    f"{first.facts.stale} is set on {first.place.host}, but no launcher has "
                    "started this process. A training that is started here may wait for ranks that "
                    "do not exist",
                    f"unset {' '.join(names)}; look for it in the start-up files of the shell, too",
                    hosts=(first.place.host,),
                )
            )
        if not findings and first is not None:
            findings = [Finding(Level.GOOD, _describe(first.facts))]
        yield from findings


# Facts of this host -------------------------------------------------------------------------------


def _has_no_launcher() -> bool:
    try:
        return find_launcher().placement.launcher == "single"
    except LaunchError:
        return False


def _scheduler() -> str:
    try:
        return get_scheduler().name
    except SchedulerError:
        return ""


def _mpiexec() -> str:
    found = Programs().mpiexec
    return f"{found.method.title} ({found.path})" if found else ""


# What rank 0 concludes ----------------------------------------------------------------------------


def _check_torch(facts: InstallationFacts, host: str) -> Iterator[Finding]:
    if not facts.torch:
        yield Finding(
            Level.BAD,
            f"the Python of {host} has no torch. Expected an environment with torch",
            "Activate the environment of the training, or install it: ./scripts/setup_env.sh. If "
            "it is active, and ddpkit is of another Python: ddpkit launch -n 1 -m ddpkit doctor",
            hosts=(host,),
        )
        return
    if facts.gpus:
        versions = {known_bad.NCCL: facts.nccl, known_bad.OFI_PLUGIN: facts.ofi_plugin}
        for row, version in known_bad.find_bad(versions, facts.features):
            where = f" with {row.where}" if row.where else ""
            yield Finding(
                Level.WARNING,
                f"{host} has {row.software} {version}, which {row.what}{where}",
                f"{row.remedy}: {row.source}",
                hosts=(host,),
            )
    build = {"nvidia": facts.cuda, "amd": facts.hip}.get(facts.gpu_vendor)
    if build == "":
        name = _BUILDS[facts.gpu_vendor]
        yield Finding(
            Level.WARNING,
            f"{host}: {facts.gpus} GPU(s), but torch {facts.torch} is not built for {name}: it "
            "would train on CPUs",
            f"Install a build of torch for {name}: https://pytorch.org/get-started/locally",
            hosts=(host,),
        )
    oldest = _OLDEST_DRIVER.get(facts.cuda.partition(".")[0])
    major = re.match(r"\d+", facts.driver)
    if oldest and major and facts.gpu_vendor == "nvidia" and int(major[0]) < oldest:
        yield Finding(
            Level.BAD,
            f"the driver of {host} is {facts.driver}, but torch {facts.torch} is built for CUDA "
            f"{facts.cuda}, which needs {oldest} or newer",
            "Install a torch built for an older CUDA, or ask the centre for a newer driver",
            hosts=(host,),
        )


def _describe(facts: InstallationFacts) -> str:
    parts = [f"torch {facts.torch}"]
    if facts.driver:
        parts.append(f"driver {facts.driver}")
    parts.append(facts.mpiexec or "")
    parts.append(facts.scheduler and f"scheduler {facts.scheduler}, site generic-{facts.scheduler}")
    return ", ".join(filter(None, parts))
