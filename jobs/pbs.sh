#!/bin/bash -l
# Starts one rank on each GPU of every host of a PBS job:
#   ARGS="train.py --epochs 3" qsub -A ACCOUNT jobs/pbs.sh
#   ARGS="--torchrun train.py" qsub -A ACCOUNT jobs/pbs.sh    one torchrun agent on each host instead
# Edit these options, or give them to qsub, whose command line takes precedence. A line with ## is off.
##PBS -A ACCOUNT
##PBS -q QUEUE
#PBS -l select=2:ncpus=4:mpiprocs=4:ompthreads=1:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
# The next two pass ARGS, and keep the login shell around the job alive at USR1 and TERM (jobs/README.md). "qsub -v"
# replaces the second.
#PBS -S /bin/bash
#PBS -v ARGS,BASH_ENV='$(f=$(mktemp -t .survive.XXXXXX); echo trap : USR1 TERM >$f; echo $f)'
ARGS=${ARGS-} # for a copy that always runs one command: ARGS="train.py --epochs 3", and no ARGS in the line above

set -euo pipefail
if [ "${PBS_ENVIRONMENT-}" = PBS_BATCH ]; then cd "$PBS_O_WORKDIR"; fi # PBS starts in the home directory

# PBS runs a copy of this file, so the kit is looked for where qsub found the original. DDPKIT_HOME overrides that.
file=$(qstat -f -w "${PBS_ARRAY_ID:-${PBS_JOBID-}}" 2>/dev/null | sed -n 's/^ *Submit_arguments = //p') || file=
while [[ $file == *' '* && ! -f $file ]]; do file=${file#* }; done # the path ends qsub's arguments
for KIT in "${DDPKIT_HOME-}" "$(dirname -- "${BASH_SOURCE[0]}")/.." "$(dirname -- "$file")/.." . ..; do
    if [ -f "$KIT/jobs/in_job.sh" ]; then break; fi
done
if [ ! -f "$KIT/jobs/in_job.sh" ]; then
    echo "job script: the kit was not found in $PWD, above it, or in '$file'. Expected its folder, which holds" \
        "jobs/in_job.sh. Set it in a copy of the script, above this line: DDPKIT_HOME=/path/to/the/kit" >&2
    exit 1
fi
# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"

# Your set-up lines go here: module load ..., source .../activate

if [ $# -eq 0 ]; then split_ARGS; set -- "${words[@]}"; fi
run launch "$@"
