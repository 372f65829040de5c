"""Remove the copy on a node with the ranks that have used it, where it lies in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from . import IN_MEMORY, StagingError
from .free_space import is_in_memory
from .node_copy import candidates, open_root
from .room import copies_in, remove_copy

_LAST_RANK_SECONDS = 1.0  # for other ranks of the node, and workers of this one, to end
_POLL_SECONDS = 0.05


def remove_from_memory(environ: Mapping[str, str]) -> None:
    """Remove copies in memory that no rank uses any more: other jobs need the memory.

    Who has started ranks on a node calls it once they have ended; the last one removes the copy.

    environ: of a rank.
    """
    if not environ.get(IN_MEMORY):
        return
    limit = time.monotonic() + _LAST_RANK_SECONDS
    for folder in candidates("", environ):
        with suppress(OSError, StagingError):
            root = open_root(folder, make=False)
            for _, key in copies_in(root) if is_in_memory(root) else ():
                while not remove_copy(root, key) and time.monotonic() < limit:
                    time.sleep(_POLL_SECONDS)
