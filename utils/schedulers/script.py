"""A job script: a template filled with what a job says, every value quoted for the shell.

Three markers of a template are replaced: a line "@directives@" by the scheduler's options, a line "@setup@" by
modules, environment and set-up lines, the word "@command@" by the arguments of launch.py.
"""
from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from .job import Job, JobError

_MARKER = re.compile(r"^[ \t]*@(directives|setup)@[ \t]*$|@(command)@", re.MULTILINE)


def quote(text: str) -> str:
    """A word for bash that stands for exactly this text.

    Bytes that are not UTF-8 (surrogates of os.fsdecode) and control characters become escapes: a carriage return
    would make sbatch and qsub refuse the script.
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


def fill(template: str, *, directives: Sequence[str], setup: Iterable[str], command: str) -> str:
    """The template with its markers replaced; text that is put in is not searched for markers again."""
    texts = {"directives": "\n".join(directives), "setup": "\n".join(setup), "command": command}
    return _MARKER.sub(lambda match: texts[match[1] or match[2]], template)


def setup_lines(job: Job) -> list[str]:
    """Modules, environment, set-up lines, in this order: what a person writes last may use what is before."""
    lines = [f"module load {quote(module)}" for module in job.modules]
    lines += [f"export {name}={quote(value)}" for name, value in job.environment.items()]
    for line in job.setup:
        _check_shell_line(line)
    return lines + list(job.setup)


def command_words(job: Job) -> str:
    """What follows `launch.py` in the script, quoted: its own options, "--", the command.

    Without a command the arguments of the job script itself follow, so that the script serves for any.
    """
    words: list[str] = []
    if job.launcher == "torchrun":
        words += ["--torchrun"]
    elif job.launcher != "auto":
        words += ["--by", job.launcher]
    if job.ranks_per_node is not None:
        words += ["--ranks-per-node", str(job.ranks_per_node)]
    if job.container:
        words += ["--container", job.container]
        words += ["--gpu-vendor", job.gpu_vendor] if job.gpu_vendor else []
    shown = " ".join(map(quote, [*words, "--", *job.command]))
    return shown if job.command else f'{shown} "$@"'


def _check_shell_line(line: str) -> None:
    """JobError for a set-up line that is no complete piece of shell: it would swallow the lines after it.

    bash says so itself: the line alone is in order, and a ")" in the line after it is an error there and nothing else.
    """
    bash = shutil.which("bash")
    if bash is None:
        return
    alone = subprocess.run([bash, "-n"], input=line.encode("utf-8", "surrogateescape") + b"\n", capture_output=True)
    after = subprocess.run([bash, "-n"], input=line.encode("utf-8", "surrogateescape") + b"\n)\n", capture_output=True)
    said = after.stderr.decode(errors="replace")
    if alone.returncode or alone.stderr or not re.search(r"line 2: [^\n]*`\)'", said):
        why = alone.stderr.decode(errors="replace").strip().split("\n")[0] or "it goes on in the next line"
        raise JobError("setup", f"{line[:60]!r} is not complete in itself: {why}. Each entry has to be a whole line of "
                                "shell; join lines that belong together with ; or put them into a file and source it.")


def option_of(words: Sequence[str]) -> str:
    """The name of an option: ["--gres=gpu:2"] -> "--gres", ["-A", "x"] and ["-Ax"] -> "-A"."""
    if words[0].startswith("--"):
        return words[0].partition("=")[0]
    return words[0][:2]


def value(words: Sequence[str]) -> str:
    """The value of an option: ["--gres=gpu:2"] -> "gpu:2", ["-A", "x"] and ["-Ax"] -> "x"."""
    joined = " ".join(words)
    return joined[len(option_of(words)):].lstrip("= ")


def blamed_lines(script: Path, prefix: str, options: Sequence[str], words: Iterable[str]) -> list[str]:
    """The options of the command line, and the lines of the script that start with prefix ("#SBATCH"), that hold one of
    the words; in the order of the words."""
    texts = directive_texts(script, prefix, options)
    found = [shown for word in words for text, shown in texts.items() if _holds(text, word)]
    return list(dict.fromkeys(found))


def directive_texts(script: Path, prefix: str, options: Sequence[str]) -> dict[str, str]:
    """Option -> where it stands, of the command line and then of the script."""
    texts = {option: f"the option {option}" for option in _joined(options)}
    with contextlib.suppress(OSError):
        lines = script.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if line.startswith(prefix):
                texts.setdefault(line[len(prefix):], f"line {number} of {script}: {line}")
    return texts


def probably(lines: Sequence[str]) -> str | None:
    """The sentence that names the cause of a refusal."""
    if len(lines) > 1:
        return "This is probably about one of: " + "; ".join(lines)
    return f"This is probably about {lines[0]}" if lines else None


def split_options(text: str) -> list[list[str]]:
    """" -l select=1 -q x # so" -> [["-l", "select=1"], ["-q", "x"]]."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append([])
        found[-1].append(word)
    return found


def _holds(text: str, word: str) -> bool:
    """Whether a directive is about a word; an option stands at its start: -p is no part of --ntasks-per-node."""
    return text.lstrip(" \"'").startswith(word) if word.startswith("-") else word in text


def _joined(options: Sequence[str]) -> list[str]:
    """["-q", "x", "--hold", "--", "bash"] -> ["-q x", "--hold"]."""
    found: list[str] = []
    for word in options:
        if word == "--":
            break
        if word.startswith("-") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found
