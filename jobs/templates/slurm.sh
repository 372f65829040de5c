#!/bin/bash
@usage@

set -euo pipefail

@kit@

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"

set +u +o pipefail # modules and environments are seldom written for these
find_modules
@own@
@setup@
set -u -o pipefail
python=$(find_python)

# exec: signals to the script (--signal=B:USR1, the time limit) then reach launch.py, and its exit status is the job's
exec "$python" "$KIT/scripts/launch.py" @command@
