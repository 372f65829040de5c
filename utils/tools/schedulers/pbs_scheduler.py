"""Write, check, submit and watch jobs under OpenPBS and PBS Professional."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from ...job.commands import run_command
from ...job.pbs_programs import find_program
from . import pbs_exclusion as exclusion
from .directives import find_options, last_value, option_name, probable_cause, split_options
from .job_checks import check_dependency, check_paths, check_queue
from .job_spec import Job, split_directive
from .job_status import Status
from .pbs_limits import ServerState
from .pbs_options import directives, quote, settings
from .pbs_status import JOB_FINISHED, query_status
from .scheduler import Scheduler

# Phrases of qsub's errors, and the options that they may be about.
_ERRORS = (
    ("queue", ("-q",)),
    ("Unauthorized", ("-q", "-A")),
    ("ccount", ("-A",)),
    ("name", ("-N",)),
    ("select or place", ("select=", "place=")),
)


class Pbs(Scheduler):
    """The Scheduler for OpenPBS and PBS Professional."""

    name = "pbs"
    directive_prefix = "#PBS"
    # "12.pbs-head", "79[].pbs_2", "12.sched@sched-2": number, submission server, server now
    job_id_pattern = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9_.-]+)?(?:@[A-Za-z0-9_.-]+)?")
    job_id_examples = "1234, 1234.server or 1234[].server"

    def directives(self, job: Job) -> list[list[str]]:
        return directives(job)

    def quote(self, word: str) -> str:
        return quote(word)

    def setup_lines(self, job: Job) -> list[str]:
        """Return the shell lines that a job script runs before launch.py.

        PBS sends no signal before the end, and qsig would end the login shell around the script and
        with it the job. A process of the script sends USR1 to it.
        """
        lines = super().setup_lines(job)
        if job.signal_seconds and job.walltime:
            lines.append(
                f'(sleep {job.walltime - job.signal_seconds} && kill -USR1 "$$") '
                "< /dev/null > /dev/null 2>&1 &"
            )
        return lines

    def without_hosts(self, job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
        return exclusion.without_hosts(job, hosts)

    def exclude_hosts(
        self,
        job_id: str,
        hosts: Sequence[str],
        *,
        preferred: Sequence[str] = (),
        dry_run: bool = False,
    ) -> str:
        self.check_job_id(job_id)
        return exclusion.exclude_hosts(job_id, hosts, preferred, dry_run)

    def check(self, job: Job) -> list[str]:
        options = directives(job)
        server = ServerState.query()
        queue = _local_queue(options)
        in_queue = replace(job, queue=queue or None)
        extra = [split_directive(entry) for entry in job.directives]
        if any("-l select" in settings(words) for words in extra):  # replaces these fields
            in_queue = replace(in_queue, nodes=1, gpus_per_node=0, cores_per_rank=None, memory=None)
        return [
            *check_queue(in_queue, server.as_queues(), "queue"),
            *server.limit_problems(options, queue or server.default_queue),
            *check_dependency(job, self.status),
            *check_paths(job),
        ]

    def submit_command(self) -> list[str]:
        return [find_program("qsub")]

    def explain(self, error: str, places: dict[str, str]) -> str | None:
        if "resource limits" in error:
            return _explain_limits([words for text in places for words in split_options(text)])
        named = re.findall(r"directive error: (.+)", error)
        named += re.findall(
            r"(?:Resource_List\.|Unknown resource: |resource is: |illegal )(-?[A-Za-z_]+)", error
        )
        named += re.findall(r"value (\w+)\.", error)
        meant = [name for phrase, names in _ERRORS if phrase in error for name in names]
        return probable_cause(find_options(places, named + meant)[:1])

    def status(self, job_id: str) -> Status:
        self.check_job_id(job_id)
        return query_status(job_id)

    def cancel(self, job_id: str) -> None:
        self.check_job_id(job_id)
        run_command([find_program("qdel"), job_id], accepted_statuses=(0, JOB_FINISHED))


def _local_queue(options: Sequence[Sequence[str]]) -> str:
    """The queue that the options name, without a server: "small" of "small@server"."""
    return last_value(options, "-q").partition("@")[0]


def _explain_limits(options: Sequence[Sequence[str]]) -> str:
    """Name the limits that a job exceeds, which qsub does not.

    Where the server does not report its limits, show all that the job requests.
    """
    server = ServerState.query()
    queue = _local_queue(options) or server.default_queue
    problems = server.limit_problems(options, queue)
    if problems:
        return "\n".join(problems)
    requests = dict.fromkeys(
        shlex.join(words) for words in options if option_name(words) in ("-l", "-q")
    )
    show_queue = f"qstat -Qf {queue}".rstrip()
    return (
        "qsub does not name the limit. The job requests: "
        f"{' '.join(requests) or 'nothing but defaults'}. Compare with resources_max and "
        f"resources_min in: {show_queue}, and in: qstat -Bf"
    )
