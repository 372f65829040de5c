#!/bin/bash -l
# Starts one rank on each GPU of every host:   ARGS="train.py --epochs 3" qsub -A ACCOUNT jobs/pbs.sh
# Edit these options, or give them to qsub, whose command line takes precedence. A line with ## is off.
##PBS -A ACCOUNT
##PBS -q QUEUE
# ncpus: all cores of a host. ompthreads: cores of one rank.
#PBS -l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
#PBS -S /bin/bash
#PBS -v ARGS

set -e
cd "${PBS_O_WORKDIR:-.}"
# The environment with torch and ddpkit: module load ..., conda activate ..., or, by its whole path,
source .venv/bin/activate || { echo "Name your environment in the line 'source' of the job script." >&2; exit 1; }
# Where ddpkit is not installed: exec /path/to/ddpkit/scripts/launch.py "$@"
exec ddpkit launch "$@"
