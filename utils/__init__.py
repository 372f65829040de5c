"""The package that a training script imports: `from ddpkit import setup_distributed`.

Names are loaded on first use, so that `ddpkit.launchers` does not import torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["Distributed", "LaunchError", "setup_distributed"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .distributed import Distributed, setup_distributed
    from .errors import LaunchError


def __getattr__(name: str) -> object:
    if name == "LaunchError":
        from .errors import LaunchError

        return LaunchError
    if name in __all__:
        from . import distributed

        return getattr(distributed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
