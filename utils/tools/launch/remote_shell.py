"""pbs_tmrsh instead of ssh, for an mpiexec that starts its daemons with a remote shell.

No ssh is needed then, and PBS ends the processes that it has started. An mpiexec gives options of
ssh, a host, perhaps without its domain, and a line of shell. pbs_tmrsh expects no options, the host
as the node file spells it, and a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ...job.notation import short_name
from .bootstrap import import_code

VARIABLE = "DDPKIT_REMOTE_SHELL"  # holds the code that runs main()
_WITH_VALUE = {"-o", "-p", "-l", "-i", "-F"}  # options of ssh that take a value


def pbs_tmrsh_words(arguments: Sequence[str], node_file: Iterable[str]) -> list[str]:
    """Convert arguments of ssh to arguments of pbs_tmrsh. node_file: the lines of the node file."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    host, *line = rest
    names = map(str.strip, node_file)
    listed = next((name for name in names if short_name(name) == short_name(host)), host)
    return [listed, "/bin/sh", "-c", " ".join(line)]


def main(program: str, arguments: Sequence[str]) -> None:
    """Become pbs_tmrsh."""
    with open(os.environ["PBS_NODEFILE"], encoding="utf-8", errors="surrogateescape") as file:
        words = pbs_tmrsh_words(arguments, file)
    os.execv(program, [program, *words])


def code(program: str) -> str:
    """Return the value of VARIABLE. program: the path of pbs_tmrsh."""
    return import_code(f"remote_shell import main; main({program!r}, sys.argv[1:])")


def words(python: str) -> list[str]:
    """Return the remote shell as words that an mpiexec may split at spaces and double-quote.

    Only the first word may have a space, and no word has a character special in double quotes.
    python: if the path has a space, such as a virtual environment's, its real path is used.
    """
    python = os.path.realpath(python) if " " in python else python
    return [python, "-I", "-S", "-c", f"exec(__import__('os').environ['{VARIABLE}'])"]


def script(python: str) -> str:
    """Return the remote shell as the text of an executable file."""
    return f'#!/bin/sh\nexec "{python}" -I -S -c "{words(python)[-1]}" "$@"\n'
