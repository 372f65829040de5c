"""Gather JSON values from all ranks with a collective, without pickle."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .host.device import BACKENDS

Value = TypeVar("Value")


def gather_json(value: Value) -> list[Value]:
    """Return the value of each rank; all ranks call this. value: any JSON value.

    torch's object collectives unpickle whatever is received, and so run the code of anybody who
    can send in a rank's place. Tuples arrive as lists.
    """
    # A group with several backends has no single name here; it has a backend for the CPU.
    device = torch.device(BACKENDS.get(str(dist.get_backend()), "cpu"))
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)

    longest = max(int(each) for each in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = [torch.empty_like(own, device=device) for _ in lengths]
    dist.all_gather(parts, own.to(device))
    whole = [bytes(part.tolist()) for part in parts]
    decoded: list[Any] = [
        json.loads(part[: int(each)]) for part, each in zip(whole, lengths, strict=True)
    ]
    return decoded
