"""Import a script's packages once from a copy: some libraries load only where they are installed.

Such libraries contain paths out of their folder, for example an RPATH beyond the environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from . import StagingError
from .marker import MARKER

_SECONDS = 300.0  # seconds for all imports of a script; a first import of torch may take 30
_IMPORTED = f"{MARKER}-imports"  # file in a copy: names that were imported from it
_STATEMENT = re.compile(rb"^(import|from)[ \t]+([\w., \t]+)", re.MULTILINE)
# Variables of ranks. A process with these would take part in the launch.
_OF_RANKS = re.compile("(PMI|OMPI_|PRTE_|HYDRA|MPI_|PALS_|SLURM_|DDPKIT_|RANK$|LOCAL_|WORLD_)")
_LINE = "ddpkit-import "
# Imports only the top-level package: `import mpi4py.MPI` would start MPI.
_CODE = f"""
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    if spec is not None and (spec.origin or "").startswith(sys.prefix + "/"):
        print("\\n{_LINE}" + name, flush=True)
        importlib.import_module(name)
"""


def check_imports(
    copy: str, words: Sequence[str], shared: str, environ: Mapping[str, str], own: Mapping[str, str]
) -> None:
    """Raise StagingError if a script's package can be imported, but not from a copy.

    Packages that no script has imported from this copy before are imported in another process.

    words: command line of the program. shared: the environment's Python. environ: variables of a
    process with the copy; own: without it.
    """
    script = next((word for word in words if word.endswith(".py")), "")
    if not script and "-m" in words[:-1]:
        script = f"{words[words.index('-m') + 1].replace('.', '/')}.py"
    known: list[str] = []
    with suppress(OSError), open(os.path.join(copy, _IMPORTED), encoding="utf-8") as file:
        known = file.read().split()
    names = [name for name in _names(script) if name not in known]
    if not names:
        return
    done = _run([os.path.join(copy, "bin", "python"), "-c", _CODE, *names], environ)
    if done is None:
        return
    status, output, errors = done
    if status:
        name = (re.findall(f"^{_LINE}(.*)$", output, re.MULTILINE) or [""])[-1]
        done = _run([shared, "-c", f"import {name}"], own) if name else None
        if done is not None and done[0] == 0:
            reason = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
            raise StagingError(f"{name} can be imported only from where it is installed: {reason}")
        return  # the ranks get the same error
    with suppress(OSError), open(os.path.join(copy, _IMPORTED), "a", encoding="utf-8") as file:
        file.write("".join(f"{name}\n" for name in names))


def _names(script: str) -> list[str]:
    """Return the packages that a script imports at its top, except Python's own."""
    names = []
    with suppress(OSError), open(script, "rb") as file:
        for keyword, text in _STATEMENT.findall(file.read()):
            parts = text.decode().split(",") if keyword == b"import" else [text.decode()]
            names += [part.split()[0].partition(".")[0] for part in parts if part.strip()]
    found = dict.fromkeys(filter(None, names))
    return [name for name in found if name not in sys.stdlib_module_names]


def _run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str, str] | None:
    """Return exit status, output and errors of a process; None if it takes too long."""
    import subprocess  # slow to load, and seldom needed

    env = {name: value for name, value in environ.items() if not _OF_RANKS.match(name)}
    try:
        done = subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout, done.stderr
