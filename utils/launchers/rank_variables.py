"""Set RANK and the other rank variables in this process, and recognise them in programs it starts.

setup_distributed() sets the variables of torchrun's workers, so that libraries which read them see
the launch. Every program that a rank starts inherits them but is not a rank. MARKER names the
process that the variables belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping

from ..host.process import parent_pids, start_time

# The process, its start time, its variables, and those of them that its launcher had not set:
# [4242, 771234, {"RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "0"}, ["NODE_RANK"]]
MARKER = "DDPKIT_RANK_PROCESS"
# torchrun gives each worker its own error file, which distinguishes a new worker from a program
# that a worker has started.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RANK_VARIABLES = (  # of each rank, as torchrun names them
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# "2/4": which of the processes that launch.py has started this is, or is below. It stays where a
# launcher below that process sets RANK and WORLD_SIZE anew.
LAUNCH_RANK = "DDPKIT_LAUNCH_RANK"
# Set by ddpkit launch --independent, or by the user: processes need not form one group.
INDEPENDENT = "DDPKIT_INDEPENDENT"


def set_variables(
    values: Mapping[str, str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables, and record this process and their values in MARKER."""
    added = [name for name, value in values.items() if environ.get(name) != value]
    environ.update(values)
    recorded = {name: environ[name] for name in (*RANK_VARIABLES, _ERROR_FILE) if name in environ}
    environ[MARKER] = json.dumps([os.getpid(), start_time(os.getpid()), recorded, added])


class InheritedVariables:
    """The rank variables that a rank has set in this environment, read from MARKER.

    rank_process: the rank, for messages: "rank 1 of 4 (process 4242)".
    is_rank: whether this very process is that rank.
    changed: whether a recorded variable has another value now, set for a new launch.
    new_worker: whether a torchrun has started this process, below that rank or in its place.
    environ: the environment without that rank's variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._pid, self._start_time, recorded, added = json.loads(environ[MARKER])
        self.rank_process = (
            f"rank {recorded['RANK']} of {recorded['WORLD_SIZE']} (process {self._pid})"
        )
        self.is_rank = environ is os.environ and self._is_rank_process(os.getpid())
        self.changed = any(environ.get(name) != value for name, value in recorded.items())
        error_file = environ.get(_ERROR_FILE, recorded.get(_ERROR_FILE))
        self.new_worker = self.changed and error_file != recorded.get(_ERROR_FILE)

        set_by_rank = added if self.is_rank else list(recorded)
        hidden = [] if self.changed else set_by_rank
        self.environ = {name: value for name, value in environ.items() if name not in hidden}

    def pids_below_rank(self) -> Iterator[int]:
        """Yield the process ids of the ancestors up to that rank, nearest first."""
        for pid in parent_pids():
            if self._is_rank_process(pid):
                return
            yield pid

    def _is_rank_process(self, pid: int) -> bool:
        return [pid, start_time(pid)] == [self._pid, self._start_time]


def inherited_variables(environ: Mapping[str, str]) -> InheritedVariables | None:
    """Return the variables that a rank has set in this environment; None where it has set none."""
    return InheritedVariables(environ) if MARKER in environ else None


def launch_rank(environ: Mapping[str, str]) -> str:
    """Return LAUNCH_RANK if this process must form a group with all processes of that launch.

    "" where it need not: without launch.py, with INDEPENDENT, and below a rank that has its group.
    """
    inherited = inherited_variables(environ)
    if environ.get(INDEPENDENT) or inherited is not None and not inherited.is_rank:
        return ""
    return environ.get(LAUNCH_RANK, "")


def without_inherited(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the variables that a rank has set in it."""
    inherited = inherited_variables(environ)
    return environ if inherited is None else inherited.environ
