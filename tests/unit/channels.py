"""Two ends of a channel in one process."""
from __future__ import annotations

import socket
import time

from utils.channel import Channel, Secret

KEY = Secret(b"the secret of the launch", "launch 1")
HELLO = {"role": "rank", "index": 1, "size": 2, "instance": "0" * 16}


def opened_pair() -> tuple[Channel, Channel]:
    """Both ends of a connection, which have proved themselves: the server's first."""
    ours, theirs = socket.socketpair()
    server, peer = Channel(ours, KEY), Channel(theirs, KEY, HELLO)
    for end in (server, peer, server):
        assert end.wait_for_input(time.monotonic() + 20)
    return server, peer
