#!/bin/bash
# Written by "submit run". submission.json in this folder records the settings.
@directives@

set -euo pipefail
@kit@
# shellcheck source=jobs/in_job.sh
. "$KIT/jobs/in_job.sh"
@setup@
run launch @command@
