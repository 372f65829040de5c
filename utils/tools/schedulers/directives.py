"""Options of sbatch and qsub, split into words, and the ones that an error message is about."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path


def option_name(words: Sequence[str]) -> str:
    """Return an option's name: ["--gres=gpu:2"] -> "--gres", ["-A", "x"] and ["-Ax"] -> "-A"."""
    if words[0].startswith("--"):
        return words[0].partition("=")[0]
    return words[0][:2]


def option_value(words: Sequence[str]) -> str:
    """Return an option's value: ["--gres=gpu:2"] -> "gpu:2", ["-A", "x"] and ["-Ax"] -> "x"."""
    joined = " ".join(words)
    return joined[len(option_name(words)) :].lstrip("= ")


def last_value(options: Sequence[Sequence[str]], name: str) -> str:
    """Return the value of the last option of this name, which counts; "" where there is none."""
    values = [option_value(words) for words in options if option_name(words) == name]
    return values[-1] if values else ""


def group_options(words: Iterable[str]) -> list[list[str]]:
    """Group words by option: ["-l", "select=1", "-q", "x"] -> [["-l", "select=1"], ["-q", "x"]]."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


def split_options(text: str) -> list[list[str]]:
    """Split the text of a directive: " -l select=1 -q x # note" -> [["-l", "select=1"], ...]."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    return group_options(words)


def given_options(script: Path, prefix: str, options: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line and of a script's directives, and where each stands.

    prefix: the start of a directive, "#SBATCH". options: the words before the script.
    For example {"-q small": "line 3 of job.sh: #PBS -q small"}.
    """
    before_command = options[: options.index("--")] if "--" in options else options
    on_command_line = [" ".join(words) for words in group_options(before_command)]
    places = {option: f"the option {option}" for option in on_command_line}

    with contextlib.suppress(OSError):
        lines = script.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if line.startswith(prefix):
                places.setdefault(line[len(prefix) :], f"line {number} of {script}: {line}")
    return places


def find_options(places: dict[str, str], keywords: Iterable[str]) -> list[str]:
    """Return the places of given_options() that hold a keyword, in the order of the keywords."""
    found = [
        place for keyword in keywords for text, place in places.items() if _holds(text, keyword)
    ]
    return list(dict.fromkeys(found))


def _holds(text: str, keyword: str) -> bool:
    if keyword.startswith("-"):  # an option stands at the start: -p is no part of --ntasks-per-node
        return text.lstrip(" \"'").startswith(keyword)
    return keyword in text


def probable_cause(places: Sequence[str]) -> str | None:
    """Return a sentence that names the option that caused an error; None where there is none."""
    if not places:
        return None
    if len(places) == 1:
        return f"This is probably about {places[0]}"
    return "This is probably about one of: " + "; ".join(places)
