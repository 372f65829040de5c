"""A Python that has imported torch once, and forks for each command: `python` in the tests of the guide.

python warm_python.py FOLDER     write the command FOLDER/python, and serve it until this process is killed

A script then starts in a tenth of a second; importing torch takes three. The ranks of a launcher get the real Python.
"""
from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

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
    while True:
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        words = receive(connection)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            connection.sendall(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())
            os._exit(0)
        connection.close()
        server.close()
        return words


def run(words: list[str]) -> None:
    """Run what follows `python` on a command line."""
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
