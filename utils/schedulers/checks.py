"""What would go wrong with a job, found before it is submitted. Every problem names the field and says how to mend it.

Not here: how the queues are asked for (slurm_jobs.py, pbs_jobs.py).
"""
from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .command import SchedulerError
from .job import Job, format_walltime, memory_bytes
from .scheduler import Status

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # each host has its own
NODE_ONLY = ("/mnt/bb", "/local", "/lscratch", "/localscratch", "/scratch_local")  # disks that login nodes do not have
LEAST_FREE = 1 << 30  # bytes in the home: logs and caches of one job


@dataclass(frozen=True)
class Queue:
    """A partition of Slurm or a queue of PBS. None: the scheduler does not say, or there is no limit."""

    name: str
    is_default: bool = False
    is_open: bool = True
    walltime: float | None = None  # seconds
    nodes: int | None = None
    cores: int | None = None  # of its largest node, as the next two
    gpus: int | None = None
    memory: int | None = None  # bytes
    least_nodes: int = 1  # that a job may have


def check_queue(job: Job, queues: Sequence[Queue], word: str) -> list[str]:
    """What the queues do not allow. word: "partition" or "queue". Without queues nothing is known, and no problem."""
    if not queues:
        return []
    names = job.queue.split(",") if job.queue else []
    if unknown := [name for name in names if name not in {queue.name for queue in queues}]:
        near = difflib.get_close_matches(unknown[0], [queue.name for queue in queues], 1)
        return [f"queue: there is no {word} {unknown[0]}. " + (f"Did you mean {near[0]}? " if near else "")
                + f"Take one of: {', '.join(queue.name for queue in queues)}."]
    chosen = [queue for queue in queues if queue.name in names] if names else [
        queue for queue in queues if queue.is_default] or list(queues)
    found = []
    if not any(queue.is_open for queue in chosen):
        found.append(f"queue: {word} {chosen[0].name} takes no jobs now. Take one of: "
                     f"{', '.join(queue.name for queue in queues if queue.is_open) or 'none is open'}.")
    found += _over(job.walltime, [queue.walltime for queue in chosen], "walltime",
                   lambda value: format_walltime(int(value)), f"of {word} {chosen[0].name}", "Ask for less time and "
                   "continue from a checkpoint, or take another " + word)
    found += _over(job.nodes, [queue.nodes for queue in chosen], "nodes", lambda value: f"{value:g}",
                   f"nodes of {word} {chosen[0].name}", "Ask for fewer nodes")
    if job.nodes < (least := min(queue.least_nodes for queue in chosen)):
        found.append(f"nodes: {job.nodes} is less than the {least} that {word} {chosen[0].name} takes. Ask for more "
                     f"nodes, or take another {word}.")
    found += _over(job.gpus_per_node, [queue.gpus for queue in chosen], "gpus_per_node", lambda value: f"{value:g}",
                   "GPUs that the largest node has", "Ask for fewer GPUs per node and more nodes")
    if job.cores_per_rank is not None:
        found += _over(job.ranks * job.cores_per_rank, [queue.cores for queue in chosen], "cores_per_rank",
                       lambda value: f"{value:g}", "cores that the largest node has",
                       f"{job.ranks} ranks on a node have {job.cores_per_rank} cores each; ask for fewer")
    if job.memory is not None:
        found += _over(memory_bytes(job.memory), [queue.memory for queue in chosen], "memory",
                       lambda value: f"{value / (1 << 30):.0f}G", "that the largest node has", "Ask for less")
    return found


def _over(value: float | None, limits: Iterable[float | None], field: str, show: Callable[[float], str],
          what: str, fix: str) -> list[str]:
    known = list(limits)
    if value is None or any(limit is None for limit in known):
        return []
    most = max(limit for limit in known if limit is not None)
    return [f"{field}: {show(value)} is more than the {show(most)} {what}. {fix}."] if value > most else []


def check_dependency(job: Job, status: Callable[[str], Status]) -> list[str]:
    """Whether the jobs that have to succeed first still can: PBS starts a job after one that was deleted before."""
    found = []
    for ids in re.findall(r"afterok((?::[^:,?]+)+)", job.dependency or ""):
        for job_id in ids.strip(":").split(":"):
            try:
                before = status(job_id)
            except SchedulerError:
                continue
            if before.state != "completed" and (before.ended or before.state == "unknown"):
                found.append(f"dependency: job {job_id} has to succeed first, and is {before.state.replace('_', ' ')}"
                             f"{' (' + before.reason + ')' if before.reason else ''}. Submit that one again first, or "
                             "leave the dependency out.")
    return found


