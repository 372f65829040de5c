"""Identify the Slurm step around this process."""

from __future__ import annotations

from collections.abc import Mapping

# Numbers from slurm.h. Slurm 26.05 sets SLURM_STEP_ID=-5, older ones 4294967291 or nothing.
SPECIAL_STEPS = {"extern": -4, "batch": -5, "interactive": -6}
_STEP_NAMES = {str(id + base): name for name, id in SPECIAL_STEPS.items() for base in (0, 1 << 32)}


def step_name(environ: Mapping[str, str]) -> str:
    """Return this process's step: "7", or a key of SPECIAL_STEPS; "" outside of a step."""
    step = environ.get("SLURM_STEP_ID", "").strip()
    return _STEP_NAMES.get(step, step)
