"""Write and read the log of a run: JSON lines that hold every step once, over all restarts.

{"event": "start", "step": 200, "run": "q7x2mfgk", "time": 1795381200.1, "world_size": 8}
{"step": 201, "time": 1795381203.4, "loss": 2.71, "lr": 0.0006, "tokens_per_second": 812345.0}

A start line has the step before its first one. If `ddpkit launch` has restarted the ranks, it also
has "restart": {"number": 1, "cause": ..., "without": ["n2"], "steps_lost": 12, "seconds": 9.4}.
"steps_lost" counts steps in the log that are trained again; a step that was not written yet is not
counted. "seconds" is the time from the failure to the end of the first step. Steps that are trained
again replace their earlier lines. Every line ends with a newline; a line without one was cut off by
a kill.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILE_NAME = "metrics.jsonl"
Line = dict[str, object]


class RunLog:
    """Appends lines to the log of a run, and keeps every step once.

    path: path of the file, which is made if it is missing. last_step: the step before this
    process's first one. Lines of later steps are dropped, and so is a line that a kill cut off.

    Attributes: run is the id of the run, which restarts keep. last_step is the last step that
    remains in the file, 0 if there is none. lost_steps is the number of dropped steps, which an
    earlier process had trained.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size, self.last_step, newest, self.run = _drop_after(self._file, last_step)
        self.lost_steps = max(0, newest - last_step)
        self.run = self.run or "".join(random.SystemRandom().choices(_ID_LETTERS, k=8))

    def append(self, lines: Sequence[Mapping[str, object]], *, sync: bool = False) -> None:
        """Write lines; with sync, wait until they are on disk. Raises OSError.

        After an error, pass the unwritten lines again, with new lines after them.
        """
        text = "".join(json.dumps(_finite(line)) + "\n" for line in lines).encode()
        written = 0
        while written < len(text):  # a full disk may accept a part of the text
            written += os.pwrite(self._file, text[written:], self._size + written)
        if sync:
            os.fsync(self._file)
        self._size += written

    def close(self) -> None:
        os.close(self._file)


def parse_line(text: bytes) -> Line | None:
    """Return a line of a log, or None if it is incomplete."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


_ID_LETTERS = string.ascii_lowercase + string.digits


def _drop_after(file: int, last_step: int) -> tuple[int, int, int, str]:
    """Cut a log after `last_step`. Returns its size, its new and old last step, and its run's id.

    It is read from its end: a long run has millions of lines, and a restart drops a few.
    """
    size = os.fstat(file).st_size
    if size == 0:
        return 0, 0, 0, ""
    found = newest = 0
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as content:
        first = parse_line(content[: content.find(b"\n") + 1])
        end = size
        while end > 0:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line = parse_line(content[start:end])
            step = 0 if line is None else int(str(line["step"]))
            newest = max(newest, step)
            if line is not None and step <= last_step:
                found = step
                break
            end = start
    if end < size:
        os.ftruncate(file, end)
    return end, found, newest, str(first.get("run", "")) if first else ""


def _finite(line: Mapping[str, object]) -> Line:
    """Replace values that JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


@dataclass
class Run:
    """The contents of a log. columns: name of a value -> its steps, and the value at each."""

    name: str
    seams: list[int] = field(default_factory=list)  # steps after which a restart follows
    columns: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # includes columns without numbers


def read_run(path: Path) -> Run:
    """Return the values in a log. path: the file, or the folder that contains it.

    Raises OSError, and ValueError for a file without any step.
    """
    if path.is_dir():
        path = path / FILE_NAME
    run = Run(path.parent.name or str(path) if path.name == FILE_NAME else path.stem)
    has_step = False
    with open(path, "rb") as file:
        for text in file:
            line = parse_line(text)
            if line is None:
                continue  # a kill has cut the line off
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
