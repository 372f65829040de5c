"""The partitions of a Slurm cluster, their limits, and the accounts that a user may charge."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence

from ...job.commands import SchedulerError, run_command
from ...job.slurm_output import SEPARATOR, Fields, gpu_count, records, table
from ...job.units import parse_duration, parse_number
from .job_spec import Job
from .scheduler import Queue

_TIMEOUT_SECONDS = 10.0  # of each query; a user waits for the submission
_COLUMNS = {  # column: sinfo's format
    "partition": "%P",
    "availability": "%a",
    "time_limit": "%l",
    "nodes": "%D",
    "cores": "%c",
    "megabytes": "%m",
    "gres": "%G",
}


def query_partitions() -> list[Queue]:
    """Query the partitions; none where sinfo does not respond."""
    query = ["sinfo", "--all", "--exact", "--noheader", "--format"]
    try:
        output = run_command(
            [*query, SEPARATOR.join(_COLUMNS.values())], timeout_seconds=_TIMEOUT_SECONDS
        )
    except SchedulerError:
        return []

    rows_by_name: dict[str, list[Fields]] = {}
    for row in table(output, list(_COLUMNS)):
        rows_by_name.setdefault(row["partition"].removesuffix("*"), []).append(row)
    limits = _query_limits()
    return [_partition(name, rows, limits.get(name, {})) for name, rows in rows_by_name.items()]


def _query_limits() -> dict[str, Fields]:
    try:
        output = run_command(
            ["scontrol", "--all", "show", "partition"], timeout_seconds=_TIMEOUT_SECONDS
        )
    except SchedulerError:
        return {}
    return {record.get("PartitionName", ""): record for record in records(output)}


def _partition(name: str, rows: Sequence[Fields], limits: Fields) -> Queue:
    """A partition from sinfo's rows, one for each kind of node, and scontrol's limits.

    The limits read MaxNodes=4 MinNodes=2 MaxCPUsPerNode=UNLIMITED MaxMemPerNode=4000 (megabytes).
    """

    def numbers(column: str) -> list[int]:
        return [parse_number(row[column]) or 0 for row in rows]

    def limited(value: int, limit_name: str) -> int:
        limit = parse_number(limits.get(limit_name, ""))
        return min(value, limit) if limit else value

    return Queue(
        name,
        is_default=any(row["partition"].endswith("*") for row in rows),
        is_open=any(row["availability"] == "up" for row in rows),
        max_walltime_seconds=parse_duration(rows[0]["time_limit"]),
        min_nodes=parse_number(limits.get("MinNodes", "")) or 1,
        max_nodes=limited(sum(numbers("nodes")), "MaxNodes"),
        cores_per_node=limited(max(numbers("cores")), "MaxCPUsPerNode"),
        gpus_per_node=max(gpu_count(row["gres"]) for row in rows),
        memory_per_node_bytes=limited(max(numbers("megabytes")), "MaxMemPerNode") << 20,
    )


def check_account(job: Job) -> list[str]:
    """Return a problem where Slurm enforces accounts and the user may not charge the job's."""
    try:
        config = run_command(["scontrol", "show", "config"], timeout_seconds=_TIMEOUT_SECONDS)
        enforced = re.search(r"^AccountingStorageEnforce\s*=\s*(.*)$", config, re.MULTILINE)
        if enforced is None or not re.search("associations|limits|safe|qos", enforced[1]):
            return []
        user = getpass.getuser()
        accounts = sorted(set(_show("associations", f"user={user}", "format=Account")))
        default = _show("user", user, "format=DefaultAccount")
    except (SchedulerError, OSError, KeyError):
        return []

    if job.account is None and default:
        return []
    known = [account.lower() for account in accounts]  # Slurm ignores case
    if not accounts or (job.account or "").lower() in known:
        return []
    return [
        f"account: {job.account or 'none'} is given, and Slurm requires one of your accounts. "
        f"Take one of: {', '.join(accounts)}."
    ]


def _show(*words: str) -> list[str]:
    query = ["sacctmgr", "--noheader", "--parsable2", "show", *words]
    return run_command(query, timeout_seconds=_TIMEOUT_SECONDS).split()
