"""The job around this process: the time left, and the way back into the queue."""

from __future__ import annotations

from .current_job import CurrentJob as CurrentJob
from .current_job import current_job as current_job
from .slurm_job import expand_hostlist as expand_hostlist
