"""What every rank tells at the start, and how rank 0 judges it: versions, devices, hosts, cores. No torch.

Not here: how the cards travel (rendezvous.py).
"""
from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

from .launchers import Placement

Card = dict[str, Any]
_SHOWN_HOSTS = 16


def card(placement: Placement, **more: Any) -> Card:
    """What this rank tells: where it runs and as what.

    `more` is backend, devices (those that it sees, by identity; none for the CPU), mask, torch, kit, gloo, error.
    """
    return {"host": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(), "launcher": placement.launcher,
            "local_rank": placement.local_rank, "local_world_size": placement.local_world_size,
            "cores": f"{sum(1 << core for core in _cores()):x}", "host_cores": os.cpu_count() or 1,
            "omp": os.environ.get("OMP_NUM_THREADS", ""),
            "notes": list(placement.notes), **more}


def _cores() -> Iterable[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _boot_id() -> str:
    """Tells hosts apart that have one name, such as containers all called localhost."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def judge(cards: list[Card]) -> tuple[str | None, list[dict[str, Any]]]:
    """Check the cards of all ranks, in rank order: what is wrong, if anything, and the reply for each rank.

    A reply holds node_rank, num_nodes, local_rank, local_world_size, threads and device, the index of the rank's own
    among its visible devices or None for the CPU; rank 0's also table and notes.
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(cards):
        hosts.setdefault((one["host"], one["boot"]), []).append(rank)
    wrong = _differences(cards) or _loopback(cards, len(hosts))
    if wrong:
        return wrong, []
    replies: list[dict[str, Any]] = [{} for _ in cards]
    for node_rank, ranks in enumerate(hosts.values()):
        told = all(cards[rank]["local_rank"] is not None and cards[rank]["local_world_size"] for rank in ranks)
        # Several agents of torchrun on one host give the same local ranks twice.
        several_agents = told and len({cards[rank]["local_rank"] for rank in ranks}) < len(ranks)
        told = told and not several_agents
        for local_rank, rank in enumerate(ranks):
            replies[rank] = {
                "node_rank": node_rank, "num_nodes": len(hosts), "threads": 1,
                # One source for all ranks of a host: what the launcher says, or the order of ranks.
                "local_rank": cards[rank]["local_rank"] if told else local_rank,
                "local_world_size": cards[rank]["local_world_size"] if told else len(ranks)}
        wrong = _give_devices(cards, ranks, replies, by_agent=several_agents)
        if wrong:
            return wrong, []
        for rank, threads in zip(ranks, _threads([cards[rank]["cores"] for rank in ranks]), strict=True):
            replies[rank]["threads"] = threads
    replies[0]["table"] = _table(cards, list(hosts.values()), replies)
    replies[0]["notes"] = list(_notes(cards, hosts.values()))
    return None, replies


def _differences(cards: list[Card]) -> str | None:
    for what in ("torch", "kit", "launcher", "backend"):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(cards):
            by_value.setdefault(str(one.get(what)), []).append(rank)
        if len(by_value) > 1:
            rows = "\n".join(f"  {value}: {len(ranks)} ranks, the first is rank {ranks[0]} on {cards[ranks[0]]['host']}"
                             for value, ranks in by_value.items())
            return (f"the ranks differ in {what}; expected the same everywhere:\n{rows}\n"
                    "Use one environment on all hosts, and start all ranks by one launch")
    return None


def _give_devices(cards: list[Card], ranks: list[int], replies: list[dict[str, Any]], *,
                  by_agent: bool) -> str | None:
    """Give each rank of a host its device among those that it sees: what is wrong, if two would share one.

    One visible device: that one. At least as many as ranks on this host: the one of the local rank. Otherwise the
    mask and the number of ranks contradict each other. by_agent: several agents share the host and may have a mask
    each, so that only ranks which see the same devices are counted together.
    """
    holders: dict[str, list[int]] = {}
    alike: dict[tuple[str, ...], list[int]] = {}  # ranks that see the same devices
    for rank in ranks:
        alike.setdefault(tuple(cards[rank].get("devices") or []), []).append(rank)
    for rank in ranks:
        seen, reply = cards[rank].get("devices") or [], replies[rank]
        reply["device"] = None
        if not seen:
            continue
        local_rank, size, host = reply["local_rank"], reply["local_world_size"], cards[rank]["host"]
        if by_agent:
            local_rank, size = alike[tuple(seen)].index(rank), len(alike[tuple(seen)])
        if 1 < len(seen) < size:
            return (f"rank {rank} (local rank {local_rank}) on {host} sees {len(seen)} GPUs for {size} ranks "
                    f"({cards[rank]['mask']}); expected one GPU, or one for each rank of the host. Start at most "
                    f"{len(seen)} ranks per host, ask for more GPUs, or let the launcher give each rank its own")
        reply["device"] = 0 if len(seen) == 1 else local_rank
        holders.setdefault(seen[reply["device"]], []).append(rank)
    if any(len(held) > 1 for held in holders.values()):
        rows = "\n".join(f"  rank {rank} (local rank {replies[rank]['local_rank']}): index {replies[rank]['device']} = "
                         f"{cards[rank]['devices'][replies[rank]['device']]}, {cards[rank]['mask']}" for rank in ranks)
        return (f"several ranks on {cards[ranks[0]]['host']} hold one GPU; expected a GPU for each rank:\n{rows}\n"
                "Start at most one rank per GPU, or let the launcher give each its own GPU (srun --gpus-per-task=1)")
    return None


def _loopback(cards: list[Card], hosts: int) -> str | None:
    if hosts > 1:
        for rank, one in enumerate(cards):
            if one.get("gloo_loopback"):
                return (f"rank {rank} on {one['host']} has GLOO_SOCKET_IFNAME={one['gloo']}, the loopback interface, "
                        f"but the ranks run on {hosts} hosts. Unset it, or name the interface that connects the hosts")
    return None


def _threads(masks: list[str]) -> list[int]:
    """Threads for each rank of a host: its cores, each divided among the ranks that may run on it."""
    cores = [[core for core in range(int(mask, 16).bit_length()) if int(mask, 16) >> core & 1] for mask in set(masks)]
    by_mask = dict(zip(set(masks), cores, strict=True))
    load: dict[int, int] = {}
    for mask in masks:
        for core in by_mask[mask]:
            load[core] = load.get(core, 0) + 1
    share = {mask: max(1, int(sum(1 / load[core] for core in by_mask[mask]) + 1e-9)) for mask in by_mask}
    return [share[mask] for mask in masks]


def _notes(cards: list[Card], hosts: Iterable[list[int]]) -> Iterable[str]:
    told: dict[str, int] = {}
    for one in cards:
        for note in one["notes"]:
            told[note] = told.get(note, 0) + 1
    # Ranks word one finding differently, each with its own number: three examples are enough.
    for note, count in list(told.items())[:3]:
        yield note if count == 1 else f"{note} ({count} ranks)"
    if len(told) > 3:
        yield f"... and {len(told) - 3} more notes of this kind"
    for ranks in hosts:
        masks = {int(cards[rank]["cores"], 16) for rank in ranks}
        union = 0
        for mask in masks:
            union |= mask
        if len(ranks) > 1 and union.bit_count() == 1 and cards[ranks[0]]["host_cores"] > 1:
            yield (f"all {len(ranks)} ranks of {cards[ranks[0]]['host']} may run on core {union.bit_length() - 1} "
                   f"only, of {cards[ranks[0]]['host_cores']}: start with --bind-to none (Open MPI), --cpu-bind none "
                   "(PALS) or --cpus-per-task (srun)")
            return


def _table(cards: list[Card], hosts: list[list[int]], replies: list[dict[str, Any]]) -> str:
    """One row a host: ranks, devices, cores and threads."""
    rows = [("host", "ranks", "device", "cores/rank", "threads")]
    for ranks in hosts[:_SHOWN_HOSTS]:
        devices = dict.fromkeys(_device(cards[rank]["backend"], replies[rank]["device"]) for rank in ranks)
        cores = dict.fromkeys(str(int(cards[rank]["cores"], 16).bit_count()) for rank in ranks)
        threads = dict.fromkeys(cards[rank].get("omp") or str(replies[rank]["threads"]) for rank in ranks)
        rows.append((cards[ranks[0]]["host"], ranges(ranks), ",".join(devices), ",".join(cores), ",".join(threads)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in rows]
    if len(hosts) > _SHOWN_HOSTS:
        lines.append(f"  ... and {len(hosts) - _SHOWN_HOSTS} more hosts")
    return "\n".join(lines)


def _device(backend: str, index: int | None) -> str:
    return "cpu" if index is None else f"{'xpu' if backend == 'xccl' else 'cuda'}:{index}"


def ranges(ranks: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3,7", at most 20 parts."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in parts[:20]]
    return ",".join(shown) + (" ..." if len(parts) > 20 else "")
