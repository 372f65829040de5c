"""A launch that listens to its ranks in a thread, for tests of what they report."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from utils.channel import Loop
from utils.tools.launch.launch_connection import LaunchServer, RankNotices


@contextmanager
def served() -> Iterator[RankNotices]:
    ended = threading.Event()
    with RankNotices(4) as notices, closing(Loop()) as loop, closing(LaunchServer(notices, loop)):
        def serve() -> None:
            while not ended.is_set():
                loop.run_once(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield notices
        finally:
            ended.set()
            thread.join()
