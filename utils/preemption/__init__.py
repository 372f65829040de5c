"""Stop all ranks at the same step before the job ends, and put the job back into the queue.

stop_signal.py is the interface for training scripts. agreement.py lets the ranks agree on a step,
sources.py watches everything that requests a stop. job/requeue.py puts the job back.
"""

from __future__ import annotations

from ..job.requeue import requeue as requeue
from ..launch_protocol import EXIT_REQUEUE as EXIT_REQUEUE
from .stop_signal import StopSignal as StopSignal
from .workers import SIGNALS as SIGNALS
from .workers import shield_worker as shield_worker
