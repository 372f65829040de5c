"""Draw results as PNG files, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...log import get_logger

_log = get_logger(__name__)


def draw_lines(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
) -> None:
    """Draw named lines of (x, y); warn where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        _log.warning("%s was not drawn: %s. Install it: pip install matplotlib", path, error)
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    for name, points in lines.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], "o-", label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
