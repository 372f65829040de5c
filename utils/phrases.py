"""What the kit's sentences say of a rank, after "rank 3 on node7 (pid 42) ", and what it means.

The ranks and the launch write these words, and `ddpkit doctor logs` reads them: a sentence changes
here, for all of them.
"""

from __future__ import annotations

from .launch_protocol import Kind

FAILED = "failed:"  # an exception follows
CANNOT_START = "cannot start:"
NO_RANK_0 = "did not find rank 0"
NO_REPORT = "ended without a report"
ENDED_BY = "was ended by"  # a signal follows
ABORTED = "was aborted by gloo"
ENDED_WITH = "ended with exit status"  # a number follows
HAD_ENDED = "had ended with exit status 0"
LEFT = "left normally"
NOT_ENTERED = "did not enter"  # a collective follows
OTHER_COLLECTIVE = "entered a different"
SILENT = "does not respond"

# The first that a sentence begins with decides.
KIND_OF: tuple[tuple[str, Kind], ...] = (
    (FAILED, "exception"),
    (CANNOT_START, "start"),
    (NO_RANK_0, "start"),
    (NO_REPORT, "killed"),
    (ENDED_BY, "status"),
    (ABORTED, "killed"),
    (f"{ENDED_WITH} 0", "left"),
    (ENDED_WITH, "status"),
    (HAD_ENDED, "left"),
    ("left ", "uneven"),  # also "left the loop"
    (NOT_ENTERED, "hang"),
    (OTHER_COLLECTIVE, "hang"),
    (SILENT, "hang"),
)
