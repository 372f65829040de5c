"""Define NameService: how rank 0 publishes its address before any other rank can reach it."""

from __future__ import annotations

import time
from collections.abc import Callable

SERVICE = "ddpkit"  # the name, or key, under which rank 0 publishes


class NameServiceUnavailable(RuntimeError):
    """This process cannot use the launcher's name service. The message gives the reason."""

    # Whether the MPI library would fail for the same reason, so that it must not be started.
    affects_mpi = False


class NameService:
    """What passes a text from rank 0 to all other ranks of one launch. All times are in seconds."""

    def publish(self, text: str, timeout: float) -> None:
        """On rank 0, publish `text`: below 200 bytes, no white space."""
        raise NotImplementedError

    def look_up(self, timeout: float) -> str | None:
        """On another rank, return the published text; None if there is none within `timeout`."""
        raise NotImplementedError


def poll(query: Callable[[], str | None], timeout: float) -> str | None:
    """Call `query` with growing pauses until it returns a text or `timeout` seconds are over."""
    deadline, pause = time.monotonic() + timeout, 0.005
    while True:
        found = query()
        if found or time.monotonic() + pause > deadline:
            return found or None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
