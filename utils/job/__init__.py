"""The job around this process: its hosts, the time left, and the way back into the queue."""

from __future__ import annotations

from .allocation import Allocation as Allocation
from .allocation import AllocationError as AllocationError
from .find_allocation import current_allocation as current_allocation
from .slurm_job import expand_hostlist as expand_hostlist
