"""Find the problems that a job would have, before it is submitted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ...job.commands import SchedulerError
from ...job.notation import format_walltime, parse_size
from ..cli.missing_files import closest, no_such_file, no_such_program
from .job_spec import Job
from .scheduler import Queue, Status

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # every host has its own
# Disks that login nodes do not have:
NODE_ONLY = ("/mnt/bb", "/local", "/lscratch", "/localscratch", "/scratch_local")
MIN_FREE_BYTES = 1 << 30  # free space at home for logs and caches of one job


def check_queue(job: Job, queues: Sequence[Queue], kind: str) -> list[str]:
    """Return what the queues do not allow; [] if no queue is known.

    kind: what the scheduler calls a queue, "partition" or "queue".
    """
    if not queues:
        return []
    names = job.queue.split(",") if job.queue else []
    known = [queue.name for queue in queues]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = closest(unknown[0], known)
        hint = f"Did you mean {near}? " if near else ""
        return [f"queue: there is no {kind} {unknown[0]}. {hint}Take one of: {', '.join(known)}."]

    if names:
        chosen = [queue for queue in queues if queue.name in names]
    else:
        chosen = [queue for queue in queues if queue.is_default] or list(queues)
    first = f"{kind} {chosen[0].name}"
    problems = []
    if not any(queue.is_open for queue in chosen):
        is_open = [queue.name for queue in queues if queue.is_open]
        remedy = f"Take one of: {', '.join(is_open)}." if is_open else f"No other {kind} does."
        problems.append(f"queue: {first} takes no jobs now. {remedy}")
    requested = {
        "walltime": job.walltime,
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "cores_per_rank": job.cores_per_rank and job.ranks * job.cores_per_rank,
        "memory": parse_size(job.memory or ""),
    }
    for attribute, (field, text) in _MAXIMA.items():
        limits, value = [getattr(queue, attribute) for queue in chosen], requested[field]
        if value is not None and None not in limits and value > max(limits):
            text = text.format(first=first, kind=kind, job=job)
            shown = [_show(field, number) for number in (value, max(limits))]
            problems.append(f"{field}: {shown[0]} is more than the {shown[1]} {text}.")
    min_nodes = min(queue.min_nodes for queue in chosen)
    if job.nodes < min_nodes:
        problems.append(
            f"nodes: {job.nodes} is less than the minimum of {first}, {min_nodes}. Request more "
            f"nodes, or take another {kind}."
        )
    return problems


_MAXIMA = {  # limit of a queue -> field that may exceed it, text after the two numbers
    "max_walltime_seconds": (
        "walltime",
        "of {first}. Request less time and continue from a checkpoint, or take another {kind}",
    ),
    "max_nodes": ("nodes", "nodes of {first}. Request fewer nodes"),
    "gpus_per_node": (
        "gpus_per_node",
        "GPUs of the largest node. Request fewer GPUs per node and more nodes",
    ),
    "cores_per_node": (
        "cores_per_rank",
        "cores of the largest node. {job.ranks} ranks per node have {job.cores_per_rank} cores "
        "each; request fewer",
    ),
    "memory_per_node_bytes": ("memory", "of the largest node. Request less"),
}


def _show(field: str, value: float) -> str:
    if field == "memory":
        return f"{value / (1 << 30):.0f}G"
    return format_walltime(int(value)) if field == "walltime" else f"{value:g}"


def check_dependency(job: Job, status: Callable[[str], Status]) -> list[str]:
    """Return the jobs of an afterok dependency that can no longer succeed.

    PBS starts a job whose predecessor was deleted before it was submitted.
    """
    problems = []
    for job_ids in re.findall(r"afterok((?::[^:,?]+)+)", job.dependency or ""):
        for job_id in job_ids.strip(":").split(":"):
            try:
                before = status(job_id)
            except SchedulerError:
                continue
            if before.state != "completed" and (before.ended or before.state == "unknown"):
                reason = f" ({before.reason})" if before.reason else ""
                problems.append(
                    f"dependency: job {job_id} has to succeed first; its state is "
                    f"{before.state.replace('_', ' ')}{reason}. Submit that job again first, or "
                    "leave the dependency out."
                )
    return problems


def check_paths(job: Job, folder: str | os.PathLike[str] = ".") -> list[str]:
    """Return problems: files that are missing or that compute nodes cannot see, a full home.

    folder: the submit directory, from which relative paths start.
    """
    base = Path(folder).resolve()
    problems = []
    if _node_local_root(base):
        problems.append(
            f"The submit folder {base} exists on this host only. Submit from a folder that all "
            "hosts share, such as your home or project folder."
        )
    problems += _check_command(job, base)
    if job.launch.container and "://" not in job.launch.container:
        problems += _check_file("container", job.launch.container, base, must_exist=True)
    if job.output:
        parent = base / os.path.expanduser(job.output.rpartition("/")[0])
        if not parent.is_dir() and "%" not in str(parent):
            problems.append(
                f"output: the folder {parent} does not exist, and the log would be lost. Make it: "
                f"mkdir -p '{parent}'"
            )
    return problems + _check_home()


def _check_command(job: Job, base: Path) -> list[str]:
    problems = []
    first = job.command[0]
    may_bring_programs = job.launch.container or job.modules or job.setup
    if "/" in first or first.endswith((".py", ".sh")):
        problems += _check_file("command", first, base, must_exist=True)
    elif first != "-m" and not may_bring_programs:
        problems += _check_program(first, base)

    if job.launch.container:  # an image has folders of its own
        return problems
    for word in job.command[1:]:
        value = word.partition("=")[2] if word.startswith("-") else word
        is_path = value.startswith("/") or ("/" in value and (base / value).exists())
        if is_path:
            problems += _check_file("command", value, base, must_exist=False)
    return problems


def _check_program(name: str, base: Path) -> list[str]:
    if os.path.basename(name).startswith("python") or shutil.which(name):
        return []
    if (base / name).is_file():
        return [f"command: {name} is a file in {base}, but not a program on PATH. Write ./{name}."]
    return [f"command: {no_such_program(name, str(base)).rstrip('.')}."]


def _check_file(field: str, name: str, base: Path, *, must_exist: bool) -> list[str]:
    path = base / os.path.expanduser(name)
    if not path.exists():
        on_nodes = any(path.is_relative_to(root) for root in (*NODE_LOCAL, *NODE_ONLY))
        job_may_make_it = not path.is_absolute() or path.parent.exists() or on_nodes
        if job_may_make_it and not must_exist:
            return []
        return [f"{field}: {no_such_file(name, folder=str(base)).rstrip('.')}."]

    root = _node_local_root(path.resolve())
    job_fills_it = not must_exist and _is_empty_folder(path)
    if root is None or _node_local_root(base) or job_fills_it:
        return []
    return [
        f"{field}: {name} exists on this host only; each compute node has its own {root}. Copy it "
        "to a folder that all hosts share, such as your home."
    ]


def _is_empty_folder(path: Path) -> bool:
    """Whether a job may fill the folder, such as a cache on each node's disk."""
    try:
        return str(path) in NODE_LOCAL or (path.is_dir() and not any(path.iterdir()))
    except OSError:
        return False


def _node_local_root(path: Path) -> str | None:
    return next((root for root in NODE_LOCAL if path.is_relative_to(root)), None)


def _check_home() -> list[str]:
    home = os.path.expanduser("~")
    try:
        free = shutil.disk_usage(home).free
    except OSError:
        return []
    if free >= MIN_FREE_BYTES:
        return []
    return [
        f"Your home {home} has {free / (1 << 20):.0f} MB free. Logs, caches and checkpoints need "
        "more. Remove files there, or move caches (XDG_CACHE_HOME, HF_HOME) to another folder."
    ]
