"""Draw results as PNG files with matplotlib; ddpkit plot draws run logs and step times."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...log import get_logger, print_result
from ...metrics.run_log import FILE_NAME, Run, read_run
from ..cli.arguments import ArgumentParser
from ..cli.missing_files import no_such_file

_log = get_logger(__name__)
_SMOOTHED_FROM = 50  # steps; a shorter run is not smoothed
_NOT_DRAWN = ("time", "step_seconds", "data_seconds")  # drawn as speed and data_share instead
_WITHOUT_NOISE = ("lr", "memory_bytes")
_COLOURS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#e08e1b", "#7d5ba6", "#4b5563", "#0f9ba8", "#a0522d")
EPILOG = f"""\
A LOG is the {FILE_NAME} of a training, or the folder that contains it. Each run has a colour. A
dashed line shows where a restart resumed. Dots are values that only some steps have, such as those
of an evaluation. A file that ends in .csv holds the step times of a StepTimer.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Draw the logs and return an exit status. words: arguments; None: sys.argv."""
    parser = ArgumentParser(
        prog="ddpkit plot",
        description="Draw the logs of one or more runs, or step times, as a PNG file (needs "
        "matplotlib).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "logs", nargs="+", type=Path, metavar="LOG", help=f"{FILE_NAME} or its folder, or steps.csv"
    )
    help_output = "default: metrics.png; of step times the same name with .png"
    add("--output", type=Path, metavar="FILE", help=help_output)
    args = parser.parse_args(words)
    is_steps = args.logs[0].suffix == ".csv"
    if is_steps and len(args.logs) > 1:
        parser.error(f"found {args.logs[1]} after {args.logs[0]}. Expected one file of step times")
    output = args.output or (args.logs[0].with_suffix(".png") if is_steps else Path("metrics.png"))
    try:
        if is_steps:
            draw_step_times(args.logs[0], output)
        else:
            draw([read_run(log) for log in args.logs], output)
    except ImportError as error:
        problem = f"{error}. Expected matplotlib. Install it: pip install matplotlib"
    except OSError as error:
        problem = (
            f"{error.filename}: {error.strerror}. Expected a {FILE_NAME} or its folder, and a "
            "writable folder for --output. Correct the path"
        )
        if isinstance(error, FileNotFoundError) and error.filename != str(output):
            problem = no_such_file(error.filename, f"Expected a {FILE_NAME} or its folder")
    except ValueError as error:
        problem = str(error)
    else:
        print_result(f"{output} written")
        return 0
    print(f"ddpkit plot: error: {problem}", file=sys.stderr)
    return 2


def _figure(width: float, height: float) -> Any:
    """Return an empty figure, sizes in inches. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(runs: Sequence[Run], output: Path) -> None:
    """Draw the loss, and below it all other numbers in the logs.

    Raises ValueError if there is nothing to draw.
    """
    for run in runs:
        _add_data_share(run)
    names = {name for run in runs for name in run.columns}
    losses = sorted((name for name in names if "loss" in name), key=lambda name: name != "loss")
    known = {*losses, *_NOT_DRAWN, "lr", "data_share", "memory_bytes"}
    others = sorted(
        name for name in names if name not in known and not name.endswith("_per_second")
    )
    panels = [
        (title, chosen, scale)
        for title, chosen, scale in (
            ("learning rate", [name for name in names if name == "lr"], 1.0),
            *(
                (name.replace("_per_second", " per second"), [name], 1.0)
                for name in sorted(names)
                if name.endswith("_per_second")
            ),
            ("wait for data, % of the step", ["data_share"], 100.0),
            ("peak memory of rank 0, GiB", ["memory_bytes"], 2.0**-30),
            *((name.replace("_", " "), [name], 1.0) for name in others),
        )
        if any(name in names for name in chosen)
    ]
    if not losses and not panels:
        found = ", ".join(sorted({name for run in runs for name in run.names})) or "none"
        raise ValueError(
            f"no column can be drawn; found {found}. Expected finite numbers, such as a loss. "
            "Correct the log"
        )

    rows, top = (len(panels) + 1) // 2, 1 if losses else 0
    figure = _figure(11, 4.2 * top + 2.3 * rows)
    grid = figure.add_gridspec(top + rows, 2, height_ratios=[1.9] * top + [1.0] * rows)
    if losses:
        axes = figure.add_subplot(grid[0, :])
        _draw_panel(axes, runs, losses, 1.0)
        axes.set_title("loss", loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=9)
    for number, (title, chosen, scale) in enumerate(panels):
        axes = figure.add_subplot(grid[top + number // 2, number % 2])
        _draw_panel(axes, runs, chosen, scale)
        axes.set_title(title, loc="left", fontsize=10)
        if not losses and number == 0:
            axes.legend(frameon=False, fontsize=9)
        if chosen[0] not in others:  # other values may be negative
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    figure.savefig(output, dpi=130)


def _draw_panel(axes: Any, runs: Sequence[Run], names: Sequence[str], scale: float) -> None:
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        for i, seam in enumerate(sorted(set(run.seams))):
            label = "" if i else f"{run.name}: {len(run.seams)} restarts"
            style = {"linestyle": "--", "linewidth": 0.8, "alpha": 0.45}
            axes.axvline(seam + 0.5, color=colour, label=label, **style)
        most = max((len(run.columns[name][0]) for name in names if name in run.columns), default=0)
        for name in names:
            steps, values = run.columns.get(name, ([], []))
            values = [scale * value for value in values]
            label = run.name if name == "loss" else f"{run.name}: {name.replace('_', ' ')}"
            if len(steps) < most / 2:
                axes.plot(
                    steps,
                    values,
                    "o-",
                    color=colour,
                    markersize=4.5,
                    markeredgecolor="white",
                    linewidth=1,
                    label=label,
                )
            elif len(steps) < _SMOOTHED_FROM or name in _WITHOUT_NOISE:
                axes.plot(steps, values, color=colour, linewidth=1.4, label=label)
            else:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
                axes.plot(steps, _smooth(values), color=colour, linewidth=1.5, label=label)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.margins(x=0.01)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the median of a window around each value, which one slow step does not move."""
    half = max(2, len(values) // 100)
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _add_data_share(run: Run) -> None:
    """Add the column data_share: the wait for data as a share of the step time."""
    steps, waits = run.columns.get("data_seconds", ([], []))
    _, seconds = run.columns.get("step_seconds", ([], []))
    if not steps or not seconds:
        return
    shares = [wait / max(step, 1e-9) for wait, step in zip(waits, seconds, strict=False)]
    run.columns["data_share"] = (steps, shares)


def draw_step_times(file: Path, output: Path) -> None:
    """Draw data, computation and waiting of all ranks over the steps, from a file of StepTimer.

    Raises ValueError for a file of another kind.
    """
    parts = ("data", "computation", "waiting")
    with open(file, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if not rows or not {"step", "rank", "host", *parts} <= rows[0].keys():
        raise ValueError(
            f"{file} has no step times. Expected the file of a StepTimer(file=...), "
            "after its first comparison. Correct the path"
        )
    steps = sorted({int(row["step"]) for row in rows})
    hosts = {int(row["rank"]): row["host"] for row in rows}
    cells = {
        (row["rank"], row["step"], part): 1e3 * float(row[part]) for row in rows for part in parts
    }
    highest = max(cells.values(), default=1.0)

    height = min(12.0, max(2.6, 1.5 + 0.22 * len(hosts)))  # room for the label of the colours
    figure = _figure(13, height)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, part in zip(axes, parts, strict=True):
        table = [
            [cells.get((str(rank), str(step), part), float("nan")) for step in steps]
            for rank in sorted(hosts)
        ]
        extent = (0, steps[-1], len(hosts) - 0.5, -0.5)
        image = axis.imshow(table, aspect="auto", vmin=0, vmax=highest, extent=extent)
        axis.set(title=part, xlabel="step")
    labelled = range(0, len(hosts), max(1, len(hosts) // 40))
    axes[0].set_yticks(list(labelled), [f"rank {rank}, {hosts[rank]}" for rank in labelled])
    figure.colorbar(image, ax=axes, label="ms per step")
    figure.savefig(output, dpi=120)


def draw_lines(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
) -> None:
    """Draw named lines of (x, y); warn if matplotlib is missing."""
    try:
        figure = _figure(8, 5)
    except ImportError as error:
        _log.warning("%s was not drawn: %s. Install it: pip install matplotlib", path, error)
        return
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
