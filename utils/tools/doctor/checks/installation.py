"""Check what is installed on each host: torch for GPUs and driver, MPI, stale variables."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....job.commands import SchedulerError
from ....launch_error import LaunchError
from ....launchers.detect import find_launcher
from ....launchers.launcher import shown
from ....launchers.rank_variables import RANK_VARIABLES
from ...launch.programs import Programs
from ...schedulers import get_scheduler
from ..check import Check, Finding, Level, Ranks, Reported
from .equality import driver_version, torch_build, torch_folder

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")  # 3D and display controllers, accelerators
# The oldest driver of NVIDIA for each major version of CUDA, by minor version compatibility:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
OPEN_MPI, MPICH = "Open MPI", "MPICH"  # Intel MPI, Cray MPICH and MVAPICH are of its family
_LIBRARY = re.compile(rb"libmpi(?:_\w+|ch)?\.so(?:\.\d+)?")
# In this order mpi4py's wheels try them; the number is that of the binary interface.
_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
_RANK_VARIABLES = [name for name in RANK_VARIABLES if name not in ("NODE_RANK", "GROUP_RANK")]


@dataclass(frozen=True)
class InstallationFacts:
    """What is installed on a host.

    launcher: of this process, "single" without one; mpi_launcher: the MPI that it belongs to.
    torch, cuda, hip, driver: versions, "" without. stale: variables of another launch. pci_gpus:
    GPUs on the PCI bus, by vendor. has_devices: whether this process sees the device files of a
    driver. mpiexec: "TITLE (PATH)". mpi4py: the library that it would load.
    """

    launcher: str
    mpi_launcher: str
    scheduler: str
    stale: str
    torch: str
    cuda: str
    hip: str
    driver: str
    pci_gpus: dict[str, int]
    has_devices: bool
    mpiexec: str
    mpi4py: str


class Installation(Check[InstallationFacts]):
    """What is installed, and whether it fits together."""

    name = "installation"
    per = "host"
    quick = True
    facts = InstallationFacts

    def __init__(self, quick: bool) -> None:
        """quick: leave out what starts other programs."""
        self._quick = quick

    def collect(self, ranks: Ranks) -> InstallationFacts:
        launcher, mpi = _launcher()
        single = len(ranks.everyone) == 1
        build, has_torch = torch_build(), torch_folder() is not None
        needs_mpi = bool(mpi) or not self._quick
        return InstallationFacts(
            launcher=launcher,
            mpi_launcher=mpi,
            scheduler=_scheduler() if single else "",
            stale=shown(os.environ, _RANK_VARIABLES) if launcher == "single" else "",
            torch=build.get("__version__", "unknown") if has_torch else "",
            cuda=build.get("cuda", ""),
            hip=build.get("hip", ""),
            driver=driver_version(),
            pci_gpus=pci_gpus(),
            has_devices=Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(),
            mpiexec="" if self._quick else _mpiexec(),
            mpi4py=library_of_mpi4py() if needs_mpi else "",
        )

    def conclude(self, reported: Sequence[Reported[InstallationFacts]]) -> Iterator[Finding]:
        findings = [
            found
            for one in reported
            for found in (
                *_check_torch(one.facts, one.place.host),
                *_check_mpi(one.facts, one.place.host),
            )
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


def _launcher() -> tuple[str, str]:
    """Return the launcher of this process, and the MPI that it belongs to, such as "Open MPI"."""
    try:
        found = find_launcher()
    except LaunchError:
        return "unknown", ""
    return found.placement.launcher, next(iter(found.launcher.mpi_libraries), "")


def _scheduler() -> str:
    try:
        return get_scheduler().name
    except SchedulerError:
        return ""


def _mpiexec() -> str:
    found = Programs().mpiexec
    return f"{found.method.title} ({found.path})" if found else ""


def pci_gpus(root: Path = Path("/")) -> dict[str, int]:
    """Count the GPUs of NVIDIA and AMD on the PCI bus, whether they have a driver or not."""
    found: dict[str, int] = {}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = _VENDORS.get((device / "vendor").read_text().strip())
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor and kind.startswith(_GPU_CLASSES):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def library_of_mpi4py(environ: Mapping[str, str] = os.environ) -> str:
    """Return the library that mpi4py would load, such as "libmpi.so.40"; "" without mpi4py.

    The result is a path where mpi4py itself searches for the library: its wheels do.
    """
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        return ""
    extensions = sorted(Path(spec.origin).parent.glob("MPI*.so"))
    if len(extensions) > 1:  # a wheel has one for each family
        return environ.get("MPI4PY_LIBMPI") or next(_search(environ), "")
    for extension in extensions:
        found = _LIBRARY.search(extension.read_bytes())  # the name is in its dynamic section
        if found:
            return found[0].decode()
    return ""


def family(library: str) -> str:
    """Return the family of a library by its name or path; "" if it is unknown."""
    name = os.path.basename(os.path.realpath(library) if os.path.exists(library) else library)
    if re.search(r"libmpi(?:_cray|ch)|libmpi\.so\.12\b", name):
        return MPICH
    return OPEN_MPI if re.search(r"libmpi\.so\.[24]0\b", name) else ""


def family_of_mpiexec(title: str) -> str:
    """Return the family of a launch method's title or a launcher's name."""
    return OPEN_MPI if re.search("open ?mpi", title, re.IGNORECASE) else MPICH


def _search(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the libraries that mpi4py's wheels find, the preferred one first."""
    own = (f"{sys.prefix}/lib/{name}" for name in _NAMES)
    yield from (path for path in own if os.path.exists(path))
    cached = _cached_libraries()
    for name in _NAMES:  # as the dynamic linker searches
        for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
            if os.path.exists(f"{folder}/{name}"):
                yield f"{folder}/{name}"
        if name in cached:
            yield cached[name]


