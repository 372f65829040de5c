"""Run a scheduler's commands with a time limit, decode their output, raise one kind of error."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

TIMEOUT_SECONDS = 30.0  # seconds; a busy scheduler responds sooner, and a person is waiting
SUBMIT_TIMEOUT_SECONDS = 300.0  # seconds; a submission that timed out may have succeeded

_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",  # Slurm's message on a host outside the cluster
    "cannot connect to server",  # PBS's message
)


class SchedulerError(RuntimeError):
    """The scheduler is not installed, did not respond in time, or refused.

    command: the command line. exit_code: None if the command did not exit by itself, 127 if it was
    not found. output: its standard error, else its standard output, stripped.
    """

    def __init__(
        self,
        message: str,
        *,
        command: Sequence[str] = (),
        exit_code: int | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.exit_code = exit_code
        self.output = output


def run_command(
    words: Sequence[str],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    folder: str | os.PathLike[str] | None = None,
    accepted_statuses: Sequence[int] = (0,),
    without: Sequence[str] = (),
) -> str:
    """Run a scheduler's command and return its standard output.

    without: environment variables that are removed for the command.
    Raises SchedulerError when the command is not found, times out or fails.
    """
    shown = shlex.join(words)
    environ = {name: value for name, value in os.environ.items() if name not in without}
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            cwd=folder,
            env={**environ, "LC_ALL": "C.UTF-8"},
        )
    except FileNotFoundError as error:
        raise SchedulerError(
            f"{words[0]} was not found ({error}). It is a command of the scheduler. Run this where "
            "the scheduler's commands are on PATH, such as a login node.",
            command=words,
            exit_code=127,  # a shell's status for a missing command
        ) from None
    except (OSError, ValueError) as error:
        raise SchedulerError(f"{shown} could not be started: {error}.", command=words) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"{shown} did not respond within {timeout_seconds:g} s. The scheduler may be down or "
            "busy. Try again later.",
            command=words,
        ) from None

    if done.returncode not in accepted_statuses:
        output = decode(done.stderr).strip() or decode(done.stdout).strip()
        output = output.partition("\nusage: ")[0]  # qsub prints ten lines after the error
        hint = ""
        if any(text in output for text in _UNREACHABLE):
            hint = (
                ". Expected a reachable Slurm controller or PBS server. Run this on a login node "
                "of the cluster, or try again later."
            )
        raise SchedulerError(
            f"{shown} failed with exit status {done.returncode}: "
            f"{output or 'it printed nothing'}{hint}",
            command=words,
            exit_code=done.returncode,
            output=output,
        )
    return decode(done.stdout)


def decode(raw: bytes) -> str:
    """Decode output as UTF-8, and each line that is not UTF-8 as Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(map(_decode_line, raw.splitlines(keepends=True)))


def _decode_line(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")
