"""Set RANK and the other rank variables in this process, and recognise them in programs it starts.

setup_distributed() sets the same variables as torchrun, so that libraries which read them see the
launch. Programs started by a rank inherit them, but are not ranks. MARKER names the process that
the variables belong to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

from ..host.process import parent_pids, start_time

MARKER = "DDPKIT_RANK_PROCESS"  # "4242 771234": the process and its start time
REQUIRE_SECRET = "DDPKIT_REQUIRE_SECRET"  # "1": a process that cannot prove itself does not start
RANK_VARIABLES = (  # variables of each rank, as in torchrun
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# "2/4": this process is, or descends from, process 2 of ddpkit launch's 4. It stays if a launcher
# below that process sets RANK and WORLD_SIZE again.
LAUNCH_RANK = "DDPKIT_LAUNCH_RANK"
# Set by ddpkit launch --independent or by the user: the processes need not form one group.
INDEPENDENT = "DDPKIT_INDEPENDENT"


# Values in os.environ before set_variables(); None: not set.
_before: dict[str, str | None] = {}
_THREADS = "OMP_NUM_THREADS"
_SET_THREADS = "DDPKIT_SET_THREADS"  # value that set_threads() has set


def set_variables(
    values: Mapping[str, str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables, and record this process in MARKER."""
    if environ is os.environ:
        for name, value in values.items():
            if environ.get(name) != value:
                _before.setdefault(name, environ.get(name))
    environ.update(values)
    environ[MARKER] = f"{os.getpid()} {start_time(os.getpid())}"


class RankProcess(NamedTuple):
    """The rank that has set the rank variables in an environment, read from MARKER."""

    pid: int
    start_time: int | None
    is_this: bool  # whether that rank is this process

    def pids_below(self) -> Iterator[int]:
        """Yield the process ids of the ancestors up to and including that rank, nearest first.

        It is included because a rank may become a launcher by exec.
        """
        for pid in parent_pids():
            yield pid
            if (pid, start_time(pid)) == self[:2]:
                return


def rank_process(environ: Mapping[str, str]) -> RankProcess | None:
    """Return the rank that has set variables in this environment; None if none has."""
    if MARKER not in environ:
        return None
    text = environ[MARKER]
    is_this = environ is os.environ and text == f"{os.getpid()} {start_time(os.getpid())}"
    pid, started = text.split()
    return RankProcess(int(pid), int(started) if started.isdecimal() else None, is_this)


def launch_rank(environ: Mapping[str, str]) -> str:
    """Return LAUNCH_RANK if this process must form a group with all processes of that launch.

    Otherwise return "": without a launch, with INDEPENDENT, and below a rank that has its group.
    """
    rank = rank_process(environ)
    if environ.get(INDEPENDENT) or rank is not None and not rank.is_this:
        return ""
    return environ.get(LAUNCH_RANK, "")


def without_inherited(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without variables that a rank has set in it."""
    rank = rank_process(environ)
    if rank is None:
        return environ
    if not rank.is_this:
        return {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    return {name: value for name, value in {**environ, **_before}.items() if value is not None}


def set_threads(threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_NUM_THREADS for programs started by this rank, and note that no user has set it."""
    environ[_THREADS] = environ[_SET_THREADS] = str(threads)


def without_set_threads(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without an OMP_NUM_THREADS that a rank has set in it."""
    if _SET_THREADS not in environ:
        return environ
    hidden = {_SET_THREADS}
    if environ.get(_THREADS) == environ[_SET_THREADS]:  # otherwise a user has set it since
        hidden.add(_THREADS)
    return {name: value for name, value in environ.items() if name not in hidden}
