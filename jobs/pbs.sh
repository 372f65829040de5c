#!/bin/bash -l
# Starts one rank on each GPU of every host:   ARGS="train.py --epochs 3" qsub -A ACCOUNT jobs/pbs.sh
# Edit these options, or give them to qsub, whose command line takes precedence. A line with ## is off.
##PBS -A ACCOUNT
##PBS -q QUEUE
# ncpus = mpiprocs x ompthreads, mpiprocs = ngpus. For 32 cores and 2 GPUs: ncpus=32:mpiprocs=2:ompthreads=16:ngpus=2
#PBS -l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -S /bin/bash
#PBS -v ARGS

set -e
cd "${PBS_O_WORKDIR:-.}"
# EDIT THIS LINE. It loads the environment with torch and ddpkit: module load ..., conda activate ..., or, by its path:
source ".venv/bin/activate" || { echo "Name your environment in the line 'source' of the job script." >&2; exit 1; }
# Where ddpkit is not installed: exec /path/to/ddpkit/scripts/launch.py "$@"
exec ddpkit launch "$@"
