"""A Python that has imported torch once, and forks for each command: for tests that look at no start.

python warm_python.py FOLDER     write the command FOLDER/python, and serve it until the starting process ends

A script then starts in a tenth of a second; importing torch takes three, and leaving it half a second. The ranks of MPI
and of schedulers get the real Python.
"""
from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

COMMAND = """\
#!/bin/sh
"exec" "{python}" "-IS" "$0" "$@"  # a path with a blank cannot be in the first line
import json, os, socket, sys
launcher = ("PMI", "OMPI_", "SLURM_", "PBS_", "TORCHELASTIC_")
if len(sys.argv) < 2 or any(name.startswith(launcher) for name in os.environ):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big") + request], [0, 1, 2])
    sys.exit(int(connection.recv(10) or b"1"))
"""


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Nothing looks for garbage in what is imported meanwhile: neither now, nor when a fork ends."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def receive(connection: socket.socket) -> list[str]:
    """Take over streams, folder and environment of the command; return its words."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while len(data) < 4 + int.from_bytes(data[:4], "big"):
        data += connection.recv(1 << 16)
    words, folder, environ = json.loads(data[4:])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    return list(words)


def serve(server: socket.socket) -> list[str]:
    """Fork for each command. Returns in the process that runs one, with its words."""
    parent = os.getppid()
    server.settimeout(5)
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if os.getppid() != parent:
                os._exit(0)
            continue
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        words = receive(connection)
        if child := os.fork():
            wait(child, connection)
        connection.close()
        server.close()
        return words


def wait(child: int, connection: socket.socket) -> NoReturn:
    """Send the exit status of the process that runs a command. If the command is killed, so is that process."""
    ended = os.pidfd_open(child)
    found, _, _ = select.select([ended, connection], [], [])
    if ended not in found:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())
    os._exit(0)


def run(words: list[str]) -> None:
    """Run what follows `python` on a command line."""
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with without_collector():
        import torch
        import torch._dynamo  # the first optimizer imports it
        import torch.distributed
        import torch.utils.data  # noqa: F401

    folder = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        command = folder / "python"
        command.write_text(COMMAND.format(python=sys.executable, address=str(folder / "socket")))
        command.chmod(0o755)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        (folder / "ready").touch()
        words = serve(listener)
    run(words)
