"""pbs_tmrsh in place of ssh, for an mpiexec in a PBS job: no ssh is needed then, and PBS ends what it has started.

mpiexec gives options of ssh, a host, perhaps without its domain, and a line of shell; pbs_tmrsh wants the host as the
node file names it, no options, and a program. Not here: the options that name this to mpiexec (commands.py).
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ..schedulers.pbs import short
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


def main(pbs_tmrsh: str, arguments: Sequence[str]) -> None:
    """Become pbs_tmrsh."""
    with open(os.environ["PBS_NODEFILE"], encoding="utf-8", errors="surrogateescape") as file:
        words = translate(arguments, file)
    os.execv(pbs_tmrsh, [pbs_tmrsh, *words])


def code(pbs_tmrsh: str) -> str:
    """The value of VARIABLE."""
    return start_code(f"remote_shell import main; main({pbs_tmrsh!r}, sys.argv[1:])")


def words(python: str) -> list[str]:
    """The remote shell as words, none of which has a space or anything special within double quotes."""
    return [python, "-I", "-S", "-c", f"exec(__import__('os').environ['{VARIABLE}'])"]


def script(python: str) -> str:
    """The remote shell as the text of an executable file."""
    return f'#!/bin/sh\nexec "{python}" -I -S -c "{words(python)[-1]}" "$@"\n'
