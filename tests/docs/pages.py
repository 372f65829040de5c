"""The command blocks of docs/guide, the shells that run them, and the comparison of their output.

python -m tests.docs.pages --write     write the diffs of the pages again, from the scripts that they compare

A block that begins with ```console has commands, after "$ ", and their output. ```console slurm and ```console pbs
run on the login host of the test cluster, ```console alone on this machine. A number of the page stands for any
number, "..." for any text, or, alone on a line, for any lines.
"""
from __future__ import annotations

import difflib
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.launchers import Result

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
HERE = "laptop"  # what the pages call this machine
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
JOB_ID = re.compile(r"(?:Submitted batch job )?(\d+(?:\.[\w-]+)?)")
DIFF = re.compile(r"<!-- (\S+\.py) (\S+\.py) -->\n```diff\n(.*?)```\n", re.DOTALL)
END = "end of a command, with status"


@dataclass
class Step:
    """A command of a page, and the lines that the page shows after it."""

    page: str
    line: int
    command: str
    output: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    return sorted(GUIDE.glob("*.md"))


def fences(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the fenced blocks of a page: number of the first line, what follows the fence, lines."""
    found = re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    for block in found:
        yield page.read_text().count("\n", 0, block.start()) + 2, block[1], block[2].splitlines()


def steps(page: Path, kind: str) -> list[Step]:
    """Return the commands of a page that run on `kind`: "here", "slurm" or "pbs"."""
    found: list[Step] = []
    for start, info, lines in fences(page):
        if info != ("console" if kind == "here" else f"console {kind}"):
            continue
        for number, line in enumerate(lines, start):
            if line.startswith("$ "):
                found.append(Step(page.name, number, line.removeprefix("$ ")))
            elif found[-1].command.endswith("\\") and not found[-1].output:
                found[-1].command += "\n" + line.removeprefix("> ")
            else:
                found[-1].output.append(line)
    return found


def with_commands(kind: str) -> list[str]:
    """Return the names of the pages that have commands for `kind`."""
    return [page.name for page in pages() if steps(page, kind)]


# Shapes --------------------------------------------------------------------------------------------------------------

def pattern(line: str) -> str:
    """Return what a line of a page stands for, as a regular expression."""
    def shape(part: str) -> str:
        if NUMBER.fullmatch(part):
            return NUMBER.pattern
        return ".*" if part.strip() == "..." else "[ \t]+" if part.isspace() else re.escape(part)

    if line.strip() == "...":
        return "(?:.*\n)*"
    return "".join(map(shape, re.split(rf"(\s*\.\.\.\s*|{NUMBER.pattern}|\s+)", line.rstrip()))) + "\n"


def has_shape(expected: Sequence[str], lines: Sequence[str]) -> bool:
    return re.fullmatch("".join(map(pattern, expected)), "".join(f"{line}\n" for line in lines)) is not None


def compare(step: Step, done: Result) -> None:
    """Fail where a command failed, or where its output differs from the page in more than numbers."""
    shown = re.sub(rf"\b{re.escape(socket.gethostname())}\b", HERE, done.output)
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    place = f"{step.page}, line {step.line}: {step.command}"
    assert done.status == 0, f"{place}\nexit status {done.status}\n{shown}"
    texts = [place, "the page has:", *step.output, "the command wrote:", *lines]
    assert has_shape(step.output, lines), "\n".join(texts)


# Shells --------------------------------------------------------------------------------------------------------------

class Shell:
    """A bash in which the commands of a page run one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.job_ids: dict[str, str] = {}  # of the page, and those that the scheduler gave

    def follow(self, found: Sequence[Step], *, seconds: float = 120) -> None:
        """Run the commands of a page and compare their outputs."""
        for step in found:
            command = step.command
            for shown, real in self.job_ids.items():
                command = re.sub(rf"\b{re.escape(shown)}\b", real, command)
            done = self.run(command, seconds)
            compare(step, done)
            if len(step.output) == 1 and (shown_id := JOB_ID.fullmatch(step.output[0])):
                real_id = JOB_ID.fullmatch(done.output.strip())
                assert real_id, done.output
                self.job_ids[shown_id[1]] = real_id[1]

    def run(self, command: str, seconds: float = 120) -> Result:
        assert self.process.stdin and self.process.stdout
        late = threading.Timer(seconds, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(f"{{ {command}\n}} </dev/null 2>&1; printf '\\n{END} %d\\n' $?\n")
            self.process.stdin.flush()
            lines: list[str] = []
            for line in self.process.stdout:
                if line.startswith(END):
                    return Result(int(line.split()[-1]), "".join(lines)[:-1])
                lines.append(line)
        finally:
            late.cancel()
        raise AssertionError(f"{command}: did not end within {seconds} s\n{''.join(lines)}")


def copy_kit(folder: Path) -> Path:
    """Copy the kit, as somebody has it who follows the guide."""
    kit = folder / "ddp-kit"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".mpi", "tests", "__pycache__", ".*_cache", "checkpoints*")
    shutil.copytree(ROOT, kit, ignore=ignored)
    programs = kit / ".venv" / "bin"  # as setup_env.sh makes it, which takes minutes
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH='{programs}':$PATH\n")
    (programs / "import").mkdir()
    (programs / "import" / "ddpkit").symlink_to(kit / "utils")
    (programs / "ddpkit").write_text(
        f"#!/bin/sh\nPYTHONPATH='{programs}/import' exec '{sys.executable}' '{kit}/utils' \"$@\"\n")
    (programs / "ddpkit").chmod(0o755)
    return kit


def path_with_python(path: str, kit: Path) -> str:
    """Return the search path of a shell in which the environment of a copy of the kit is activated."""
    return f"{kit}/.venv/bin:{Path(sys.executable).parent}:{path}"


def shell_options() -> Mapping[str, object]:
    return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


# Diffs ---------------------------------------------------------------------------------------------------------------

def diff(first: str, second: str) -> str:
    """Return the lines of a diff of two scripts of the guide, without its head, the docstrings and empty lines."""
    old, new = ((GUIDE / name).read_text().splitlines()[2:] for name in (first, second))
    lines = [line for line in difflib.unified_diff(old, new, n=1, lineterm="") if line.strip("+- ")]
    return "".join(f"{'@@' if line.startswith('@@') else line}\n" for line in lines[1:])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for written in pages():
        written.write_text(DIFF.sub(lambda found: (
            f"<!-- {found[1]} {found[2]} -->\n```diff\n{diff(found[1], found[2])}```\n"), written.read_text()))
