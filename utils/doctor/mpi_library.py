"""Find out which MPI library mpi4py would load, without importing it: that may end the process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

OPEN_MPI, MPICH = (
    "Open MPI",
    "MPICH",
)  # the two families; Intel MPI, Cray MPICH and MVAPICH are MPICH
_LIBRARY = re.compile(rb"libmpi(?:_\w+|ch)?\.so(?:\.\d+)?")
# In this order mpi4py's wheels try them; the number is that of the binary interface.
_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")


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
