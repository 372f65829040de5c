"""The variables by which torchrun's workers know their rank: set them in a rank's own process, and tell a program that
a rank has started from a rank. Standard library only, no torch.

setup_distributed() sets RANK and its like, so that libraries which read them see the launch. Every program that the
rank starts inherits them, but is no rank: MARKER beside them names the process that they belong to.
"""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping

from .parents import parent_pids, start_time

MARKER = "DDPKIT_RANK_PROCESS"  # "PID START-TIME +NAME=VALUE NAME=VALUE ...", + where it was not set before
# torchrun gives each worker an error file of its own: it tells a new worker from a program that a worker has started.
_COMPARED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")


def set_variables(values: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables, and MARKER with this process and what was set."""
    added = {name for name, value in values.items() if environ.get(name) != value}
    environ.update(values)
    words = [f"{'+' if name in added else ''}{name}={environ[name]}" for name in _COMPARED if name in environ]
    environ[MARKER] = " ".join([str(os.getpid()), start_time(os.getpid()), *words])


class Inherited:
    """What a rank has left in the environment of this process.

    own: this process is that rank. changed: RANK or one of its like was set anew since, for a launch of its own.
    new_agent: by a torchrun. environ: the variables without those of the rank.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        pid, self._start_time, *words = environ[MARKER].split(" ")
        self._pid = int(pid) if pid.isdecimal() else 0
        set_then = dict(word.lstrip("+").partition("=")[::2] for word in words)
        added = [word[1:].partition("=")[0] for word in words if word.startswith("+")]
        self.rank, self.world_size = set_then.get("RANK", "?"), set_then.get("WORLD_SIZE", "?")
        self.own = environ is os.environ and self._is(os.getpid())
        self.changed = any(environ.get(name) != value for name, value in set_then.items())
        new_file = environ.get("TORCHELASTIC_ERROR_FILE")
        self.new_agent = self.changed and new_file is not None and new_file != set_then.get("TORCHELASTIC_ERROR_FILE")
        hidden = () if self.changed else added if self.own else set_then
        self.environ = {name: value for name, value in environ.items() if name not in hidden}

    @property
    def process(self) -> str:
        """The rank that has started this process, for a message."""
        return f"rank {self.rank} of {self.world_size} (process {self._pid})"

    def parents_below(self) -> Iterator[int]:
        """Process ids of the parents of this process, nearest first, up to the rank's own."""
        for pid in parent_pids():
            if self._is(pid):
                return
            yield pid

    def _is(self, pid: int) -> bool:
        return pid == self._pid and start_time(pid) == self._start_time


def inherited(environ: Mapping[str, str]) -> Inherited | None:
    """What a rank has left in this environment; None where it has not."""
    return Inherited(environ) if len(environ.get(MARKER, "").split(" ")) > 2 else None


def without_inherited(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables without those that a rank has left there."""
    found = inherited(environ)
    return environ if found is None else found.environ
