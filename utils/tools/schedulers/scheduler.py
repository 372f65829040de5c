"""Define what Slurm and PBS have in common: queues, the status of a job, operations on jobs."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...job.commands import SUBMIT_TIMEOUT_SECONDS, SchedulerError, run_command
from ...launch_protocol import EXIT_REQUEUE
from .job_spec import Job, JobError, split_directive

State = Literal[
    "running",
    "ending",
    "queued",
    "held",
    "failed",
    "node_fail",
    "timeout",
    "cancelled",
    "never_ran",
    "unknown",
    "stopped",  # ended with EXIT_REQUEUE: it has saved, and another job is to continue it
    "completed",
]
_NOT_ENDED = ("running", "ending", "queued", "held", "unknown")


@dataclass(frozen=True)
class Queue:
    """A partition of Slurm or a queue of PBS; None: no limit, or not known."""

    name: str
    is_default: bool = False
    is_open: bool = True
    max_walltime_seconds: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    # Size of its largest node:
    cores_per_node: int | None = None
    gpus_per_node: int | None = None
    memory_per_node_bytes: int | None = None


@dataclass(frozen=True)
class Status:
    """A job at one moment. Only "completed" is success."""

    job_id: str
    state: State
    # Exit code of the job script; 128+N if signal N ended it; None: none (yet).
    exit_code: int | None = None
    reason: str = ""  # why the job waits or how it ended
    scheduler_state: str = ""  # "PENDING", "Q"
    hosts: tuple[str, ...] = ()
    output: str | None = None  # path of the log

    @property
    def ended(self) -> bool:
        """Whether the job has reached its final state."""
        return self.state not in _NOT_ENDED

    @property
    def exit_status(self) -> int:
        """The exit status of a command that follows the job: 0 for success alone."""
        if self.state == "completed":
            return 0
        return self.exit_code if self.exit_code and 0 < self.exit_code < 256 else 1


def state_of_exit(exit_code: int | None) -> State:
    """Return the state of a job that ended by itself; None: its exit code is not known."""
    if exit_code == 0:
        return "completed"
    return "stopped" if exit_code == EXIT_REQUEUE else "failed"


class Scheduler(ABC):
    """A batch scheduler.

    Every method that runs a command raises SchedulerError with that command's error output.
    """

    name: str  # "slurm" or "pbs"
    directive_prefix: str  # "#SBATCH"
    job_id_pattern: re.Pattern[str]
    job_id_examples: str
    submit_command: str  # "sbatch"
    option_pattern: re.Pattern[str]  # matches the start of an option of submit_command
    account_variable: str = ""  # names an account to submit_command
    time_limit_pattern: re.Pattern[str]  # matches the start of an option that limits the time
    refused_variables: tuple[str, ...] = ()  # shell variables that submit_command does not get
    can_requeue: bool = False  # whether users may put their running jobs back into the queue

    @abstractmethod
    def directives(self, job: Job) -> list[list[str]]:
        """Return a job's options, each as unquoted words: ["--nodes=2"], ["-l", "walltime=..."].

        Raises JobError for what this scheduler does not support.
        """

    @abstractmethod
    def quote(self, word: str) -> str:
        """Quote a word of a directive. Raises JobError where that is impossible."""

    def check_directives(self, job: Job) -> None:
        """Raise JobError for an option that only another scheduler has."""
        for entry in job.directives:
            if not self.option_pattern.match(" ".join(split_directive(entry))):
                raise JobError(
                    "directives",
                    f"{entry[:60]!r} is not an option of {self.submit_command}, and this job is "
                    f"for {self.name}. Give an option of {self.submit_command}.",
                )

    def directive_lines(self, job: Job) -> list[str]:
        """Return the options of a job as lines of its script. Raises JobError as directives()."""
        options = (" ".join(map(self.quote, words)) for words in self.directives(job))
        return [f"{self.directive_prefix} {option}" for option in options]

    def has_time_limit(self, job: Job) -> bool:
        """Return whether the options of a job limit its time."""
        options = (" ".join(words) for words in self.directives(job))
        return any(map(self.time_limit_pattern.match, options))

    @abstractmethod
    def without_hosts(self, job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
        """Return a job that avoids hosts, and why that is impossible; "" if it is possible.

        Hosts that the scheduler does not know are ignored.
        """

    @abstractmethod
    def exclude_hosts(
        self,
        job_id: str,
        hosts: Sequence[str],
        *,
        dry_run: bool = False,
    ) -> str:
        """Let a queued job avoid hosts; return why it cannot, or "".

        dry_run: only return whether it can.
        """

    @abstractmethod
    def check(self, job: Job) -> list[str]:
        """Return the problems that a job would have, each with its remedy.

        What the scheduler does not report is no problem.
        """

    @abstractmethod
    def submit_words(self, options: Sequence[str], path: str) -> list[str]:
        """Return the command that submits a script with these options."""

    def submit(self, path: str | os.PathLike[str], job: Job) -> str:
        """Submit the script of a job from the current directory and return the job id.

        The options are also given on the command line: variables of the shell, such as
        SBATCH_ACCOUNT, take precedence over options in a script.

        Raises SchedulerError with the scheduler's message.
        """
        options = [word for words in self.directives(job) for word in words]
        words = self.submit_words(options, os.fspath(path))
        output = run_command(
            words, timeout_seconds=SUBMIT_TIMEOUT_SECONDS, without=self.refused_variables
        ).strip()
        last_line = output.split("\n")[-1]
        job_id = last_line.partition(";")[0]  # sbatch --parsable: "12;cluster"
        if not self.job_id_pattern.fullmatch(job_id):
            raise SchedulerError(
                f"{words[0]} printed {output[:80]!r}. Expected a job id. Check the queue before "
                "submitting again: the job may be there.",
                command=words,
            )
        return job_id

    def check_job_id(self, job_id: str) -> None:
        """Raise SchedulerError for a text that is not a job id of this scheduler."""
        if not self.job_id_pattern.fullmatch(job_id):
            raise SchedulerError(
                f"{job_id[:60]!r} is not a job id of {self.name}. Expected one like "
                f"{self.job_id_examples}. Give the id that was printed when the job was submitted."
            )

    @abstractmethod
    def status(self, job_id: str) -> Status:
        """Query a job; state "unknown" where the scheduler does not know it, or no longer."""

    @abstractmethod
    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        """Query many jobs, by as few commands as possible; see status()."""

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """End a job or remove it from the queue. No error for a job that has already ended."""
