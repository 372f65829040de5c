"""pbs_tmrsh or srun instead of ssh, for an mpiexec that starts its daemons with a remote shell.

No ssh is needed then, and the scheduler ends what it has started. An mpiexec gives options of ssh,
a host, perhaps without its domain, and a line of shell. pbs_tmrsh expects the host as the node file
has it, no options, and a program. srun is used only in heterogeneous jobs of Slurm: it has to be
given the component of the host, which no mpiexec does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ...job.allocation import short_name
from ...job.slurm_job import components
from .bootstrap import import_code

VARIABLE = "DDPKIT_REMOTE_SHELL"  # holds the code that runs main()
_WITH_VALUE = {"-o", "-p", "-l", "-i", "-F"}  # options of ssh that have a value


def pbs_tmrsh_words(arguments: Sequence[str], node_file: Iterable[str]) -> list[str]:
    """Convert ssh's arguments to those of pbs_tmrsh. node_file: the lines of the node file."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    host, *line = rest
    names = map(str.strip, node_file)
    listed = next((name for name in names if short_name(name) == short_name(host)), host)
    return [listed, "/bin/sh", "-c", " ".join(line)]


def srun_words(
    arguments: Sequence[str], parts: Sequence[Sequence[str]], gpus: Sequence[int]
) -> list[str]:
    """Convert ssh's arguments to those of srun: a step on that host, which overlaps with others.

    The step has all cores and GPUs of the job there. parts: the hosts of each component of the job.
    gpus: on each host of each component.
    """
    host, *shell = pbs_tmrsh_words(arguments, (name for part in parts for name in part))
    group = next((index for index, part in enumerate(parts) if host in part), 0)
    return [
        f"--het-group={group}",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        *([f"--gres=gpu:{gpus[group]}"] if gpus[group] else []),
        *shell,
    ]


def main(program: str, arguments: Sequence[str], gpus: Sequence[int]) -> None:
    """Become pbs_tmrsh, or srun where `gpus` has an entry for each component of a job."""
    if gpus:
        words = srun_words(arguments, components(os.environ), gpus)
    else:
        with open(os.environ["PBS_NODEFILE"], encoding="utf-8", errors="surrogateescape") as file:
            words = pbs_tmrsh_words(arguments, file)
    os.execv(program, [program, *words])


def code(program: str, gpus: Sequence[int]) -> str:
    """Return the value of VARIABLE; arguments as in main()."""
    return import_code(f"remote_shell import main; main({program!r}, sys.argv[1:], {list(gpus)})")


def words(python: str) -> list[str]:
    """Return the remote shell as words that an mpiexec may split at spaces and double-quote.

    Only the first word may have a space, and no word has a character special in double quotes.
    python: of a virtual environment with a space in its path, the Python behind it is used.
    """
    python = os.path.realpath(python) if " " in python else python
    return [python, "-I", "-S", "-c", f"exec(__import__('os').environ['{VARIABLE}'])"]


def script(python: str) -> str:
    """Return the remote shell as the text of an executable file."""
    return f'#!/bin/sh\nexec "{python}" -I -S -c "{words(python)[-1]}" "$@"\n'
