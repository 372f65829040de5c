"""Fill a job script's template with a job's values, each quoted for the shell.

A template has three markers: the line "@directives@" for the scheduler's options, the line
"@setup@" for modules, environment and set-up lines, and the word "@command@" for the arguments of
launch.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from .job_spec import Job

_MARKER = re.compile(r"^[ \t]*@(directives|setup)@[ \t]*$|@(command)@", re.MULTILINE)


def fill(template: str, *, directives: Sequence[str], setup: Iterable[str], command: str) -> str:
    """Return the template with its markers replaced. Inserted text is not searched for markers."""
    texts = {"directives": "\n".join(directives), "setup": "\n".join(setup), "command": command}
    return _MARKER.sub(lambda match: texts[match[1] or match[2]], template)


def setup_lines(job: Job) -> list[str]:
    """Return the set-up of a job: module paths, modules, exports, set-up lines, in this order.

    Exports follow modules, which may set the same variables. Set-up lines may use both.
    """
    paths = [f"module use {quote(path)}" for path in job.module_paths]
    modules = [f"module load {quote(module)}" for module in job.modules]
    exports = [f"export {name}={quote(value)}" for name, value in job.environment.items()]
    return [*paths, *modules, *exports, *job.setup]


def command_words(job: Job) -> str:
    """Return the quoted arguments of launch.py: its options, "--", the command.

    A job without a command takes the arguments of the job script, "$@".
    """
    words: list[str] = []
    if job.launcher == "torchrun":
        words += ["--torchrun"]
    elif job.launcher != "auto":
        words += ["--launcher", job.launcher]
    if job.ranks_per_node is not None:
        words += ["--ntasks-per-node", str(job.ranks_per_node)]
    if job.container:
        words += ["--container", job.container]
    arguments = " ".join(map(quote, [*words, "--", *job.command]))
    return arguments if job.command else f'{arguments} "$@"'


def quote(text: str) -> str:
    """Quote a text as one word of bash.

    Control characters and bytes that are not UTF-8 (surrogates of os.fsdecode) become escapes:
    sbatch and qsub refuse a script with a carriage return.
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escape, text)) + "'"


def _escape(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
