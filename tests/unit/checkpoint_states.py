"""What a checkpoint file holds, states compared bit for bit, and a disk that fails; for test_checkpoint_*.py."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch


class ChangedDisk:
    """The real disk, with some of its calls replaced."""

    def __init__(self, **calls: Any) -> None:
        vars(self).update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def slow_disk(wait: Callable[[], object]) -> ChangedDisk:
    """The real disk, which waits before each fsync()."""
    def fsync(file: int) -> None:
        wait()
        os.fsync(file)
    return ChangedDisk(fsync=fsync)


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and numpy arrays of a file without gaps in which every array is aligned to its elements."""
    raw = path.read_bytes()
    start = end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata, arrays = header.pop("__metadata__"), {}
    for name, field in header.items():
        dtype = numpy.dtype({"F32": "<f4", "I64": "<i8", "BOOL": "?", "U8": "u1"}[field["dtype"]])
        assert field["data_offsets"][0] == end - start and end % dtype.itemsize == 0
        arrays[name] = numpy.frombuffer(raw, dtype, math.prod(field["shape"]), end).reshape(field["shape"])
        end += arrays[name].nbytes
    assert end == len(raw)
    return metadata, arrays


def bits(value: Any) -> Any:
    """A state as plain data with all types and every bit."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
        return [str(value.dtype), list(value.shape), raw]
    if isinstance(value, numpy.ndarray):
        return [kind, str(value.dtype.descr), value.shape, value.tobytes()]
    if isinstance(value, dict):
        return [kind, [[bits(key), bits(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [kind, *map(bits, value)]
    return [kind, hex(value) if type(value) is int else repr(value)]
