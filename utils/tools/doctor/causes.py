"""The table of causes: symptoms in the output, meaning, remedy, and whether a restart helps.

A pattern is literal text. `...` stands for any text, `{host}` for the host that failed, `{status}`
for a number other than 0; `^` is the start of a line, after labels such as "[rank3]: ". The first
pattern that matches decides the cause of a line, so specific rows precede general ones.

Failures that the kit itself reports are a launch_protocol.Failure: see lines.cause_of().
"""

from __future__ import annotations

from . import causes_devices, causes_general, causes_jobs, causes_programs, causes_storage
from .failure_cause import FailureCause

CAUSES: tuple[FailureCause, ...] = (
    *causes_storage.ROWS,
    *causes_jobs.ROWS,
    *causes_programs.ROWS,
    *causes_devices.ROWS,
    *causes_general.ROWS,
)
