"""The program that srun or an mpiexec starts as each rank.

It joins the launch, sets the rank's variables and starts the user's program. The program inherits
the native launcher's descriptors (PMI_FD) and GPU masks, and receives its signals. See
rank_parent.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from ...channel import Channel, Message
from ...errors import LaunchError
from ...host import process
from ...launch_protocol import REPORT, parse_address
from ...launchers.detect import detect
from ..staging import IN_MEMORY
from . import rank_parent
from .child_processes import LAUNCH_VARIABLE
from .host_ranks import report_mask, shares_of_ranks
from .host_readiness import ReservedPort, problem_with
from .launch_connection import CONNECT_SECONDS, connect
from .nested import GroupWatch
from .rank_environment import correct_slurm_variables
from .rank_output import open_file

_ANSWER_SECONDS = 1e6  # no limit: ddpkit launch ends the launch, or the connection is lost


def main(arguments: Sequence[str]) -> int:
    """Join, then start the program and wait for it; return a status where that is not possible.

    arguments: working folder, script to compare (or ""), its checksum (or ""), folder for the
    output (or ""), and the words of the program.
    """
    folder, script, checksum, output_dir, *program = arguments
    addresses, launch_port, secret = parse_address(os.environ.get(REPORT, ""))
    reached = connect(addresses, launch_port, secret, "rank")
    if reached is None:
        where = os.environ.get(REPORT, "").rpartition("/")[0] or "no address"
        return _fail(
            f"the launch cannot be reached at {where}. Expected a network between the hosts of a "
            "job, and its environment on each. Check both"
        )
    peer, address = reached
    port: ReservedPort | None = None
    output: int | None = None
    report: Message = {
        "kind": "join",
        "reached": address,
        "host": host_id(),
        "rank": None,
        "world_size": None,
        "local_rank": None,
        "port": 0,
        "cores": None,
        "problem": "",
    }
    launcher = ""
    try:
        placement = detect()
        launcher = placement.launcher
        report["rank"] = placement.rank
        report["world_size"] = placement.world_size
        report["local_rank"] = placement.local_rank
        report["cores"] = report_mask(os.environ)
        if placement.rank == 0:
            port = ReservedPort()
            report["port"] = port.port
        report["problem"] = problem_with(folder, script, int(checksum) if checksum else None)
        if output_dir and not report["problem"]:
            output = _open_output(output_dir, placement.rank)
    except (LaunchError, OSError) as error:
        report["problem"] = str(error)

    response = _join(peer, report)
    if response is None:  # ddpkit launch prints the reason
        return 1
    os.environ.update(response["variables"])
    if os.environ.get("SLURM_JOB_ID") and launcher != "slurm":
        correct_slurm_variables(os.environ, response["num_hosts"])
    try:
        local_rank = int(response["variables"]["LOCAL_RANK"])
        share = shares_of_ranks(response["cores"], os.environ)[local_rank]
    except LaunchError as error:
        return _fail(str(error))
    if share.cpus:
        with suppress(OSError):  # without the binding, the program is slower, not wrong
            os.sched_setaffinity(0, share.cpus)
    os.environ.update(share.variables)
    if port is not None:
        port.keep_over_exec()
    if report["rank"] != 0:  # under Intel's mpiexec, a read would never return
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if output is not None:
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
    pid = rank_parent.start(partial(_execute, program))
    launch_id = os.environ[LAUNCH_VARIABLE].rpartition("/")[2]
    watch = GroupWatch(launch_id, response["watched_ranks"])
    # What PALS signals is not known; a stop that reaches a rank twice does no harm.
    rank = rank_parent.RankParent(pid, peer, watch, forwards=launcher == "pals")
    rank.run()
    if os.environ.get(IN_MEMORY):
        from ..staging.node_copy import remove_from_memory  # slow to load, and seldom needed

        remove_from_memory(os.environ)
    rank_parent.end_like(rank.status or 0)


def _execute(program: list[str]) -> NoReturn:
    """Become the program of the rank."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and not every program does
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        status = 127 if isinstance(error, FileNotFoundError) else 126  # as a shell does
        os._exit(
            _fail(
                f"{program[0]} could not be started: {error.strerror}. Expected a program, or a "
                "script whose name ends in .py",
                status,
            )
        )


def _open_output(folder: str, rank: int) -> int:
    """Open the file for the output of a rank. Raise LaunchError where it cannot be written."""
    try:
        return open_file(folder, rank)
    except OSError as error:
        raise LaunchError(
            f"the output folder {folder} cannot be written ({error.strerror}). Expected a folder "
            "in which this user may create files. Choose another --output-dir"
        ) from error


def host_id() -> list[str]:
    """Return this host's name, boot id and network namespace: names may repeat."""
    return [socket.gethostname(), process.boot_id(), process.namespace("net")]


def _join(peer: Channel, report: Message) -> Message | None:
    """Report this rank and wait for its variables; None where the launch has failed."""
    peer.send(report, CONNECT_SECONDS)
    response = peer.receive_one(_ANSWER_SECONDS)
    return response if response and "variables" in response else None


def _fail(text: str, status: int = 1) -> int:
    print(f"ddpkit launch: error: on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
    return status
