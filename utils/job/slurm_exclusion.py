"""Let a pending Slurm job avoid hosts, through its ExcNodeList.

`scontrol update` changes ExcNodeList only for a pending job, even for its owner (_update_job() in
job_mgr.c of 22.05 and 25.11). A requeued job is pending at once, and keeps the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from .commands import run_command
from .notation import parse_number, same_host
from .slurm_job import expand_hostlist, records

_TIMEOUT_SECONDS = 10.0  # seconds per query; a job or a user waits


def exclude_hosts(job_id: str, hosts: Sequence[str], dry_run: bool = False) -> str:
    """Let a pending job avoid more hosts; return why that is not possible, or "".

    Raises SchedulerError.
    """
    output = run_command(["scontrol", "show", "job", job_id], timeout_seconds=_TIMEOUT_SECONDS)
    [job, *_] = records(output) or [{}]
    node_list = job.get("ExcNodeList", "").replace("(null)", "")
    names, total = nodes_of(hosts, job.get("Partition", ""))
    try:
        excluded = expand_hostlist(node_list) if node_list else []
    except ValueError:  # a format of a later Slurm
        excluded = []
    new = [name for name in names if name not in excluded]
    if not new:
        return ""
    requested = parse_number(job.get("NumNodes", "").partition("-")[0]) or 1  # "2", "2-4"
    problem = too_few([*excluded, *new], total, requested)
    if not problem and not dry_run:
        value = ",".join([*([node_list] if node_list else []), *new])
        run_command(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={value}"])
    return problem


def nodes_of(hosts: Sequence[str], partition: str) -> tuple[list[str], int]:
    """Return the names of these hosts' nodes, and the number of all nodes.

    A node's name may differ from its host's.
    """
    query = ["sinfo", "--noheader", "--Node", "--format", "%N %n"]
    if partition:
        query.append(f"--partition={partition}")
    output = run_command(query, timeout_seconds=_TIMEOUT_SECONDS)
    nodes = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    found = [
        node
        for node, names in nodes.items()
        if any(same_host(host, name) for host in hosts for name in names)
    ]
    return found, len(nodes)


def too_few(excluded: Sequence[str], total: int, requested: int) -> str:
    if total - len(excluded) >= requested:
        return ""
    return (
        f"without {', '.join(excluded)}, {total - len(excluded)} of the {total} nodes of the "
        f"partition remain, and the job requests {requested}"
    )
