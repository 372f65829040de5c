#!/bin/bash
# One rank for each GPU of every node of a Slurm job, started by srun.
#
#   sbatch -A ACCOUNT -N 4 jobs/slurm_srun.sh examples/01_ddp_minimal.py --epochs 3
#
# >>> Lines to edit; set-up lines of your own (module load, source .../activate) go where it says so below.
# An option of sbatch on the command line goes before the line here. A line with ## is off: remove one # of it.
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
##SBATCH --gpus-per-node=4     in place of --exclusive, where nodes are shared
##SBATCH --signal=B:USR1@300   the ranks get USR1 five minutes before the end; the training has to handle it
#SBATCH --nodes=2
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --exclusive
# <<<

set -euo pipefail

# This file runs as a copy in Slurm's spool folder. The kit is where the file was when it was submitted.
find_kit() {
    local file folder
    # A newer Slurm has the whole line of sbatch between the two.
    file=$(scontrol show job --oneliner "${SLURM_JOB_ID-}" 2>/dev/null |
        sed -n '1{s/ SubmitLine=.* WorkDir=/ WorkDir=/;s/.* Command=\(.*\) WorkDir=.*/\1/p}')
    file=${file%" $*"} # without the arguments
    for folder in "${DDPKIT_HOME-}" "$(dirname -- "${BASH_SOURCE[0]}")/.." "$(dirname -- "$file")/.." \
        "${SLURM_SUBMIT_DIR-.}" "${SLURM_SUBMIT_DIR-.}/.."; do
        if [ -f "$folder/scripts/launch.py" ] && [ -f "$folder/jobs/in_job.sh" ]; then
            cd -- "$folder" && pwd
            return
        fi
    done
    printf 'job script: the kit (scripts/launch.py) was not found, neither beside %s nor in %s or above it. ' \
        "${file:-this file}" "${SLURM_SUBMIT_DIR-.}" >&2
    printf 'Name its folder: sbatch --export=ALL,DDPKIT_HOME=/path/to/the/kit ...\n' >&2
    return 1
}
KIT=$(find_kit "$@")

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"

set +u +o pipefail # modules and environments are seldom written for these
find_modules
# set-up lines of your own:

set -u -o pipefail
python=$(find_python)

# exec: signals to the script (--signal=B:USR1, the time limit) then reach launch.py, and its exit status is the job's
exec "$python" "$KIT/scripts/launch.py" --by srun -- "$@"
