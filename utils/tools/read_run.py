"""Read the log of a run, which utils/metrics/run_log.py writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ..metrics.run_log import FILE_NAME, parse_line


@dataclass
class Run:
    """What a log contains. columns: for each name of a value, its steps and the values there."""

    name: str
    seams: list[int] = field(default_factory=list)  # a restart follows each of these steps
    columns: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # also of columns without a number


def read_run(path: Path) -> Run:
    """Return the values of a log; path: the file, or the folder that contains it.

    Raises OSError, or ValueError for a file without any step.
    """
    if path.is_dir():
        path = path / FILE_NAME
    run = Run(path.parent.name or str(path) if path.name == FILE_NAME else path.stem)
    has_step = False
    with open(path, "rb") as file:
        for text in file:
            line = parse_line(text)
            if line is None:
                continue  # cut off by a kill
            step = line.pop("step")
            assert isinstance(step, int)
            if line.get("event") == "start":
                run.seams += [step] if has_step else []
                continue
            has_step = True
            for name, value in line.items():
                run.names.add(name)
                if isinstance(value, int | float) and math.isfinite(value):
                    steps, values = run.columns.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
    if not has_step:
        raise ValueError(f"{path} has no step. Expected the {FILE_NAME} of a training")
    return run
