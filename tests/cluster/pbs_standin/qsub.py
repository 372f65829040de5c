"""qsub: its options and directives, and what of the submitter's environment the job gets."""
from __future__ import annotations

import getopt
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from tests.cluster.pbs_standin.resources import Refused

LETTERS = "A:e:J:j:k:l:N:o:q:r:S:v:VW:"
VALID = {"-J": r"\d+-\d+(:\d+)?", "-j": "oe|n", "-k": "n|d[oe]{1,2}|[oe]{1,2}d", "-N": r"[^\s/]+", "-q": ".+",
         "-r": "[yn]", "-S": "/.*"}
NO_ENVIRONMENT = Refused(1, "cannot send environment with the job")


def options(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        found, rest = getopt.getopt(words, LETTERS)
    except getopt.GetoptError as error:
        raise Refused(2, f"invalid option -- '{error.opt}'") from None
    for name, value in found:
        if not re.fullmatch(VALID.get(name, ".*"), value, re.DOTALL):
            raise Refused(2, f"illegal {name} value")
    return found, rest


def directives(script: str) -> list[str]:
    """Return the words of the #PBS lines before the first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#PBS"):
            lexer = shlex.shlex(line.removeprefix("#PBS"), posix=True)
            lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", "#"
            words += lexer
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def split(text: str) -> list[str]:
    """Split at commas that are not quoted or escaped, and remove the quotes."""
    parts, quote, escaped = [""], "", False
    for letter in text:
        if escaped:
            parts[-1], escaped = parts[-1] + letter, False
        elif letter == "\\":
            escaped = True
        elif letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "," and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote:
        raise NO_ENVIRONMENT
    return parts


def variables(found: Mapping[str, str], environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the Variable_List, without what the server adds."""
    result = {f"PBS_O_{name}": environment[name] for name in ("HOME", "LANG", "LOGNAME", "PATH", "SHELL")
              if name in environment}
    result |= {"PBS_O_INTERACTIVE_AUTH_METHOD": "resvport", "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
               "PBS_O_WORKDIR": folder, "PBS_O_SYSTEM": "Linux"}
    for part in split(found["-v"]) if found.get("-v") else []:
        name, equals, value = part.partition("=")
        if not equals and name not in environment:
            raise NO_ENVIRONMENT
        result[name] = value if equals else environment[name]
    if "-V" in found:  # it comes after -v, whose values it replaces
        result |= {name: value for name, value in environment.items() if not name.startswith("PBS_O_")}
    return result


def dependencies(value: str) -> dict[str, list[str]]:
    """Parse -W depend=afterok:1:2,afterany:3."""
    result: dict[str, list[str]] = {}
    if value and not value.startswith("depend="):
        raise Refused(2, f"-W {value} is not part of this stand-in for PBS")
    for part in value.removeprefix("depend=").split(",") if value else []:
        condition, *jobs = part.split(":")
        if condition not in ("afterok", "afternotok", "afterany") or not all(re.match(r"\d", job) for job in jobs):
            raise Refused(2, "illegal -W value")
        result.setdefault(condition, []).extend(jobs)
    return result


def request(words: list[str], environment: Mapping[str, str], folder: str, root: str) -> dict[str, Any]:
    """Return what a job requests. root: where the submitter's file system is."""
    given, rest = options(words)
    is_command = words[len(words) - len(rest) - 1:][:1] == ["--"]
    if not rest:
        raise Refused(2, "a script on standard input is not part of this stand-in for PBS")
    script = "" if is_command else read_script(root + os.path.join(folder, rest[0]))

    found: dict[str, str] = {}
    resources: dict[str, str] = {}
    for letter, value in [*options(directives(script))[0], *given]:  # the command line wins, resource by resource
        if letter == "-l":
            resources |= {key: requested for key, _, requested in (part.partition("=") for part in value.split(","))}
        else:
            found[letter] = value
    return {
        "command": rest if is_command else None, "script": script,
        "name": found.get("-N", os.path.basename(rest[0])), "queue": found.get("-q", "workq"), "resources": resources,
        "variables": variables(found, environment, folder), "folder": folder, "arguments": " ".join(words),
        "o": destination(found.get("-o", ""), folder, root), "e": destination(found.get("-e", ""), folder, root),
        "join": found.get("-j", "n"), "keep": found.get("-k", "n"),
        "rerunnable": found.get("-r") != "n", "array": found.get("-J", ""), "shell": found.get("-S", ""),
        "depend": dependencies(found.get("-W", "")),
    }


def read_script(path: str) -> str:
    try:
        with open(path, errors="surrogateescape", newline="") as file:
            script = file.read()
    except OSError as error:
        raise Refused(1, f"script file:: {error.strerror}") from None
    if "\r\n" in script:
        raise Refused(1, "script contains cr, lf")
    return script


def destination(path: str, folder: str, root: str) -> str:
    """Make a path of -o or -e absolute, with a slash at its end where it is a folder."""
    if not path:
        return ""
    absolute = os.path.join(folder, path)
    return absolute + "/" if os.path.isdir(root + absolute) and not absolute.endswith("/") else absolute
