#!/bin/bash -l
# Written by "submit run". submission.json in this folder records the settings.
@directives@

set -euo pipefail
if [ "${PBS_ENVIRONMENT-}" = PBS_BATCH ]; then cd "$PBS_O_WORKDIR"; fi # PBS starts in the home directory
@kit@
# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"
@setup@
run launch @command@
