"""The program that srun or an mpiexec starts as each rank.

It joins the launch, sets the rank's variables and becomes the user's program by exec(), so that the
process tree, open descriptors (PMI_FD), GPU masks and signals are those of the native launcher.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ...channel import Channel, Message
from ...host import process
from ...launch_error import LaunchError
from ...launch_report import VARIABLE, parse_address
from ...launchers.detect import detect
from . import proc_reader
from .child_processes import HANDLER_SECONDS, HELD, LAUNCH_VARIABLE
from .host_ranks import report_mask, shares_of_ranks
from .host_readiness import ReservedPort, problem_with
from .launch_connection import CONNECT_SECONDS, connect
from .nested import LONGEST_SECONDS, GroupWatch
from .parents import Parents
from .rank_environment import correct_slurm_variables
from .rank_output import open_file

_ANSWER_SECONDS = 1e6  # ddpkit launch ends the launch before, or the connection is lost


def main(arguments: Sequence[str]) -> int:
    """Join, then become the program; return an exit status where that is not possible.

    arguments: working folder, script to compare (or ""), its checksum (or ""), folder for the
    output (or ""), and the words of the program.
    """
    folder, script, checksum, output_dir, *program = arguments
    addresses, launch_port, secret = parse_address(os.environ.get(VARIABLE, ""))
    reached = connect(addresses, launch_port, secret, "rank")
    if reached is None:
        where = os.environ.get(VARIABLE, "").rpartition("/")[0] or "no address"
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
        "process": (os.getpid(), process.start_time(os.getpid()), process.namespace("pid")),
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
    if report["rank"] != 0:  # Intel's mpiexec lets it wait for an input that never comes
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if output is not None:
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and not every program does
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        status = 127 if isinstance(error, FileNotFoundError) else 126  # as a shell does
        return _fail(
            f"{program[0]} could not be started: {error.strerror}. Expected a program, or a script "
            "whose name ends in .py",
            status,
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
    """Return this host's name, and what distinguishes it from another host of that name."""
    return [socket.gethostname(), process.boot_id(), process.namespace("net")]


def _join(peer: Channel, report: Message) -> Message | None:
    """Report this rank and wait for its variables; None where the launch has failed."""
    peer.send(report, CONNECT_SECONDS)
    response = peer.receive_one(_ANSWER_SECONDS)
    if response and response.get("processes"):
        launch_id = response["variables"][LAUNCH_VARIABLE].rpartition("/")[2]
        _report_on_ranks(peer, launch_id, response)
    peer.close()
    return response if response and "variables" in response else None


def _all_await(pids: Iterable[int], number: int) -> bool:
    return all(proc_reader.awaits_signal(pid, number) for pid in pids)


def _report_on_ranks(peer: Channel, launch_id: str, response: Message) -> None:
    """Start a process that reports to ddpkit launch on the ranks of this host.

    It reports their groups, which signals of HELD all of them handle, the end of each, and that
    what has started them is gone (slurmstepd, a proxy of an MPI). Ranks that nobody else can end
    any more end with the launch.

    It is no child of this process, which becomes the user's program, and holds nothing but the
    connection. It ends with it, or with the ranks. Return at once.
    """
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        for number in HELD:  # Slurm signals all processes of a step
            signal.signal(number, signal.SIG_IGN)
        if os.fork():
            return
        os.closerange(0, peer.fileno())
        os.closerange(peer.fileno() + 1, 65536)
        ranks, namespace = response["processes"], process.namespace("pid")
        parents = Parents(pid for pid, _, there in ranks if there == namespace)
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(peer, select.POLLIN)
        watched = dict[int, int]()  # by descriptor
        for pid in [*(pid for pid, _, _ in ranks), *parents.pids]:
            with suppress(OSError, AttributeError):  # Linux before 5.3, macOS
                watched[os.pidfd_open(pid)] = pid
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        watch = GroupWatch(launch_id, response["watched_ranks"])
        started, handled = time.monotonic(), list[int]()
        # What is in another namespace is not seen from here.
        hidden = any(there != namespace for _, _, there in ranks)
        while (seen := [pid for pid, t, _ in ranks if process.start_time(pid) == t]) or hidden:
            if lost := parents.lost():
                peer.send({"kind": "orphaned", "parent": lost}, CONNECT_SECONDS)
            for message in watch.messages(time.monotonic()):
                peer.send(message, CONNECT_SECONDS)
            seconds = watch.next_look or LONGEST_SECONDS
            before, handled = handled, [int(number) for number in HELD if _all_await(seen, number)]
            if handled != before:
                peer.send({"kind": "handled", "signals": handled}, CONNECT_SECONDS)
            if len(handled) < len(HELD):  # a program without handlers is looked at less and less
                seconds = min(seconds, max(HANDLER_SECONDS, (time.monotonic() - started) / 20))
            for ready, _ in poll.poll(1000 * seconds):
                if ready == peer.fileno():
                    parents.end_orphans()
                    return
                poll.unregister(ready)
                peer.send({"kind": "ended", "pid": watched[ready]}, CONNECT_SECONDS)
        if watch.ended_without_group():
            peer.send({"kind": "copies", "running": False}, CONNECT_SECONDS)
        peer.send({"kind": "done"}, CONNECT_SECONDS)
    finally:
        os._exit(0)


def _fail(text: str, status: int = 1) -> int:
    print(f"ddpkit launch: error: on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
    return status
