"""The program that srun or mpiexec starts as each rank: it joins the launch, sets the rank's variables and becomes the
user's program by exec(), so that process tree, open descriptors (PMI_FD), GPU masks and signals are the launcher's.
"""
from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from .. import held_signals
from ..launchers import LaunchError, Placement, detect
from .files import problem_with
from .output import open_file
from .ports import ReservedPort
from .report import VARIABLE, parse
from .wire import Wire, connect


def main(arguments: Sequence[str]) -> int:
    """Join, then become the program; returns an exit status where that is not possible.

    arguments: working folder, script to compare (or ""), its checksum (or ""), folder for the output (or ""), and the
    words of the program.
    """
    folder, script, checksum, output_dir, *program = arguments
    reached = connect(*parse(os.environ.get(VARIABLE, ""))[:2])
    if reached is None:
        return _fail(f"launch.py cannot be reached at {os.environ.get(VARIABLE, '').rpartition('/')[0] or 'no address'}"
                     ". Expected a network between the hosts of a job, and its environment on each: check both")
    wire, address = reached
    port: ReservedPort | None = None
    output: int | None = None
    report: dict[str, object] = {"token": parse(os.environ[VARIABLE])[2], "reached": address, "host": host_id()}
    try:
        placement = detect()
        if placement.rank == 0:
            port = ReservedPort()
        report |= _report(placement, port)
        report["problem"] = problem_with(folder, script, int(checksum) if checksum else None)
        if output_dir and not report["problem"]:
            output = _open_output(output_dir, placement.rank)
    except (LaunchError, OSError) as error:
        report["problem"] = str(error)
    variables = _join(wire, report)
    if variables is None:  # launch.py says why
        return 1
    if port is not None:
        port.keep_over_exec()
    os.environ.update(variables)
    if output is not None:
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
    if held_signals.handles_stops(program):
        held_signals.block()
        os.environ[held_signals.VARIABLE] = "1"
        for number in held_signals.take():  # caught since the import of this package
            os.kill(os.getpid(), number)  # blocked, it stays pending for the program
    else:
        held_signals.release()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and not every program does
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        status = 127 if isinstance(error, FileNotFoundError) else 126
        return _fail(f"{program[0]} could not be started: {error.strerror}. Expected a program, or a script whose name "
                     "ends in .py", status)


def _report(placement: Placement, port: ReservedPort | None) -> dict[str, object]:
    return {"rank": placement.rank, "world_size": placement.world_size, "local_rank": placement.local_rank,
            **({"port": port.port} if port is not None else {})}


def _open_output(folder: str, rank: int) -> int:
    """Open the file for the output of a rank. Raises LaunchError where it cannot be written."""
    try:
        return open_file(folder, rank)
    except OSError as error:
        raise LaunchError(f"the output folder {folder} cannot be written ({error.strerror}). Expected a folder in "
                          "which this user may create files. Choose another --output-dir") from error


def host_id() -> list[str]:
    """This host's name, and what tells it from another host of the same name."""
    found = [socket.gethostname()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        found.append(file.read().strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/net"))
    return found


def _join(wire: Wire, report: Mapping[str, object]) -> dict[str, str] | None:
    """Send this rank's report and wait until launch.py knows all ranks; None where the launch has failed."""
    wire.send({"join": dict(report)})
    while not wire.closed:
        select.select([wire], [wire] if wire.unsent else [], [])
        wire.flush()
        for message in wire.receive():
            if isinstance(message.get("variables"), dict):
                wire.close()
                return dict(message["variables"])
            return None
    return None


def _fail(text: str, status: int = 1) -> int:
    print(f"launch.py: on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
    return status
