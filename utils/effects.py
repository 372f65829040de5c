"""Which effects setup_distributed() may have on this process: DDPKIT_WITHOUT switches them off.

The table of all effects is in docs/launchers.md.
"""

from __future__ import annotations

import os

from .launch_error import LaunchError

HANG_TIMEOUT = "DDPKIT_HANG_TIMEOUT"  # seconds, "auto", or "0" for none
NOTICE_AFTER = "DDPKIT_NOTICE_AFTER"  # seconds without progress until a line says so; "0": never
STAGED = "DDPKIT_STAGED"  # "2.1+0.8": seconds of --stage, before this process and in it
_WITHOUT = "DDPKIT_WITHOUT"
_EFFECTS = ("variables", "monitor", "excepthook", "atexit", "faulthandler", "filter")


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


def notice_after() -> float:
    """Return the seconds without progress after which a line says where the ranks wait; 0: never.

    Raises LaunchError for a value that is no number.
    """
    text = os.environ.get(NOTICE_AFTER, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise LaunchError(f"{NOTICE_AFTER} is {text!r}; expected seconds, or 0 for never")
    return seconds


def _unwanted() -> list[str]:
    return os.environ.get(_WITHOUT, "").replace(",", " ").split()
