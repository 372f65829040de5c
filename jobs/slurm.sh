#!/bin/bash
# Starts one rank on each GPU of every node:   sbatch -A ACCOUNT -N 4 jobs/slurm.sh train.py --epochs 3
# Edit these options, or give them to sbatch, whose command line takes precedence. A line with ## is off.
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
# Instead of --exclusive where nodes are shared:
##SBATCH --gpus-per-node=4
# Send USR1 to the ranks five minutes before the end; the training has to handle it:
##SBATCH --signal=B:USR1@300
#SBATCH --exclusive
#SBATCH --nodes=2
#SBATCH --time=01:00:00
#SBATCH --open-mode=append

set -e
# EDIT THIS LINE. It loads the environment with torch and ddpkit: module load ..., conda activate ..., or, by its path:
source ".venv/bin/activate" || { echo "Name your environment in the line 'source' of the job script." >&2; exit 1; }
# Where ddpkit is not installed: exec /path/to/ddpkit/scripts/launch.py "$@"
exec ddpkit launch "$@"
