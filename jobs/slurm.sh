#!/bin/bash
# Starts one rank on each GPU of every node of a Slurm job:
#   sbatch -A ACCOUNT -N 4 jobs/slurm.sh train.py --epochs 3
#   sbatch -A ACCOUNT -N 4 jobs/slurm.sh --torchrun train.py     one torchrun agent on each node instead
# Edit these options, or give them to sbatch, whose command line takes precedence. A line with ## is off.
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
##SBATCH --gpus-per-node=4     instead of --exclusive where nodes are shared
##SBATCH --signal=B:USR1@300   send USR1 to the ranks five minutes before the end; the training has to handle it
#SBATCH --nodes=2
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --exclusive

set -euo pipefail

# Slurm runs a copy of this file, so the kit is looked for where sbatch found the original. DDPKIT_HOME overrides that.
file=$(squeue --noheader --jobs="${SLURM_JOB_ID-}" --format=%o 2>/dev/null | sed -n 1p) || file=
for KIT in "${DDPKIT_HOME-}" "$(dirname -- "${BASH_SOURCE[0]}")/.." "$(dirname -- "${file%" $*"}")/.." \
    "${SLURM_SUBMIT_DIR-.}" "${SLURM_SUBMIT_DIR-.}/.."; do
    if [ -f "$KIT/jobs/in_job.sh" ]; then break; fi
done
if [ ! -f "$KIT/jobs/in_job.sh" ]; then
    echo "job script: the kit was not found in ${SLURM_SUBMIT_DIR-.}, above it, or in '$file'. Expected its folder, which holds" \
        "jobs/in_job.sh. Submit with: env DDPKIT_HOME=/path/to/the/kit sbatch ..." >&2
    exit 1
fi
# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"

# Your set-up lines go here: module load ..., source .../activate

run launch "$@"
