#!/bin/bash -l
@usage@
@arguments@

set -euo pipefail
if [ "${PBS_ENVIRONMENT-}" = PBS_BATCH ]; then cd "$PBS_O_WORKDIR"; fi # PBS starts in the home directory

@kit@

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"
@guard@

set +u +o pipefail # modules and environments are seldom written for these
find_modules
@own@
@setup@
set -u -o pipefail
python=$(find_python)
@split@

# exec: each signal then reaches launch.py once and at once, and its exit status is the job's
exec "$python" "$KIT/scripts/launch.py" @command@