def _cached_libraries() -> dict[str, str]:
    """Return the paths of the system's MPI libraries, by name."""
    environ = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/sbin:/usr/sbin"}
    try:
        done = subprocess.run(
            ["ldconfig", "-p"], env=environ, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    # "	libmpi.so.40 (libc6,x86-64) => /lib/x86_64-linux-gnu/libmpi.so.40"
    lines = re.findall(r"^\s*(libmpi\.so\S*) .*=> (\S+)$", done.stdout, re.MULTILINE)
    return dict(reversed(lines))


# What rank 0 concludes ----------------------------------------------------------------------------


def _check_torch(facts: InstallationFacts, host: str) -> Iterator[Finding]:
    if not facts.torch:
        yield Finding(
            Level.BAD,
            f"the Python of {host} has no torch. Expected an environment with torch",
            "Activate the environment of the training, or install it: ./scripts/setup_env.sh",
            hosts=(host,),
            subject="torch",
            follows=("Python",),
        )
        return
    for vendor, build, name in (("NVIDIA", facts.cuda, "CUDA"), ("AMD", facts.hip, "ROCm")):
        count = facts.pci_gpus.get(vendor, 0)
        if not count:
            continue
        if not build and (facts.driver and facts.has_devices):
            yield Finding(
                Level.WARNING,
                f"{host}: {count} GPU(s) of {vendor}, but torch {facts.torch} is not built for "
                f"{name}: it would train on CPUs",
                f"Install a build of torch for {name}: https://pytorch.org/get-started/locally",
                hosts=(host,),
            )
        elif build and not facts.driver:
            yield Finding(
                Level.WARNING,
                f"{host}: {count} GPU(s) of {vendor} on the PCI bus, but no driver is loaded",
                "Log in to another host, or ask the centre to load the driver",
                hosts=(host,),
            )
    oldest = _OLDEST_DRIVER.get(facts.cuda.partition(".")[0])
    major = re.match(r"\d+", facts.driver)
    if oldest and major and "NVIDIA" in facts.pci_gpus and int(major[0]) < oldest:
        yield Finding(
            Level.BAD,
            f"the driver of {host} is {facts.driver}, but torch {facts.torch} is built for CUDA "
            f"{facts.cuda}, which needs {oldest} or newer",
            "Install a torch built for an older CUDA, or ask the centre for a newer driver",
            hosts=(host,),
        )


def _check_mpi(facts: InstallationFacts, host: str) -> Iterator[Finding]:
    """Compare the library of mpi4py with the mpiexec that starts, or would start, the ranks."""
    if not facts.mpi4py:
        return
    found = family(facts.mpi4py)
    by_mpiexec = f"{facts.launcher} ({facts.mpi_launcher})" if facts.mpi_launcher else ""
    used = by_mpiexec or (facts.mpiexec if facts.launcher == "single" else "")
    expected = family_of_mpiexec(used) if used else ""
    if found and expected and found != expected:
        yield Finding(
            Level.WARNING,
            f"mpi4py on {host} loads {facts.mpi4py} ({found}), but mpiexec is {used}. Expected one "
            "MPI: each process would be rank 0 of 1, or would end in MPI_Init",
            f"Install mpi4py for {expected}, load the module of {found}, or set MPI4PY_LIBMPI to "
            f"the libmpi of {expected}",
            hosts=(host,),
        )


def _describe(facts: InstallationFacts) -> str:
    parts = [f"torch {facts.torch}"]
    if facts.driver:
        parts.append(f"driver {facts.driver}")
    parts.append(facts.mpiexec or "")
    if facts.mpi4py:
        parts.append(f"mpi4py with {os.path.basename(facts.mpi4py)}")
    parts.append(facts.scheduler and f"scheduler {facts.scheduler}, site generic-{facts.scheduler}")
    return ", ".join(filter(None, parts))
