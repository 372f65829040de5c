"""The package that a training script imports: `from utils import setup_distributed`.

Names are loaded on first use, so that `utils.launchers` does not import torch.

The import installs handlers for SIGUSR1 and SIGUSR2 where there are none: these signals would end a
rank that still imports torch. The handlers keep them for its StopSignal. Import this package before
torch.
"""

from __future__ import annotations

from .signals import hold as _hold_signals

__version__ = "0.1.0"
__all__ = ["Distributed", "LaunchError", "setup_distributed"]

_hold_signals()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .distributed import Distributed, setup_distributed
    from .launch_error import LaunchError


def __getattr__(name: str) -> object:
    if name == "LaunchError":
        from .launch_error import LaunchError

        return LaunchError
    if name in __all__:
        from . import distributed

        return getattr(distributed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
