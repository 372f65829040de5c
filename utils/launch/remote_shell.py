"""pbs_tmrsh or srun in place of ssh, for an mpiexec: no ssh is needed then, and the scheduler ends what it has started.

mpiexec gives options of ssh, a host, perhaps without its domain, and a line of shell; pbs_tmrsh wants the host as the
node file names it, no options, and a program. srun is for heterogeneous jobs of Slurm alone: there it has to be told
in which component a host is, which no mpiexec does. Not here: the options that name this to mpiexec (commands.py).
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ..schedulers.pbs import short
from ..schedulers.slurm import components
from .agent import start_code

VARIABLE = "DDPKIT_REMOTE_SHELL"  # holds the code that runs main()
_WITH_VALUE = {"-o", "-p", "-l", "-i", "-F"}  # options of ssh that have a value


def translate(arguments: Sequence[str], listed: Iterable[str]) -> list[str]:
    """ssh's arguments -> pbs_tmrsh's. listed: the lines of the node file."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        del rest[:2 if rest[0] in _WITH_VALUE else 1]
    host = next((name for name in map(str.strip, listed) if short(name) == short(rest[0])), rest[0])
    return [host, "/bin/sh", "-c", " ".join(rest[1:])]


def step_words(arguments: Sequence[str], parts: Sequence[Sequence[str]], gpus: Sequence[int]) -> list[str]:
    """ssh's arguments -> srun's: a step on that host, beside others, with all cores and GPUs that the job has there.

    parts, gpus: hosts of each component of the job, and GPUs of each of its hosts.
    """
    host, *line = translate(arguments, (name for part in parts for name in part))
    group = next((index for index, part in enumerate(parts) if host in part), 0)
    return [f"--het-group={group}", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none",
            "--export=ALL", *([f"--gres=gpu:{gpus[group]}"] if gpus[group] else []), *line]


def main(program: str, arguments: Sequence[str], gpus: Sequence[int]) -> None:
    """Become pbs_tmrsh, or srun in a heterogeneous job of Slurm, with so many GPUs on a host of each component."""
    if gpus:
        words = step_words(arguments, components(os.environ), gpus)
    else:
        with open(os.environ["PBS_NODEFILE"], encoding="utf-8", errors="surrogateescape") as file:
            words = translate(arguments, file)
    os.execv(program, [program, *words])


def code(program: str, gpus: Sequence[int]) -> str:
    """The value of VARIABLE. gpus: see main(); none for pbs_tmrsh."""
    return start_code(f"remote_shell import main; main({program!r}, sys.argv[1:], {list(gpus)})")


def words(python: str) -> list[str]:
    """The remote shell as words, of which only the first may have a space, and none anything special in double quotes.

    python: of a virtual environment whose path has a space the Python behind it, for which we have all we need.
    """
    python = os.path.realpath(python) if " " in python else python
    return [python, "-I", "-S", "-c", f"exec(__import__('os').environ['{VARIABLE}'])"]


def script(python: str) -> str:
    """The remote shell as the text of an executable file."""
    return f'#!/bin/sh\nexec "{python}" -I -S -c "{words(python)[-1]}" "$@"\n'
