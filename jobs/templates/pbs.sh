#!/bin/bash -l
@usage@
@arguments@

set -euo pipefail
unset BASH_ENV # it was for the login shell that started this script
if [ "${PBS_ENVIRONMENT-}" = PBS_BATCH ]; then cd "$PBS_O_WORKDIR"; fi # PBS starts in the home directory

@kit@

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"
@split@

set +u # modules and environments are seldom written for it
@own@
@setup@
set -u

# exec: each signal then reaches launch.py once and at once, and its exit status is the job's
exec "$(find_python)" "$KIT/scripts/launch.py" @command@
