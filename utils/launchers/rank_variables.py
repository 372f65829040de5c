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

# "PID START_TIME NAME=VALUE +NAME=VALUE ...": the + marks variables that the launcher had not set,
# for example "4242 771234 RANK=1 WORLD_SIZE=4 +NODE_RANK=0".
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
# Set by launch.py --independent, or by the user: processes need not form one group.
INDEPENDENT = "DDPKIT_INDEPENDENT"
_RECORDED = (*RANK_VARIABLES, _ERROR_FILE)


def set_variables(
    values: Mapping[str, str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables, and record this process and their values in MARKER."""
    added = {name for name, value in values.items() if environ.get(name) != value}
    environ.update(values)

    words = [str(os.getpid()), str(start_time(os.getpid()))]
    for name in _RECORDED:
        if name in environ:
            words.append(f"{'+' if name in added else ''}{name}={environ[name]}")
    environ[MARKER] = json.dumps(words)  # values may have blanks


class InheritedVariables:
    """The rank variables that a rank has set in this environment, read from MARKER.

    is_rank: whether this very process is that rank.
    changed: whether a recorded variable has another value now, set for a new launch.
    new_worker: whether a torchrun has started this process, below that rank or in its place.
    environ: the environment without that rank's variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        pid, self._start_time, *words = json.loads(environ[MARKER])
        self._pid = int(pid) if pid.isdecimal() else 0
        recorded = dict(word.lstrip("+").partition("=")[::2] for word in words)
        added = [word[1:].partition("=")[0] for word in words if word.startswith("+")]

        self.rank = recorded.get("RANK", "?")
        self.world_size = recorded.get("WORLD_SIZE", "?")
        self.is_rank = environ is os.environ and self._is_rank_process(os.getpid())
        self.changed = any(environ.get(name) != value for name, value in recorded.items())
        self.new_worker = (
            self.changed
            and _ERROR_FILE in environ
            and environ[_ERROR_FILE] != recorded.get(_ERROR_FILE)
        )

        hidden: list[str] = []
        if not self.changed:
            hidden = added if self.is_rank else list(recorded)
        self.environ = {name: value for name, value in environ.items() if name not in hidden}

    @property
    def rank_process(self) -> str:
        """The rank that set the variables, for messages: "rank 1 of 4 (process 4242)"."""
        return f"rank {self.rank} of {self.world_size} (process {self._pid})"

    def pids_below_rank(self) -> Iterator[int]:
        """Yield the process ids of the ancestors up to that rank, nearest first."""
        for pid in parent_pids():
            if self._is_rank_process(pid):
                return
            yield pid

    def _is_rank_process(self, pid: int) -> bool:
        return pid == self._pid and str(start_time(pid)) == self._start_time


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
