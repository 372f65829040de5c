"""Start ranks from copies of their packages on each node: `ddpkit launch --stage`.

packages.py lists what is staged. index.py finds whether it has changed, archive.py packs it, and
distribute.py brings the archive to the nodes, with broadcast.py where MPI sends it. There, start.py
becomes the program of a rank, with a copy that node_copy.py keeps: unpack.py makes it, marker.py
and imports.py check it, room.py removes it. kept.py has what archives and copies share. Only the
standard library is used, but for mpi4py in broadcast.py: a Python without site-packages runs these.
stage_cli.py is the command `ddpkit stage`.
"""

from __future__ import annotations

from typing import NamedTuple

RECEIVED = "ddpkit-stage-{}.tar"  # an archive that was sent to a node

# Folders of a copy; an environment has none of these names.
PACKAGES = "ddpkit-packages"  # further folders of packages
ALSO = "ddpkit-also"  # folders of --stage-also
CACHES = "ddpkit-caches"

ORIGIN = "ddpkit-stage-of"  # in pyvenv.cfg of a copy: the environment
# Set for whoever starts ranks: a copy in memory goes with them. A folder that is named keeps it.
IN_MEMORY = "DDPKIT_STAGED_IN_MEMORY"


class StagingError(Exception):
    """The packages cannot be staged; the message has what was found and what to do."""


class Archive(NamedTuple):
    """A packed environment. members: a hash over the list of members."""

    key: str
    path: str
    size: int  # bytes of the archive
    files: int  # in it, links included
    members: str
    prefix: str = ""
    also: tuple[str, ...] = ()  # folders in it besides those of the environment
