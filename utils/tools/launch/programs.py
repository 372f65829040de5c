"""Find the programs that start ranks, and identify which MPI an mpiexec belongs to."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...job.pbs_job import find_program as find_pbs_program
from ...job.pbs_job import submits_to_slurm
from .launch_plan import Mpiexec
from .methods import MPIEXECS
from .methods.mpiexec import Pals

PALS_FOLDER = Path("/opt/cray/pals")
_NAMES = ("mpiexec", "mpiexec.hydra", "mpirun")
_VERSION_SECONDS = 10.0  # time limit of mpiexec --version


class Programs:
    """The programs of this host, each looked for when it is first needed."""

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        *,
        mpiexec: str | None = None,
        pals_folder: Path = PALS_FOLDER,
    ) -> None:
        """environ: decides where programs are found. mpiexec: the path that the user has given."""
        self._path = environ.get("PATH", os.defpath)
        # Outside of a task of PBS, as after ssh, pbs_tmrsh and pbsdsh refuse to work.
        self._in_pbs_task = bool(environ.get("PBS_JOBCOOKIE"))
        self._given_mpiexec = mpiexec
        self._pals_folder = pals_folder

    def find(self, name: str) -> str | None:
        """Return the path of a program such as srun, ssh or pbs_tmrsh; None where it is missing."""
        if not name.startswith("pbs"):
            return shutil.which(name, path=self._path)
        if not self._in_pbs_task:
            return None
        found = find_pbs_program(name)
        return found if os.path.isabs(found) else shutil.which(found, path=self._path)

    @functools.cached_property
    def mpiexec(self) -> Mpiexec | None:
        """The mpiexec that the user has given, else PALS's, else the first real one on PATH."""
        for path in [self._given_mpiexec] if self._given_mpiexec else self._candidates():
            found = identify(path)
            if found is not None:
                return found._replace(other_srun=self._has_other_srun(os.path.dirname(path)))
        return None

    @functools.cached_property
    def pals(self) -> Mpiexec | None:
        """The mpiexec of PALS; None where PALS is not installed."""
        paths = pals_candidates(self._pals_folder, self._path)
        return Mpiexec(paths[0], Pals) if paths else None

    def _has_other_srun(self, folder: str) -> bool:
        """Return whether a folder has an srun that is not the one on PATH."""
        in_folder, on_path = shutil.which("srun", path=folder), self.find("srun")
        if in_folder is None or on_path is None:
            return False
        return os.path.realpath(in_folder) != os.path.realpath(on_path)

    def _candidates(self) -> Iterator[str]:
        # On PATH the mpiexec of PALS may be hidden by one that conda or pip has installed.
        yield from pals_candidates(self._pals_folder, self._path)
        for folder in self._path.split(os.pathsep):
            for name in _NAMES:
                path = os.path.join(folder or ".", name)
                if os.path.isfile(path) and os.access(path, os.X_OK):
                    yield os.path.abspath(path)


def pals_candidates(folder: Path, path: str) -> list[str]:
    """Return PALS's mpiexecs: the loaded module's, the default version's, then the newest first."""
    loaded = [
        Path(entry) / "mpiexec"
        for entry in path.split(os.pathsep)
        if entry.startswith(f"{folder}/")
    ]
    versions = sorted(folder.glob("[0-9]*/bin/mpiexec"), key=_version_of, reverse=True)
    files = dict.fromkeys([*loaded, folder / "default/bin/mpiexec", *versions])
    return [str(file) for file in files if os.access(file, os.X_OK)]


def _version_of(mpiexec: Path) -> list[int]:
    """Convert /opt/cray/pals/1.10/bin/mpiexec to [1, 10]."""
    return [int(number) for number in re.findall(r"\d+", mpiexec.parts[-3])]


def identify(path: str) -> Mpiexec | None:
    """Return which mpiexec this is; None if it hangs or is only a wrapper, such as PBS's."""
    if f"{PALS_FOLDER}/" in path or f"{PALS_FOLDER}/" in os.path.realpath(path):
        return Mpiexec(path, Pals)
    if submits_to_slurm(path):
        return None
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # "mpiexec (OpenRTE) 4.1.4" is Open MPI 4.
    output = done.stdout.decode(errors="replace")
    for method in MPIEXECS:
        if re.search(method.version_pattern, output):
            version = re.search(r"\)\s+(\d+)\.\d|Version:\s+(\d+)\.", output)
            major = int(version[1] or version[2]) if version else 0
            return Mpiexec(path, method, major)
    return None
