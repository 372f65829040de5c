"""Metrics of a training: averaged over the ranks, written to a log and to trackers."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .metrics import Metrics as Metrics


def __getattr__(name: str) -> object:
    # Imported on first use: reading a log needs no torch.
    if name == "Metrics":
        from .metrics import Metrics

        return Metrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
