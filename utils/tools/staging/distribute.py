"""Bring the archive to the nodes of a launch: by sbcast, or each node reads it itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ...host.process import import_path
from . import Archive, StagingError
from .archive import get_archive
from .node_copy import candidates, is_kept
from .packages import find_environment


def stage(
    python: str,
    hosts: Sequence[str],
    own_host: str,
    environ: Mapping[str, str],
    *,
    stage_dir: str,
    also: Sequence[str],
    note: Callable[[str], None],
) -> list[str]:
    """Return the words before those of each rank, which stage the packages of its Python.

    They are empty where that is not possible, and note() prints why.

    hosts: of the ranks; own_host: of this process. environ: of the ranks.
    """
    began = time.monotonic()
    try:
        environment = find_environment(python, also)
        archive = get_archive(environment, note)
    except (StagingError, OSError) as error:
        note(f"warning: the packages are not staged: {error}. The ranks use the shared ones")
        return []
    received = ""
    if len(hosts) > 1 and environ.get("SLURM_JOB_ID"):
        folders = candidates(stage_dir, environ)
        # Later jobs find copies on most nodes; a node without one reads the archive itself.
        if own_host not in hosts or not is_kept(archive.key, folders):
            received = _broadcast(archive, folders[0], len(hosts), environ, note)
    order = {
        "archive": tuple(archive),
        "python": python,
        "stage_dir": stage_dir,
        "received": received,
        "seconds": time.monotonic() - began,
        "launch": f"{os.getpid()}-{os.urandom(6).hex()}",
    }
    root, name = import_path(__name__, __file__)
    start = f"{name.rpartition('.')[0]}.start import main; sys.exit(main({order!a}, sys.argv[1:]))"
    return [python, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {root!a}); from {start}"]


def _broadcast(
    archive: Archive,
    folder: str,
    hosts: int,
    environ: Mapping[str, str],
    note: Callable[[str], None],
) -> str:
    """Send the archive to all nodes of a Slurm job; return its path there, or "".

    Slurm sends to every node of a job: those without ranks would keep the file.
    """
    program = shutil.which("sbcast", path=environ.get("PATH"))
    if program is None or environ.get("SLURM_JOB_NUM_NODES") != str(hosts):
        return ""
    target = os.path.join(folder, f"ddpkit-stage-{os.urandom(8).hex()}.tar")
    start = time.monotonic()
    words = [program, "--force", archive.path, target]
    try:
        done = subprocess.run(words, env=dict(environ), capture_output=True, text=True)
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except OSError as error:
        done, problem = None, str(error)
    if done is None or done.returncode:
        note(f"staging: sbcast failed ({problem}). Each node reads {archive.path} itself")
        return ""
    note(f"staging: sbcast has sent the archive to {hosts} nodes, {time.monotonic() - start:.1f} s")
    return target
