#!/usr/bin/env python3
"""Job scripts: the templates in jobs/templates filled in, for submit.py and for the ready scripts in jobs/.

python scripts/job_scripts.py      writes jobs/slurm_*.sh and jobs/pbs_*.sh; edit the templates or this file, not those

Not here: how a job's values become options and shell (utils/schedulers).
"""
from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils.schedulers import Job, get_scheduler
from utils.schedulers.script import quote

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "jobs"
TEMPLATES = JOBS / "templates"
LAUNCH = '"$KIT/scripts/launch.py"'

SUBMITTED = "# Written by scripts/submit.py. submission.json beside this file says from what.\n@directives@"

SLURM_LINES = """\
#
#   sbatch -A ACCOUNT -N 4 jobs/{name} examples/01_ddp_minimal.py --epochs 3
#
# >>> Lines to edit; set-up lines of your own (module load, source .../activate) go where it says so below.
# An option of sbatch on the command line goes before the line here. A line with ## is off: remove one # of it.
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
##SBATCH --gpus-per-node=4     in place of --exclusive, where nodes are shared
##SBATCH --signal=B:USR1@300   the ranks get USR1 five minutes before the end; the training has to handle it
@directives@
# <<<"""
PBS_LINES = """\
#
#   ARGS="examples/01_ddp_minimal.py --epochs 3" qsub -V -A ACCOUNT jobs/{name}
#
# >>> Lines to edit; set-up lines of your own (module load, source .../activate) go where it says so below.
# An option of qsub on the command line goes before the line here. A line with ## is off: remove one # of it.
##PBS -A ACCOUNT
##PBS -q QUEUE
@directives@
# The login shell that PBS puts around a job ends at USR1 and TERM, and the job with it, unless it has the next lines.
# qsub -v NAME=... and a BASH_ENV of your own undo them; the job's output says so. Without that shell, and without any
# of these lines: qsub OPTIONS -- "$PWD/jobs/{name}" train.py
#PBS -S /bin/bash
#PBS -v {guard}"""
GUARD = "BASH_ENV='$(f=$(mktemp -t .survive.XXXXXX); echo trap : USR1 TERM >$f; echo $f)'"
PBS_ARGUMENTS = """\
ARGS=${ARGS-} # what to run where qsub says nothing else: ARGS=${ARGS-train.py --epochs 3}
# <<<"""
SPLIT = """\
if [ $# -eq 0 ]; then
    split "$python" "$ARGS"
    set -- "${words[@]}"
fi"""


@dataclass(frozen=True)
class Ready:
    """A script in jobs/: its first line, and the job it is rendered from. The command is its arguments."""

    purpose: str
    scheduler: str
    job: Job


READY = {
    "slurm_srun.sh": Ready("One rank for each GPU of every node of a Slurm job, started by srun.", "slurm", Job(
        nodes=2, walltime=3600, directives=("--exclusive",), launcher="srun")),
    "slurm_torchrun.sh": Ready("One torchrun agent on every node of a Slurm job, which starts a rank for each GPU.",
                               "slurm", Job(nodes=2, walltime=3600, directives=("--exclusive",), launcher="torchrun")),
    "pbs_mpiexec.sh": Ready("One rank for each GPU of every host of a PBS job, started by the mpiexec that belongs "
                            "here, or without any.", "pbs", Job(
                                nodes=2, gpus_per_node=4, cores_per_rank=1, walltime=3600)),
    "pbs_torchrun.sh": Ready("One torchrun agent on every host of a PBS job, which starts a rank for each GPU.", "pbs",
                             Job(nodes=2, gpus_per_node=4, cores_per_rank=1, walltime=3600, launcher="torchrun")),
}


def submitted_script(scheduler: str, job: Job, folder: Path | None = None, after: str = "") -> str:
    """The script that submit.py submits for a job. JobError names a field that cannot be written into it.

    folder: of the submission, where the job keeps its exit status (launch_recorded.py). after: the job of the chain
    that it continues.
    """
    kit = f"KIT={shlex.quote(str(ROOT))}"
    marks = {"usage": SUBMITTED, "own": "", "kit": kit, "arguments": "", "guard": "", "split": ""}
    if folder is None:
        return _render(scheduler, job, marks)
    marks["kit"] += (f"\nSUBMISSION={quote(str(folder))} # where this job keeps its exit status\n"
                     f"PREVIOUS={quote(after)} # the job of the chain that it continues")
    return _render(scheduler, job, marks, '"$KIT/scripts/launch_recorded.py" "$SUBMISSION" "$PREVIOUS"')


def ready_script(name: str) -> str:
    """The text of jobs/NAME."""
    ready = READY[name]
    lines = {"slurm": SLURM_LINES, "pbs": PBS_LINES}[ready.scheduler].format(name=name, guard=GUARD)
    marks = {"usage": f"# {ready.purpose}\n{lines}", "own": "# set-up lines of your own:",
             "kit": (TEMPLATES / f"find_kit_{ready.scheduler}.inc").read_text(), "arguments": PBS_ARGUMENTS,
             "guard": "check_login_shell", "split": SPLIT}
    return _render(ready.scheduler, ready.job, marks)


def _render(scheduler: str, job: Job, marks: dict[str, str], launch: str = LAUNCH) -> str:
    template = (TEMPLATES / f"{scheduler}.sh").read_text().replace(LAUNCH, launch)
    for mark, value in marks.items():
        template = template.replace(f"@{mark}@\n", value.rstrip("\n") + "\n" if value else "")
    return get_scheduler(scheduler).render(job, template)


if __name__ == "__main__":
    for ready_name in READY:
        path = JOBS / ready_name
        path.write_text(ready_script(ready_name))
        path.chmod(0o755)
        print(path)
