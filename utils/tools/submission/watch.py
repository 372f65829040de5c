"""Say whether a job or its chain runs, should be started again, or should not; for cron or a loop.

The evidence is what the scheduler reports, what the jobs have recorded, and their output, which is
cut into the runs of the training: one for each start by `ddpkit launch`.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..doctor.logs import Diagnosis, diagnose, summary
from ..schedulers.scheduler import Scheduler, Status
from .following import breaks_chain, describe
from .queries import output_files, query
from .submissions import Submission

Decision = Literal["RUNNING", "RESTART", "STOP"]
EXIT_STATUS: dict[Decision, int] = {"RUNNING": 0, "RESTART": 1, "STOP": 3}  # as of `doctor logs`

_MOST_RUNS = 3  # that end one after the other without progress
_MOST_BYTES = 64 << 20  # of an output file, from its end
_START = re.compile(rb"^ddpkit launch: \d+ ranks? on ", re.MULTILINE)
_STEP = re.compile(rb"\bstep[ =:]{1,8}(\d{1,12})\b", re.IGNORECASE)
_PREFLIGHT = re.compile(rb"^doctor: ", re.MULTILINE)  # this start was one of doctor


class TrainingRun(NamedTuple):
    """One run of the training. step: the last that it printed; None where it prints none."""

    step: int | None
    failure: Diagnosis | None

    @property
    def cause(self) -> str:
        """The name of the cause of its failure; "" without a failure, or where it was ended."""
        name = self.failure.cause.name if self.failure else ""
        return "" if name == "terminated" else name


class JobDecision(NamedTuple):
    """What is to be done, and why."""

    decision: Decision
    evidence: list[str]
    action: str = ""  # a command, or what to correct
    is_complete: bool = False

    @property
    def exit_status(self) -> int:
        """0 also for a training that is complete."""
        return 0 if self.is_complete else EXIT_STATUS[self.decision]


def watch(scheduler: Scheduler, submission: Submission | None, job_id: str, as_json: bool) -> int:
    """Print what is to be done about a job: a line of JSON, or the decision and its evidence."""
    job_ids = submission.job_ids if submission else (job_id,)
    folder = submission.folder if submission else None
    statuses = [query(scheduler, folder, one) for one in job_ids]
    files = [output_files(submission, status) for status in statuses]
    found = judge(statuses, [run for one in files for run in read_runs(one)])
    if as_json:
        print(json.dumps({"job": job_id, **found._asdict()}))
    else:
        print(f"{found.decision} {job_id}")
        for line in [*found.evidence, *filter(None, [found.action])]:
            print(f"  {line}")
    return found.exit_status


def read_runs(files: Sequence[Path]) -> Iterator[TrainingRun]:
    """Yield the runs of the training in the output of one job, the first one first."""
    for path in sorted(files):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _MOST_BYTES))
                content = file.read(_MOST_BYTES)
        except OSError:
            continue
        later = [found.start() for found in _START.finditer(content)][1:]
        for start, end in itertools.pairwise([0, *later, len(content)]):
            text = content[start:end]
            if _PREFLIGHT.search(text):
                continue
            steps = [int(found[1]) for found in _STEP.finditer(text)]
            yield TrainingRun(max(steps, default=None), diagnose([(io.BytesIO(text), path.name)]))


def judge(statuses: Sequence[Status], runs: Sequence[TrainingRun]) -> JobDecision:
    """Return what is to be done about a chain of jobs, or about one job.

    statuses: of its jobs, in order. runs: all that its jobs have printed.
    """
    if done := [one for one in statuses if one.state == "completed"]:
        return JobDecision("STOP", [f"job {done[0].job_id} has completed the training"], "", True)
    active = next((one for one in statuses if not one.ended and one.state != "unknown"), None)
    ended = list(runs[:-1] if active and active.state in ("running", "ending") else runs)
    last = active or statuses[-1]
    begun = [one for one in statuses if one.ended and one.state != "never_ran"]
    evidence = [describe(one) for one in dict.fromkeys([*begun[-1:], last])]
    if not active and begun and begun[-1].state == "cancelled" and not _was_preempted(begun[-1]):
        return JobDecision("STOP", [*evidence, "it was cancelled"])

    for problem in (_no_progress(ended), _error_of_user(ended, repeated=active is not None)):
        if problem:
            action = "Correct it first"
            if active:
                action += f", and end what is left: ddpkit submit cancel {active.job_id}"
            return JobDecision("STOP", [*evidence, problem], action)
    if suspect := _suspect_host(ended):
        evidence.append(suspect)
    if active is None and not begun and statuses[-1].state == "unknown":
        return JobDecision(
            "STOP", [*evidence, "neither the scheduler nor a record knows how it ended"]
        )

    resubmit = f"ddpkit submit resubmit {statuses[0].job_id}"
    if active is None:
        if ended and (failure := ended[-1].failure) and begun and begun[-1].state == "failed":
            evidence.append(summary(failure))
        return JobDecision("RESTART", evidence, resubmit)
    if reason := _why_stranded(statuses, active):
        action = f"ddpkit submit cancel {active.job_id} && {resubmit}"
        return JobDecision("RESTART", [*evidence, f"stranded: {reason}"], action)
    if ended:
        evidence.append(f"{len(ended)} run{'s' * (len(ended) > 1)} before")
    return JobDecision("RUNNING", evidence)


def _was_preempted(status: Status) -> bool:
    return status.scheduler_state == "PREEMPTED"


def _no_progress(ended: Sequence[TrainingRun]) -> str:
    """Return that the last runs made no progress beyond those before; "" if they did."""
    shows_steps = any(run.step is not None for run in ended)
    furthest, without = -1, 0
    for run in ended:
        has_progress = (run.step or -1) > furthest if shows_steps else not run.cause
        furthest = max(furthest, run.step or -1)
        without = 0 if has_progress else without + 1
    if without < _MOST_RUNS:
        return ""
    causes = Counter(run.cause for run in ended[-without:] if run.cause)
    shown = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common(3)) or "unknown"
    if shows_steps:
        return f"{without} restarts without progress beyond step {furthest}. Causes: {shown}"
    return f"restart storm: the last {without} runs failed. Causes: {shown}"


def _error_of_user(ended: Sequence[TrainingRun], *, repeated: bool) -> str:
    """Return an error that a restart does not mend. repeated: two runs in a row have to show it."""
    last = [run.failure for run in ended[-2 if repeated else -1 :] if run.failure]
    hopeless = [failure for failure in last if failure.cause.restart is False]
    same_cause = len({failure.cause.name for failure in hopeless}) == 1
    if not same_cause or len(hopeless) < (2 if repeated else 1):
        return ""
    return f"a restart does not help: {summary(hopeless[-1])}"


def _suspect_host(ended: Sequence[TrainingRun]) -> str:
    """Return a host that was at fault in several runs."""
    failures = [run.failure for run in ended if run.failure and run.failure.host]
    hosts = Counter(one.host for one in failures if one.cause.restart is not False)
    host, count = next(iter(hosts.most_common(1)), ("", 0))
    if count < 2:
        return ""
    return f"suspect node: {host} was at fault in {count} of {len(ended)} runs. Exclude it"


def _why_stranded(statuses: Sequence[Status], active: Status) -> str:
    """Return why a job that waits will never train; "" where it may."""
    if active.state not in ("queued", "held"):
        return ""
    if "for ever" in active.reason or "DependencyNeverSatisfied" in active.reason:
        return f"job {active.job_id} waits for ever"
    broken = [one for one in statuses[: statuses.index(active)] if breaks_chain(one)]
    return (
        f"job {active.job_id} will refuse to start after job {broken[0].job_id}" if broken else ""
    )
