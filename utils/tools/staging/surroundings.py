"""What lies beside the packages of an environment: a copy has links to it.

Packages find libraries and data by paths relative to their own, or to sys.prefix.
"""

from __future__ import annotations

import os

from . import ALSO, CACHES, PACKAGES

SYSTEM = ("/", "/usr", "/usr/local")  # their folders are no environment
_OWN = ("bin", "lib", "lib64", "pyvenv.cfg", PACKAGES, ALSO, CACHES)  # a copy has its own


def names_beside(prefix: str) -> list[str]:
    """Return what lies in an environment, in its bin and in its lib: paths relative to it."""
    if prefix in ("", *SYSTEM):
        return []
    found = [
        folder + entry
        for folder in ("", "bin/", "lib/")
        for entry in sorted(_names(os.path.join(prefix, folder)))
        if not entry.startswith(".ddpkit")
    ]
    return [name for name in found if name not in _OWN]


def add_links(copy: str, prefix: str) -> bool:
    """Link to what was added to an environment after it was packed; return whether any was."""
    added = False
    for name in names_beside(prefix):
        path = os.path.join(copy, name)
        if not os.path.lexists(path):
            os.symlink(os.path.join(prefix, name), path)
            added = True
    return added


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
