"""Find the commands of PBS and its configuration on this host."""

from __future__ import annotations

import os
import shutil

DEFAULT_PREFIX = "/opt/pbs"  # where the packages of OpenPBS and PBS Professional install


def find_program(name: str) -> str:
    """Return the path of a PBS command: on PATH, below PBS_EXEC or DEFAULT_PREFIX; else its name.

    The Debian package slurm-wlm-torque installs Perl scripts called qsub, qstat and pbsnodes that
    submit to Slurm, and they come before /opt/pbs/bin in a job's PATH. They are passed over.
    """
    path = shutil.which(name)
    if path is not None and not _submits_to_slurm(path):
        return path

    for prefix in (os.environ.get("PBS_EXEC"), configuration().get("PBS_EXEC"), DEFAULT_PREFIX):
        installed = os.path.join(prefix, "bin", name) if prefix else ""
        if os.access(installed, os.X_OK):
            return installed
    return name


def _submits_to_slurm(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            beginning = file.read(4096)
    except OSError:
        return False
    first_line = beginning.partition(b"\n")[0]
    return first_line.startswith(b"#!") and b"perl" in first_line and b"slurm" in beginning.lower()


def configuration() -> dict[str, str]:
    """Return the settings of pbs.conf(5), empty where there is no such file."""
    path = os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            settings = [line.partition("=") for line in file if "=" in line]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in settings}
