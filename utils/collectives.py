"""Read which collectives this rank has entered, from torch's process groups and flight recorder."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from .rendezvous.hangs import Collective, user_frame

# Recorders of torch 2.13: one for every backend but NCCL, which has its own.
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")


def total_collectives() -> int:
    """Return how many collectives of all groups this rank has entered; 0 where torch counts none.

    Private API: torch lists its groups nowhere else.
    """
    total = 0
    for group in list(c10d._world.pg_map):
        try:
            total += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, ValueError):
            continue
    return total


def are_recorded(backend: str) -> bool:
    """Whether torch always records the collectives of a backend."""
    return backend == "gloo" and hasattr(torch._C._distributed_c10d, _RECORDERS[0])


def last_collectives(count: int = 20, locations: bool = False) -> list[Collective]:
    """Return the last collectives of this rank, oldest first, from torch's flight recorder.

    Empty where torch records none: torch 2.13 records those of gloo, and NCCL's where
    TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before 2.9) is not 0. Private API: torch
    offers the recorder to Python only there.

    locations: find out where they were called. Only for a job that ends: see _without_inductor().
    """
    entries: list[dict[str, Any]] = []
    for name in _RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):
                with _device_of_rank(), _without_inductor():
                    entries += pickle.loads(dump(True, locations, False)).get("entries", [])
    try:
        entries.sort(key=lambda entry: int(entry["time_created_ns"]))
        return [_collective(entry) for entry in entries[-count:]]
    except (KeyError, IndexError, TypeError, ValueError):  # another version of the format
        return []


def _device_of_rank() -> contextlib.AbstractContextManager[object]:
    """Use this rank's GPU in this thread: torch asks it which collectives have ended.

    In a new thread that would be GPU 0, where each rank would take some hundred megabytes:
    https://github.com/meta-pytorch/torchcomms/pull/777
    """
    device: torch.device | None = getattr(c10d.GroupMember.WORLD, "bound_device_id", None)
    if device is None:
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    current: contextlib.AbstractContextManager[object] = module.device(device)
    return current


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Let torch look for stack frames without importing its compiler, which takes seconds.

    torch 2.13 tests whether `torch._inductor` exists, and this imports it.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    torch._inductor = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if torch._inductor is None:
            del torch._inductor


def show_collectives() -> str:
    """Return a text with the last collectives of this rank."""
    lines = [
        f"{call['number']:>8} {call['operation']} of {call['sizes']}, group {call['group']}, "
        f"{'NOT ENDED' if call['pending'] else 'ended'}, at {call['location']}\n"
        for call in last_collectives(2000, locations=True)
    ]
    if not lines:
        return (
            f"This torch ({torch.__version__}) has not recorded the collectives. This rank has "
            f"entered {total_collectives()}.\n"
        )
    return "The last collectives, oldest first:\n\n" + "".join(lines)


def _collective(entry: dict[str, Any]) -> Collective:
    frames = ((f["filename"], f["line"], f["name"]) for f in entry.get("frames") or ())
    return {
        "group": str(entry["process_group"][-1]) + "/" + str(entry["process_group"][0]),
        # Collectives and transfers between two ranks are counted separately.
        "number": int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]),
        "operation": str(entry["profiling_name"]).partition(":")[2],
        "sizes": str(entry["input_sizes"]),
        "between_two": bool(entry.get("is_p2p")),
        "location": user_frame(frames),
        # The state of gloo's collectives stays "scheduled".
        "pending": not entry.get("retired", False),
    }
