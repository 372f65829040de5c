"""The published measurements, and the traced operations of their programs, kept so that a comparison takes seconds."""
from __future__ import annotations

import csv
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.tools.plan.live_memory import Peak
from utils.tools.plan.operations import TracedOperation
from utils.tools.plan.trace import Trace

HERE = Path(__file__).parent
TRACES = HERE / "traces.json.gz"


@dataclass(frozen=True)
class Measurement:
    """A row of table.csv."""

    id: str
    program: str  # of programs.py; empty where there is none
    gpu: str  # of jobs/hardware.yaml
    compiled: bool
    batch: int
    accumulate: int
    gpus: int
    inside: str
    between: str
    parallel: str
    seconds: float  # of an optimizer step
    trust: str  # A and B: complete; C: uncertain

    @property
    def source(self) -> str:
        return self.id.split("-")[0]

    @property
    def kind(self) -> str:
        """Return network and precision: "convolutions tf32"."""
        words = self.program.split()
        precision = next(word for word in (*words[1:], "bf16") if word in ("fp32", "tf32", "fp16", "bf16", "o2"))
        is_network = words[0] == "images" and not re.search("vit|swin", words[1])
        return f"{'convolutions' if is_network else 'transformers'} {precision}"


def measurements() -> list[Measurement]:
    """Return the rows with a program whose step can be predicted."""
    with (HERE / "table.csv").open(encoding="utf-8", newline="") as file:
        return [Measurement(row["id"], row["program"], row["plan_gpu"], row["compiled"] == "yes", int(row["batch"]),
                            int(row["accumulate"]), int(row["gpus"]), row["inside"], row["between"], row["parallel"],
                            _seconds(row), row["trust"])
                for row in csv.DictReader(file) if row["program"]]


def _seconds(row: dict[str, str]) -> float:
    value = float(row["value"])
    if row["unit"] == "ms/step":
        return value / 1e3
    samples = int(row["batch"]) * int(row["accumulate"])
    if row["unit"].startswith("tokens"):
        samples *= int(re.search(r"seq (\d+)", row["model"])[1])  # type: ignore[index]
    return samples * (1 if row["unit"].endswith("/GPU") else int(row["gpus"])) / value


def trace(program: str) -> Trace:
    """Trace a program; needs torchvision, timm and transformers."""
    from .programs import FAMILIES
    family, *words = program.split()
    arguments: list[Any] = [int(word) if word.isdigit() else word for word in words]
    if family == "images":
        arguments[4] = arguments[4] == "channels_last"
    if family == "gpt":
        arguments[6:] = [arguments[6:] != ["nobias"]]
    return FAMILIES[family](*arguments)


def stored(found: Trace) -> dict[str, Any]:
    """Return a trace as JSON holds it: each different operation once, and their order."""
    different = list(dict.fromkeys(found.operations))
    places = {operation: i for i, operation in enumerate(different)}
    return {"parameters": found.num_parameters, "operations": different,
            "order": [places[operation] for operation in found.operations], "gradients": found.gradients,
            "bucket_bytes": found.bucket_bytes, "peak": found.peak().bytes}


def restored(entry: dict[str, Any]) -> Trace:
    different = [TracedOperation(*operation) for operation in entry["operations"]]
    peak = Peak(sum(entry["peak"].values()), entry["peak"])
    return Trace(entry["parameters"], {(o, w): peak for o in (False, True) for w in (False, True)},
                 [different[place] for place in entry["order"]],
                 [(index, size) for index, size in entry["gradients"]], entry["bucket_bytes"], 1)


def stored_traces() -> dict[str, Any]:
    if not TRACES.exists():
        return {}
    found: dict[str, Any] = json.loads(gzip.decompress(TRACES.read_bytes()))
    return found


def trace_all() -> None:
    """Trace each program that is not stored yet."""
    known = stored_traces()
    for program in dict.fromkeys(row.program for row in measurements()):
        if program not in known:
            known[program] = stored(trace(program))
            text = json.dumps(known, separators=(",", ":"))
            TRACES.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(program, flush=True)
