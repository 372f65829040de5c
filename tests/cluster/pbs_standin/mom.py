"""The stand-in's process on each execution host: it starts tasks and reports how they end.

Run on the host as `python mom.py SOCKET`.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from tests.cluster.pbs_standin.messages import Message, serve


def opened(path: str, request: Message) -> int:
    """The job's output, created with its owner and umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666 & ~int(request["umask"]))
    os.fchown(descriptor, request["owner"][0], request["owner"][1])
    return descriptor


def start(request: Message) -> Iterator[Message]:
    """Start a task in a session of its own; yields its process id, then its status (256+N when signal N ended it)."""
    streams = []
    try:
        for path in (request["stdout"], request["stderr"]):
            streams.append(opened(path, request))
    except OSError as error:
        yield {"status": -3, "error": str(error)}
        return
    uid, gid = request["owner"]
    text = request.get("stdin")
    try:
        task = subprocess.Popen(
            request["command"], executable=request.get("executable"), env=request["environment"], cwd=request["cwd"],
            stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL, stdout=streams[0], stderr=streams[1],
            start_new_session=True, user=uid, group=gid, extra_groups=[], umask=int(request["umask"]))
    except OSError as error:
        if request["missing"] is not None:
            os.write(streams[1], request["missing"].format(program=request["command"][0], reason=error.strerror)
                     .encode("latin-1"))
        yield {"status": 254}
        return
    finally:
        for descriptor in streams:
            os.close(descriptor)
    if task.stdin is not None and text is not None:
        task.stdin.write(text.encode())
        task.stdin.close()
    yield {"pid": task.pid}
    code = task.wait()
    yield {"status": code if code >= 0 else 256 - code}


if __name__ == "__main__":
    os.environ.clear()
    serve(sys.argv[1], start)
