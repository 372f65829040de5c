#!/bin/bash
@usage@

set -euo pipefail

@kit@

# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"

set +u # modules and environments are seldom written for it
@own@
@setup@
set -u

# exec: signals to the script (--signal=B:USR1, the time limit) then reach launch.py, and its exit status is the job's
exec "$(find_python)" "$KIT/scripts/launch.py" @command@
