"""Write the job scripts of submissions: the templates in jobs/templates, filled in."""

from __future__ import annotations

import shlex
from pathlib import Path

from ...job.requeue import CHAIN_VARIABLE
from ..schedulers.find_scheduler import get_scheduler
from ..schedulers.job_script import quote
from ..schedulers.job_spec import Job
from .paths import JOBS, KIT


def job_script(
    scheduler: str,
    job: Job,
    folder: Path | None = None,
    previous_job_id: str = "",
    *,
    in_chain: bool = False,
) -> str:
    """Return the script to submit for a job.

    folder: of the submission, where the job records its exit status; None for a dry run.
    previous_job_id: the job of the chain that this one continues. in_chain: whether it is in one.
    Raises JobError, which names the field, for a value that cannot be written into a script.
    """
    template = (JOBS / "templates" / f"{scheduler}.sh").read_text(encoding="utf-8")
    lines = [f"KIT={quote(str(KIT))}"]
    if folder is not None:
        lines.append(f"SUBMISSION={quote(str(folder))} # where this job records its exit status")
        lines.append(f"PREVIOUS={quote(previous_job_id)} # the job of the chain that it continues")
        if in_chain:
            # The id: a job that this one submits inherits the variable.
            lines.append(f'export {CHAIN_VARIABLE}="${{SLURM_JOB_ID-}}" # no requeue() in this job')
        run = 'run job "$SUBMISSION" "$PREVIOUS"'
        if job.preflight:
            run += f" --preflight {quote(shlex.join(job.preflight))}"
        template = template.replace("run launch", run)
    elif job.preflight:
        lines.append(f"# first: doctor {shlex.join(job.preflight)}")
    return get_scheduler(scheduler).render(job, template.replace("@kit@", "\n".join(lines)))
