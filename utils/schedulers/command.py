"""Running a scheduler's command: one place with a time limit, one decoding of what it prints, one error.

Not here: what the output means (slurm_answers.py, pbs_answers.py).
"""
from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence

SECONDS = 30.0  # longer than a busy scheduler takes to answer; a person is waiting
SUBMIT_SECONDS = 300.0  # a submission that was given up may have been made all the same


class SchedulerError(RuntimeError):
    """The scheduler is not there, did not answer in time, or refused.

    command: the words that were run. exit_code: the command's own, None where it did not end by itself.
    said: what it printed on standard error (or output), stripped.
    """

    def __init__(self, message: str, *, command: Sequence[str] = (), exit_code: int | None = None,
                 said: str = "") -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.exit_code = exit_code
        self.said = said


def decode(raw: bytes) -> str:
    """The text of a command's output: UTF-8, and Latin-1 for the lines that are not, so that no byte is lost."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return b"".join(_as_utf8(line) for line in raw.splitlines(keepends=True)).decode()


def _as_utf8(line: bytes) -> bytes:
    try:
        line.decode()
        return line
    except UnicodeDecodeError:
        return line.decode("latin-1").encode()


def ask(words: Sequence[str], *, seconds: float = SECONDS, folder: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None, good: Sequence[int] = (0,)) -> str:
    """Run a scheduler's command and return its standard output. SchedulerError when it fails, is not there or hangs."""
    shown = shlex.join(words)
    environ = dict(os.environ if environment is None else environment, LC_ALL="C.UTF-8")
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, cwd=folder,
                              env=environ)
    except FileNotFoundError as error:
        raise SchedulerError(f"{words[0]} was not found ({error}). It is a command of the scheduler. Run this where "
                             "the scheduler's commands are on PATH, such as a login node.", command=words) from None
    except (OSError, ValueError) as error:
        raise SchedulerError(f"{shown} could not be started: {error}.", command=words) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{shown} gave no answer within {seconds:g} s. The scheduler may be down or busy. "
                             "Try again later.", command=words) from None
    if done.returncode not in good:
        # The usage of qsub is ten lines long and comes after what was wrong.
        said = re.split(r"\nusage: ", decode(done.stderr).strip() or decode(done.stdout).strip())[0]
        raise SchedulerError(f"{shown} failed with exit status {done.returncode}: {said or 'it said nothing'}",
                             command=words, exit_code=done.returncode, said=said)
    return decode(done.stdout)


def submit(words: Sequence[str], folder: str | os.PathLike[str] | None, job_id: re.Pattern[str],
           cause: Callable[[str], str | None]) -> str:
    """Run sbatch --parsable ("12;cluster") or qsub ("12.server") and return the job id, of the form `job_id`.

    cause: what it said -> a sentence on what this is about.
    """
    try:
        answer = ask(words, folder=folder, seconds=SUBMIT_SECONDS).strip()
    except SchedulerError as error:
        raise _with_cause(error, cause(error.said)) from None
    found = job_id.fullmatch(answer.split("\n")[-1].partition(";")[0])
    if found is None:
        raise SchedulerError(f"{words[0]} printed {answer[:80]!r}, expected a job id. Look in the queue whether the "
                             "job is there.", command=words)
    return found[0]


def _with_cause(error: SchedulerError, sentence: str | None) -> SchedulerError:
    if sentence is None:
        return error
    return SchedulerError(f"{error}\n{sentence}", command=error.command, exit_code=error.exit_code, said=error.said)
