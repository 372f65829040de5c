#!/bin/bash -l
# One rank for each GPU of every host of a PBS job, started by the mpiexec that belongs here, or without any.
#
#   ARGS="examples/01_ddp_minimal.py --epochs 3" qsub -V -A ACCOUNT jobs/pbs_mpiexec.sh
#
# >>> Lines to edit; set-up lines of your own (module load, source .../activate) go where it says so below.
# An option of qsub on the command line goes before the line here. A line with ## is off: remove one # of it.
##PBS -A ACCOUNT
##PBS -q QUEUE
#PBS -l select=2:ncpus=4:mpiprocs=4:ompthreads=1:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe
# The login shell that PBS puts around a job ends at USR1 and TERM, and the job with it, unless it has the next lines.
# qsub -v NAME=... and a BASH_ENV of your own undo them; the job's output says so. Without that shell, and without any
# of these lines: qsub OPTIONS -- "$PWD/jobs/pbs_mpiexec.sh" train.py
#PBS -S /bin/bash
#PBS -v BASH_ENV='$(f=$(mktemp -t .survive.XXXXXX); echo trap : USR1 TERM >$f; echo $f)'
ARGS=${ARGS-} # what to run where qsub says nothing else: ARGS=${ARGS-train.py --epochs 3}
# <<<

set -euo pipefail
if [ "${PBS_ENVIRONMENT-}" = PBS_BATCH ]; then cd "$PBS_O_WORKDIR"; fi # PBS starts in the home directory

# This file runs as a copy in PBS's spool folder. The kit is where the file was when it was submitted: its path ends the
# arguments of qsub, and may have spaces.
find_kit() {
    local asked rest folder
    asked=$(qstat -f -w "${PBS_ARRAY_ID:-${PBS_JOBID-}}" 2>/dev/null | sed -n 's/^ *Submit_arguments = //p') || asked=
    rest=$asked
    for folder in "${DDPKIT_HOME-}" "$(dirname -- "${BASH_SOURCE[0]}")/.." . ..; do
        if is_kit "$folder"; then return; fi
    done
    while [ -n "$rest" ]; do
        if is_kit "$(dirname -- "$rest")/.."; then return; fi
        case $rest in *' '*) rest=${rest#* } ;; *) rest= ;; esac
    done
    printf 'job script: the kit (scripts/launch.py) was not found, neither in %s or above it nor by qsub %s. ' \
        "$PWD" "$asked" >&2
    printf 'Name its folder: env DDPKIT_HOME=/path/to/the/kit qsub -V ...\n' >&2
    return 1
}
is_kit() {
    [ -f "$1/scripts/launch.py" ] && [ -f "$1/jobs/in_job.sh" ] && cd -- "$1" && pwd
}
KIT=$(find_kit)

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"
check_login_shell

set +u +o pipefail # modules and environments are seldom written for these
find_modules
# set-up lines of your own:

set -u -o pipefail
python=$(find_python)
if [ $# -eq 0 ]; then
    split "$python" "$ARGS"
    set -- "${words[@]}"
fi

# exec: each signal then reaches launch.py once and at once, and its exit status is the job's
exec "$python" "$KIT/scripts/launch.py" -- "$@"
