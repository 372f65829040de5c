"""Which effects setup_distributed() may have on this process: DDPKIT_WITHOUT switches them off.

The table of all effects is in docs/launchers.md.
"""

from __future__ import annotations

import os

from .launch_error import LaunchError

HANG_TIMEOUT = "DDPKIT_HANG_TIMEOUT"  # seconds, "auto", or "0" for none
STAGED = "DDPKIT_STAGED"  # "2.1+0.8": seconds of --stage, before this process and in it
_WITHOUT = "DDPKIT_WITHOUT"
_EFFECTS = ("variables", "monitor", "excepthook", "atexit", "faulthandler")


def may_have(effect: str) -> bool:
    """Return whether setup_distributed() may have an effect on this process, one of _EFFECTS.

    DDPKIT_WITHOUT lists those that the user does not want.
    """
    return effect not in _unwanted()


def check_effects() -> None:
    """Raise LaunchError where DDPKIT_WITHOUT lists anything else."""
    if unknown := set(_unwanted()).difference(_EFFECTS):
        raise LaunchError(
            f"{_WITHOUT} is {os.environ[_WITHOUT]}; expected some of {', '.join(_EFFECTS)}. "
            f"Leave out {', '.join(sorted(unknown))}"
        )


def _unwanted() -> list[str]:
    return os.environ.get(_WITHOUT, "").replace(",", " ").split()
