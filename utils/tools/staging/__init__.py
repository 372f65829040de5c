"""Start ranks from copies of their packages on each node: `ddpkit launch --stage`.

packages.py lists what is staged. index.py checks whether it has changed, and archive.py packs it.
distribute.py brings the archive to the nodes; with MPI, broadcast.py sends it. On a node, start.py
prepares a copy and becomes the program of a rank. node_copy.py keeps the copy, unpack.py makes it,
marker.py and imports.py check it, and room.py removes it. kept.py is shared by archives and copies.
Only the standard library is used, except for mpi4py in broadcast.py, because a Python without
site-packages runs these modules. stage_cli.py is the command `ddpkit stage`.
"""

from __future__ import annotations

from typing import NamedTuple

RECEIVED = "ddpkit-stage-{}.tar"  # file name of an archive that was sent to a node

# Folders in a copy; no environment has these names.
PACKAGES = "ddpkit-packages"  # more folders of packages
ALSO = "ddpkit-also"  # folders from --stage-also
CACHES = "ddpkit-caches"

ORIGIN = "ddpkit-stage-of"  # key in a copy's pyvenv.cfg; its value is the environment
# If set, the process that starts ranks on a node removes copies in memory after them. Unset with
# --stage-dir, whose copies stay.
IN_MEMORY = "DDPKIT_STAGED_IN_MEMORY"


class StagingError(Exception):
    """The packages cannot be staged; the message says what was found and what to do."""


class Archive(NamedTuple):
    """A packed environment. members: a hash over the list of members."""

    key: str
    path: str
    size: int  # bytes of the archive
    files: int  # files in the archive, links included
    members: str
    prefix: str = ""
    also: tuple[str, ...] = ()  # other folders in it, from --stage-also
