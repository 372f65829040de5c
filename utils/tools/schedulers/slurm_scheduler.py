"""Write, check, submit and watch jobs under Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from ...job import slurm_exclusion
from ...job.commands import SchedulerError, run_command
from .directives import find_options, probable_cause
from .job_checks import check_dependency, check_paths, check_queue
from .job_spec import Job
from .job_status import Status
from .scheduler import Scheduler
from .slurm_options import chosen_partition, directives, quote, setting, without_hosts
from .slurm_partitions import check_account, query_partitions
from .slurm_status import StatusQuery

# Phrases of sbatch's errors, and the options that they may be about. A phrase of the first table
# excludes the second: "accounting/qos policy" holds "account" and "qos".
_SPECIFIC_ERRORS = (
    ("accounting/qos policy", ("--time", "-t", "--qos", "-q", "--nodes", "-N", "--array", "-a")),
    ("account/partition", ("--account", "-A", "--partition", "-p")),
)
_ERRORS = (
    ("partition", ("--partition", "-p")),
    ("account", ("--account", "-A", "--partition", "-p")),
    ("time limit", ("--time", "-t")),
    ("gres", ("--gpus", "--gres", "-G")),
    ("gpu", ("--gpus", "--gres", "-G")),
    ("feature", ("--constraint", "-C")),
    ("dependency", ("--dependency", "-d")),
    ("memory", ("--mem",)),
    ("qos", ("--qos", "-q")),
    ("array", ("--array", "-a")),
    ("reservation", ("--reservation",)),
    ("licenses", ("--licenses", "-L")),
    ("signal", ("--signal",)),
    ("node count", ("--nodes", "-N")),
    ("node list", ("--nodelist", "-w")),
    ("cpu", ("--cpus-per-task", "-c")),
    (
        "node configuration",
        ("--gpus", "--gres", "--cpus-per-task", "--mem", "--constraint", "--nodes"),
    ),
)


class Slurm(Scheduler):
    """The Scheduler for Slurm."""

    name = "slurm"
    directive_prefix = "#SBATCH"
    job_id_pattern = re.compile(r"[0-9]+(?:_(?:[0-9]+|\[[0-9,:%-]+\])|\+[0-9]+)?")
    job_id_examples = "1234, 1234_5 or 1234+1"
    can_requeue = True

    def __init__(self) -> None:
        self._query = StatusQuery()

    def directives(self, job: Job) -> list[list[str]]:
        return directives(job)

    def quote(self, word: str) -> str:
        return quote(word)

    def without_hosts(self, job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
        return without_hosts(job, hosts)

    def exclude_hosts(
        self,
        job_id: str,
        hosts: Sequence[str],
        *,
        preferred: Sequence[str] = (),
        dry_run: bool = False,
    ) -> str:
        self.check_job_id(job_id)
        return slurm_exclusion.exclude_hosts(job_id, hosts, dry_run)

    def check(self, job: Job) -> list[str]:
        first = directives(replace(job, components=()))
        partitions = query_partitions()
        partition = os.environ.get("SBATCH_PARTITION") or chosen_partition(first)
        if not partition and any(setting(words) == "--qos" for words in first):
            # The site chooses the partition by QOS: any of them may be meant.
            partitions = [replace(one, is_default=False) for one in partitions]
        return [
            *check_queue(replace(job, queue=partition or None), partitions, "partition"),
            *check_account(job),
            *check_dependency(job, self.status),
            *check_paths(job),
        ]

    def submit_command(self) -> list[str]:
        return ["sbatch", "--parsable"]

    def explain(self, error: str, places: dict[str, str]) -> str | None:
        lower = error.lower()
        named = re.findall(r"--[a-z][a-z-]+", error) + re.findall(r"specified: (\S+)", error)
        meant = [name for phrase, names in _SPECIFIC_ERRORS if phrase in lower for name in names]
        if not meant:
            meant = [name for phrase, names in _ERRORS if phrase in lower for name in names]
        found = find_options(places, named + meant)
        is_about_all = "policy" in lower  # sbatch does not name the part of a policy
        return probable_cause(found if is_about_all else found[:1])

    def status(self, job_id: str) -> Status:
        self.check_job_id(job_id)
        return self._query.status(job_id)

    def cancel(self, job_id: str) -> None:
        self.check_job_id(job_id)
        try:
            run_command(["scancel", job_id])
        except SchedulerError:
            if not self.status(job_id).ended:
                raise

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue under the same id. PBS lets only operators do this."""
        self.check_job_id(job_id)
        run_command(["scontrol", "requeue", job_id])
