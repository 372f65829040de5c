"""Messages between the parts of the stand-in: a request and its responses as JSON lines over a Unix socket.

A socket's path is the same on all hosts, which share their files.
"""
from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]


def send_request(path: str, request: Message) -> Iterator[Message]:
    """Send a request to the socket at `path` and yield the responses until the server closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as responses:
            for line in responses:
                yield json.loads(line)


def serve(path: str, response: Callable[[Message], Iterator[Message]], mode: int = 0o600) -> None:
    """Respond to requests without end, from users who may use a file of this mode.

    `uid` in a request is the asking process's, whatever the request contains.
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
                for message in response(request):
                    self.wfile.write(json.dumps(message).encode() + b"\n")
            except BrokenPipeError:
                pass  # the asking command was killed; what it started goes on

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(path, Handler)
    os.chmod(path, mode)
    server.serve_forever()
