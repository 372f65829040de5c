"""Decide which launcher started this process, and as which rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import LaunchError
from ..host.process import command_line, parent_pids
from .launcher import Launcher, Placement, is_set, number, shown
from .mpi_launchers import MPICH, PALS, PMI, Flux, IntelMPI, OpenMPI, Submitit
from .rank_variables import INDEPENDENT, RankProcess, rank_process, without_inherited
from .slurm import SlurmStep
from .torchrun import RANK_VARIABLES, ByHand, Single, Torchrun, is_stale

_BY_HAND, _SINGLE = ByHand(), Single()
_BY_NAME = "it was requested by name"

# If the parent processes do not decide, the first launcher wins. A launcher that usually runs
# inside others comes before them; so does one whose variables include another's.
LAUNCHERS: list[Launcher] = [
    Torchrun(),
    Submitit(),
    PALS(),
    OpenMPI(),
    IntelMPI(),
    MPICH(),
    Flux(),
    SlurmStep(),
    PMI(),
    _BY_HAND,
    _SINGLE,
]


class Detection(NamedTuple):
    """The launcher that started this process, its placement, and the reason for the decision.

    environ: the variables, without another launch's.
    """

    launcher: Launcher
    placement: Placement
    reason: str
    environ: Mapping[str, str]


def detect(
    environ: Mapping[str, str] = os.environ,
    *,
    ancestors: Iterable[str] | None = None,
    launcher: str | None = None,
) -> Placement:
    """Return the placement of this process, given by the innermost launcher that started it.

    environ: the variables to read.
    ancestors: command lines of the parent processes, nearest first. Default: read from /proc if
    environ is os.environ, else none.
    launcher: name of the launcher to use, as in LAUNCHERS; None detects it.

    Raises LaunchError if the launcher's variables are incomplete or contradict each other, or the
    requested launcher did not start this process; ValueError for an unknown launcher.
    """
    return find_launcher(environ, ancestors=ancestors, launcher=launcher).placement


def find_launcher(
    environ: Mapping[str, str] = os.environ,
    *,
    ancestors: Iterable[str] | None = None,
    launcher: str | None = None,
) -> Detection:
    """Return the result of detect(), with the launcher itself and the reason. Same arguments."""
    rank = rank_process(environ)
    above = rank if rank and not rank.is_this else None  # the rank that has started this process
    if ancestors is None:
        pids = above.pids_below() if above else parent_pids()
        ancestors = map(command_line, pids) if environ is os.environ else ()

    by_hand = launcher == _BY_HAND.name
    if above and by_hand and is_set(environ, "RANK"):  # also below torchrun
        return Detection(_BY_HAND, _read(_BY_HAND, environ), _BY_NAME, environ)
    between, reason = _between(environ, ancestors) if above and not by_hand else (None, "")
    decides = above is not None and launcher in (None, between.name if between else _SINGLE.name)
    if not (by_hand or decides and between and between.sets_rank_variables):
        environ = without_inherited(environ)

    if above and decides:
        return (
            _detection(environ, between, [between], reason) if between else _alone(environ, above)
        )
    if launcher is not None:
        return _by_name(environ, launcher)

    candidates = [launcher for launcher in LAUNCHERS if launcher.is_present(environ)]
    possible = [
        launcher
        for launcher in LAUNCHERS
        if launcher in candidates or launcher.is_undecided(environ)
    ]
    parents = iter(ancestors)
    chosen, reason = _nearest(environ, possible, parents)
    if chosen is None and candidates == [_SINGLE]:
        chosen, reason = _SINGLE, "no launcher's variables are set"
    elif chosen is None:
        chosen = candidates[0]
        reason = "its variables are set, and no parent process is another launcher's"
    if number(environ, chosen.num_agents_variable) == 1 and not environ.get(INDEPENDENT):
        _check_outer(environ, chosen, candidates, parents)
    return _detection(environ, chosen, candidates, reason)


def _by_name(environ: Mapping[str, str], name: str) -> Detection:
    """Use the launcher that the user has named, without detection."""
    named = [launcher for launcher in LAUNCHERS if launcher.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(launcher.name for launcher in LAUNCHERS))
        raise ValueError(f"launcher is {name!r}; expected one of {known}")
    for launcher in named:
        if launcher.is_present(environ):
            return Detection(launcher, _read(launcher, environ), _BY_NAME, environ)
    required = filter(None, (named[0].rank_variable, named[0].world_size_variable))
    raise LaunchError(
        f"launcher={name!r} was requested, but it has not set {' and '.join(required)} in this "
        "process. Start the script with that launcher, or omit `launcher`"
    )


def _nearest(
    environ: Mapping[str, str],
    launchers: list[Launcher],
    ancestors: Iterable[str],
    by_name: bool = False,
) -> tuple[Launcher | None, str]:
    """Return the launcher that started the nearest parent process, and the reason.

    Returns (None, "") if no parent process belongs to one of these launchers.
    by_name: count only programs that have a launcher's name.
    """
    for command in ancestors:
        for launcher in launchers:
            if launcher.is_named(command) if by_name else launcher.is_parent(command):
                nearest = command.strip()[:100]
                return launcher, f"the nearest launcher among the parent processes is: {nearest}"
        if any(launcher.starts_shell(command, environ) for launcher in LAUNCHERS):
            by_hand = _BY_HAND if _BY_HAND in launchers else _SINGLE
            return by_hand, f"the parent process starts a shell, not a rank: {command.strip()}"
    return None, ""


def _check_outer(
    environ: Mapping[str, str],
    chosen: Launcher,
    candidates: list[Launcher],
    ancestors: Iterable[str],
) -> None:
    """Raise LaunchError if an outer launcher has started several agents, each for itself.

    ancestors: ancestors of the agent.
    """
    outer, _ = _nearest(
        environ, [launcher for launcher in candidates if launcher is not chosen], ancestors
    )
    tasks = outer.read(environ).world_size if outer else 1
    if outer and tasks > 1:
        raise LaunchError(
            f"{outer.name} has started {tasks} tasks, and the {chosen.name} in each of them a "
            f"launch of its own: {chosen.read(environ).world_size} ranks by one agent. "
            f"Expected one launch. Give each {chosen.name} --nnodes={tasks} and the same "
            f"--rdzv-endpoint, or start the script without {chosen.name}; set {INDEPENDENT}=1 "
            "if each task is a program of its own"
        )


def _between(environ: Mapping[str, str], ancestors: Iterable[str]) -> tuple[Launcher | None, str]:
    """Return the launcher that runs between a rank and a process below it, and the reason."""
    candidates = [
        launcher
        for launcher in LAUNCHERS
        if launcher.is_present(environ) and launcher.starts_processes
    ]
    chosen, reason = _nearest(environ, candidates, ancestors, by_name=True)
    return (chosen, reason) if chosen and chosen.starts_processes else (None, "")


def _alone(environ: Mapping[str, str], rank: RankProcess) -> Detection:
    """Return that a process which a rank has started is no rank itself."""
    note = (
        f"this process was started by a rank (process {rank.pid}) and by no launcher: it runs "
        "alone, as rank 0 of 1. To start ranks from a rank, use a launcher, or set their variables "
        f'and call setup_distributed(launcher="{_BY_HAND.name}")'
    )
    placement = _SINGLE.read(environ).replace(notes=(note,))
    reason = f"a rank (process {rank.pid}) started it, and no launcher runs between them"
    return Detection(_SINGLE, placement, reason, environ)


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    placement = launcher.read(environ)
    placement.check()
    return placement


def _detection(
    environ: Mapping[str, str], chosen: Launcher, candidates: list[Launcher], reason: str
) -> Detection:
    """Read the placement, and add notes on variables that belong to another launch."""
    placement = _read(chosen, environ)
    notes = [*placement.notes, *chosen.notes(environ, placement)]
    was_ignored = (
        f"was ignored: {chosen.name} started this process as "
        f"rank {placement.rank} of {placement.world_size}"
    )
    expected = (chosen.name, *chosen.also_sets)
    ignored = {
        launcher.name: launcher
        for launcher in reversed(candidates)
        if launcher.is_noted_when_ignored and launcher.name not in expected
    }
    for launcher in ignored.values():
        notes.append(
            f"{shown(environ, launcher.number_variables)} of {launcher.name} {was_ignored}"
        )

    users = (chosen, *ignored.values())
    is_unused = chosen is not _SINGLE and all(
        launcher.rank_variable != "RANK" for launcher in users
    )
    if is_unused and is_set(environ, "RANK") and is_stale(environ, placement):
        notes.append(f"{shown(environ, RANK_VARIABLES)} {was_ignored}")
    return Detection(chosen, placement.replace(notes=tuple(notes)), reason, environ)