def check_paths(job: Job, folder: str | os.PathLike[str] = ".") -> list[str]:
    """Files that are not there, or that the compute nodes cannot see, and a home without space."""
    base = Path(folder).resolve()
    found = []
    if _is_node_local(base):
        found.append(f"The submit folder {base} is on this host alone. Submit from a folder that all hosts share, such "
                     "as your home or project folder.")
    script = _script(job)
    if script:
        found += _check_file("command", script, base, must_exist=True)
    elif job.command and job.command[0] != "-m" and not (job.container or job.modules or job.setup):
        found += _check_program(job.command[0], base)  # none of these may bring it
    for word in job.command[1:] if not job.container else ():  # a container has folders of its own
        value = word.partition("=")[2] if word.startswith("-") else word
        if word != script and (value.startswith("/") or ("/" in value and (base / value).exists())):
            found += _check_file("command", value, base, must_exist=False)
    if job.container and "://" not in job.container:
        found += _check_file("container", job.container, base, must_exist=True)
    if job.output and not (parent := (base / os.path.expanduser(job.output.rpartition("/")[0]))).is_dir() \
            and "%" not in str(parent):
        found.append(f"output: the folder {parent} does not exist, so that the log would be lost. Make it: "
                     f"mkdir -p '{parent}'")
    return found + _check_home()


def _script(job: Job) -> str | None:
    """The word of the command that names a file which has to be there: "train.py" of "python -u train.py"."""
    words = list(job.command)
    if words and os.path.basename(words[0]).startswith("python"):
        rest = [word for word in words[1:] if not word.startswith("-") or word in ("-m", "-c")]
        return rest[0] if rest and rest[0].endswith(".py") else None
    return words[0] if words and ("/" in words[0] or words[0].endswith((".py", ".sh"))) else None


def _check_program(name: str, base: Path) -> list[str]:
    if os.path.basename(name).startswith("python") or shutil.which(name):
        return []
    if (base / name).is_file():
        return [f"command: {name} is a file in {base}, and without a folder a program of PATH is looked for. Write "
                f"./{name}."]
    return [f"command: {name} is neither a file here nor a program on PATH. Give the script or the program to run."]


def _check_file(field: str, name: str, base: Path, *, must_exist: bool) -> list[str]:
    path = base / os.path.expanduser(name)
    on_nodes = any(path.is_relative_to(root) for root in (*NODE_LOCAL, *NODE_ONLY))
    if not path.exists() and (must_exist or (path.is_absolute() and not path.parent.exists() and not on_nodes)):
        return [f"{field}: {name} does not exist (looked for {path}). Correct the path; it is taken from the submit "
                "folder on."]
    local = _is_node_local(path.resolve())
    if not path.exists() or local is None or _is_node_local(base) or not must_exist and _to_be_filled(path):
        return []
    return [f"{field}: {name} is on this host alone, the compute nodes have a {local} of their own. Copy it to a "
            "folder that all hosts share, such as your home."]


def _to_be_filled(path: Path) -> bool:
    """Whether it is a folder that the job will fill, such as a cache on each node's own disk."""
    try:
        return str(path) in NODE_LOCAL or path.is_dir() and not any(path.iterdir())
    except OSError:
        return False


def _is_node_local(path: Path) -> str | None:
    return next((root for root in NODE_LOCAL if path == Path(root) or Path(root) in path.parents), None)


def _check_home() -> list[str]:
    home = os.path.expanduser("~")
    try:
        free = shutil.disk_usage(home).free
    except OSError:
        return []
    if free >= LEAST_FREE:
        return []
    return [f"Your home {home} has {free / (1 << 20):.0f} MB free. Logs, caches and checkpoints need more. Remove "
            "files there, or move caches to another folder (for example XDG_CACHE_HOME, HF_HOME)."]


def parse_size(text: str) -> int | None:
    """Bytes of "24684096kb", "4gb", "512", the sizes of PBS. None for anything else."""
    match = re.fullmatch(r"([0-9]+)([kmgtp]?)b?", text.strip().lower())
    return int(match[1]) << (10 * " kmgtp".index(match[2] or " ")) if match else None
