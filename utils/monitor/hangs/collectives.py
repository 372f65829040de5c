"""Read which collectives this rank has entered, from torch's process groups and flight recorder."""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...ranges import format_ranges
from ..counts import group_timeout, sequence_number, total_collectives
from .positions import Collective, Group, thread_location, user_frame

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def has_recorder() -> bool:
    """Whether one of torch's flight recorders records a process group of this rank."""
    return any(trace.get("pg_config") for trace in _read_recorders(False))


def read_collectives(
    count: int = 20, locations: bool = False
) -> tuple[list[Collective], dict[str, Group]]:
    """Return the last collectives of this rank, oldest first, and its process groups.

    The collectives are from torch's flight recorder: the last `count`, the newest of each group,
    and all that have not ended. Empty where torch records none: gloo of torch 2.8, and where
    TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before 2.9) is 0. Sends and receives of gloo
    are in no recorder.

    locations: include where they were called. Only for a job that ends: see _without_inductor().
    """
    traces = _read_recorders(locations)
    frames = sys._current_frames()
    members: dict[str, tuple[str, list[int]]] = {}  # group name -> (label, ranks)
    groups = {}
    with contextlib.suppress(AttributeError, KeyError, RuntimeError):
        for process_group in list(c10d._world.pg_map):
            ranks = dist.get_process_group_ranks(process_group)
            label = _label(process_group, format_ranges(ranks))
            members[str(process_group.group_name)] = label, ranks
            entered, timeout = sequence_number(process_group), group_timeout(process_group)
            groups[label] = Group(format_ranges(ranks), entered, timeout=timeout)
    try:
        recorded = [trace.get("entries") or [] for trace in traces]
        entries = sorted(
            itertools.chain(*recorded), key=lambda entry: int(entry["time_created_ns"])
        )
        calls = [_collective(entry, members, frames) for entry in entries]
        is_complete = not any(  # no record was overwritten
            trace_entries and trace_entries[0]["record_id"] for trace_entries in recorded
        )
    except (KeyError, IndexError, TypeError, ValueError):  # another version of the format
        calls, is_complete = [], False
    are_known = bool(calls) or any(trace.get("pg_config") for trace in traces)

    newest = {call["group"]: call for call in calls if not call["between_two"]}
    main = threading.main_thread().ident or 0
    for label, group in groups.items():
        last, entered = newest.get(label), group.entered
        if are_known:
            entered = last["number"] if last else 0 if is_complete or entered == 0 else None
        thread = last["thread"] if last and last["thread"] in frames else main
        location = thread_location(frames.get(thread))
        groups[label] = Group(group.ranks, entered, location, thread, group.timeout)

    old = [c for c in calls[:-count] if c["pending"] or c is newest.get(c["group"])]
    return old + calls[-count:], groups


def _read_recorders(locations: bool) -> list[dict[str, Any]]:
    """Return the contents of torch's flight recorders: gloo's, NCCL's, and other backends'.

    Other backends are addressed by name. The most important is nccl2, which torch 2.15 uses for
    "nccl". An earlier torch refuses the name. Private API: torch has no public one for Python.
    """
    names: set[str] = set()
    for group in list(c10d._world.pg_map):
        for device in group._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):
                names.add(group._get_backend(device).name())
    by_name = [("_dump_fr_trace", {"backend": name}) for name in sorted(names - {"gloo"})]
    traces = []
    for function, options in (("_dump_fr_trace", {}), ("_dump_nccl_trace", {}), *by_name):
        dump = getattr(torch._C._distributed_c10d, function, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):
                with _device_of_rank(), _without_inductor():
                    traces.append(pickle.loads(dump(True, locations, False, **options)))
    return traces


def _label(group: dist.ProcessGroup, ranks: str) -> str:
    """Return "" for the group of all ranks, else a label that no other group has.

    The subgroups of a mesh have the same name.
    """
    if group is dist.group.WORLD:
        return ""
    name, description = str(group.group_name), group.group_desc
    words = [name] if description in ("", "undefined") else [name, description]
    return f"{', '.join(words)} (ranks {ranks})"


def _blocks(thread: int, frames: dict[int, FrameType]) -> bool:
    """Whether a thread that has started a collective waits for it, as far as frames show that.

    It waits in a function of torch, or in wait() of the Work of an asynchronous collective.
    With a GPU, any line may wait for the collectives before it.
    """
    frame = frames.get(thread)  # None: a thread of autograd, which has no frames
    if frame is None or getattr(c10d.GroupMember.WORLD, "bound_device_id", None) is not None:
        return True
    return frame.f_code.co_filename.startswith(_TORCH) or _calls_wait(frame)


def _calls_wait(frame: FrameType) -> bool:
    """Whether a frame calls a wait() that is not a Python function; that would have a frame."""
    lines = dis.findlinestarts(frame.f_code)
    start = min((offset for offset, line in lines if line == frame.f_lineno), default=0)
    return any(
        instruction.argval == "wait" and start <= instruction.offset < frame.f_lasti
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR")
    )


def _device_of_rank() -> contextlib.AbstractContextManager[object]:
    """Make this rank's GPU current in this thread: torch queries it for ended collectives.

    In a new thread GPU 0 is current, and each rank would take hundreds of megabytes there:
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
    """Return the last collectives of this rank, one on each line."""
    lines = [
        f"{call['number']:>8} {call['operation']} of {call['sizes']}, "
        f"group {call['group'] or '0'}, "
        f"{'NOT ENDED' if call['pending'] else 'ended'}, at {call['location']}\n"
        for call in read_collectives(2000, locations=True)[0]
    ]
    if not lines:
        return (
            f"This torch ({torch.__version__}) has not recorded the collectives. This rank has "
            f"entered {total_collectives()}.\n"
        )
    return "The last collectives, oldest first:\n\n" + "".join(lines)


def _collective(
    entry: dict[str, Any],
    members: dict[str, tuple[str, list[int]]],
    frames: dict[int, FrameType],
) -> Collective:
    places = ((f["filename"], f["line"], f["name"]) for f in entry.get("frames") or ())
    name = str(entry["process_group"][0])
    group, ranks = members.get(name, (name, []))
    thread = int(entry.get("thread_id") or 0)
    caller = thread if thread in frames else threading.main_thread().ident or 0  # as in a Group
    pending = not entry.get("retired", False)  # gloo's own "state" stays "scheduled"
    operation = str(entry["profiling_name"]).partition(":")[2]
    peer = re.fullmatch(r"(?:send \d+->|recv \d+<-)(\d+)", operation)  # NCCL: "send 0->1"
    return {
        "group": group,
        # Collectives and transfers between two ranks are counted separately.
        "number": int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]),
        "operation": operation,
        "sizes": str(entry["input_sizes"]),
        "between_two": bool(entry.get("is_p2p")),
        "peer": ranks[int(peer[1])] if peer and int(peer[1]) < len(ranks) else None,
        "location": user_frame(places),
        "thread": caller,
        "pending": pending,
        "blocks": pending and _blocks(thread, frames),
    }
