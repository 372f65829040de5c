"""Which programs that start ranks are here, and which mpiexec is which and belongs here.

Not here: what is started with them (plan.py).
"""
from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..schedulers.pbs import program as pbs_program

PALS_FOLDER = Path("/opt/cray/pals")
KINDS = {"pals": "PALS", "openmpi": "Open MPI", "intel-mpi": "Intel MPI", "mpich": "MPICH"}
_NAMES = ("mpiexec", "mpiexec.hydra", "mpirun")
_SECONDS = 10.0  # an mpiexec that needs longer to tell its version is of no use
# What `mpiexec --version` says, by family:
_SAYS = (("pals", r"\bPALS\b|\bpals\b"), ("openmpi", r"\((Open MPI|OpenRTE|PRRTE)\)|\bPRRTE\b|Open MPI"),
         ("intel-mpi", r"Intel\(R\) MPI"), ("mpich", r"HYDRA build details"))


class Mpiexec(NamedTuple):
    """An mpiexec that was told apart: kind is a key of KINDS, major its main version (0 where it does not matter).

    other_srun: whether its folder has a srun that is not the one on PATH, as where two versions of Slurm are installed.
    """

    path: str
    kind: str
    major: int = 0
    other_srun: bool = False


class Programs:
    """The programs of this host. Each is looked for when it is asked for; environ: as the program is to be found."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, mpiexec: str | None = None,
                 pals_folder: Path = PALS_FOLDER) -> None:
        self._path = environ.get("PATH", os.defpath)
        self._in_pbs_task = bool(environ.get("PBS_JOBCOOKIE"))  # else pbs_tmrsh and pbsdsh refuse, as after ssh
        self._asked_for = mpiexec
        self._pals_folder = pals_folder

    def find(self, name: str) -> str | None:
        """Path of srun, ssh, pbs_tmrsh or pbsdsh, or None."""
        if name.startswith("pbs"):
            if not self._in_pbs_task:
                return None
            found = pbs_program(name)
            return found if os.path.isabs(found) else shutil.which(found, path=self._path)
        return shutil.which(name, path=self._path)

    @functools.cached_property
    def mpiexec(self) -> Mpiexec | None:
        """The mpiexec that belongs here: the one asked for; PALS where it is installed; else the first real one."""
        candidates = [self._asked_for] if self._asked_for else self._candidates()
        found = next((found for path in candidates if (found := identify(path)) is not None), None)
        return found._replace(other_srun=self._is_other_srun(os.path.dirname(found.path))) if found else None

    @functools.cached_property
    def pals(self) -> Mpiexec | None:
        """PALS's mpiexec, where it is installed: a Cray EX, whose network other launchers cannot set up."""
        for path in pals_candidates(self._pals_folder, self._path):
            return Mpiexec(path, "pals")
        return None

    def _is_other_srun(self, folder: str) -> bool:
        beside, ours = shutil.which("srun", path=folder), self.find("srun")
        return bool(beside and ours) and os.path.realpath(beside or "") != os.path.realpath(ours or "")

    def _candidates(self) -> Iterator[str]:
        yield from pals_candidates(self._pals_folder, self._path)  # a conda or pip MPI may hide it on PATH
        for folder in self._path.split(os.pathsep):
            for name in _NAMES:
                path = os.path.join(folder or ".", name)
                if os.path.isfile(path) and os.access(path, os.X_OK):
                    yield os.path.abspath(path)


def pals_candidates(folder: Path, path: str) -> list[str]:
    """mpiexec of PALS: the version whose module is loaded, then the default one, then the newest."""
    loaded = [Path(entry) / "mpiexec" for entry in path.split(os.pathsep) if entry.startswith(f"{folder}/")]
    versions = sorted(folder.glob("[0-9]*/bin/mpiexec"), key=lambda file: _numbers(file.parts[-3]), reverse=True)
    return [str(file) for file in dict.fromkeys([*loaded, folder / "default/bin/mpiexec", *versions])
            if os.access(file, os.X_OK)]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def identify(path: str) -> Mpiexec | None:
    """Which mpiexec is at path. None for what only has the name: PBS's own wrapper, Slurm's, or one that hangs."""
    if f"{PALS_FOLDER}/" in path or f"{PALS_FOLDER}/" in os.path.realpath(path):
        return Mpiexec(path, "pals")
    if _is_script_of_slurm(path):
        return None
    try:
        said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=_SECONDS).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return from_version(path, said)


def from_version(path: str, said: str) -> Mpiexec | None:
    """The same, by what `--version` printed: "mpiexec (OpenRTE) 4.1.4" -> openmpi, 4."""
    for kind, pattern in _SAYS:
        if re.search(pattern, said):
            number = re.search(r"\)\s+(\d+)\.\d|Version:\s+(\d+)\.", said)
            return Mpiexec(path, kind, int(number[1] or number[2]) if number else 0)
    return None


def _is_script_of_slurm(path: str) -> bool:
    """Debian's slurm-wlm-torque has a Perl script that calls srun with options of another mpiexec."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return b"perl" in head.split(b"\n")[0] and (b"slurm" in head.lower() or b"srun" in head)
