"""How the parts of the stand-in talk: one request and its answers, each a line of JSON, over a Unix socket.

A socket's path is the same on all hosts, which share their files. Not here: what is said.
"""
from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]


def ask(path: str, request: Message) -> Iterator[Message]:
    """Send a request to the socket at `path` and yield the answers until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            for line in answers:
                yield json.loads(line)


def serve(path: str, answer: Callable[[Message], Iterator[Message]], mode: int = 0o600) -> None:
    """Answer requests for ever, of those who may use a file of this mode.

    `uid` in a request is the asking process's, whatever it says itself.
    """
    import socketserver  # here, because the commands that only ask would start slower

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            if not line:
                return
            request = json.loads(line)
            credentials = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            request["uid"] = int.from_bytes(credentials[4:8], "little")
            try:
                for message in answer(request):
                    self.wfile.write(json.dumps(message).encode() + b"\n")
            except BrokenPipeError:
                pass  # the asking command was killed; what it started goes on

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(path, Handler)
    os.chmod(path, mode)
    server.serve_forever()
