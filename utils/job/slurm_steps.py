"""The step of Slurm around this process."""

from __future__ import annotations

from collections.abc import Mapping

# As numbered in slurm.h. Slurm 26.05 writes SLURM_STEP_ID=-5, earlier ones 4294967291 or nothing.
SPECIAL_STEPS = {"extern": -4, "batch": -5, "interactive": -6}
_STEP_NAMES = {str(id + base): name for name, id in SPECIAL_STEPS.items() for base in (0, 1 << 32)}


def step_name(environ: Mapping[str, str]) -> str:
    """Return the step around this process, such as "7" or one of SPECIAL_STEPS; "" without one."""
    step = environ.get("SLURM_STEP_ID", "").strip()
    return _STEP_NAMES.get(step, step)
