"""Let one rank alone print a traceback that others have, too, before there is a process group.

A rank asks before it prints. The first rank with a traceback prints it, and reports that. The
others get their answer only then: no traceback is lost if the first rank is killed while it prints.
A rank without an answer after a second prints its own (early_failure.py).
"""

from __future__ import annotations

from ...channel import Channel
from ...ranges import name_ranks


class Tracebacks:
    """The tracebacks of a launch, by their digests.

    is_shared: whether the ranks print into one stream; if not, each prints its own.
    """

    def __init__(self) -> None:
        self.is_shared = True
        self._first: dict[str, int] = {}  # digest -> rank that prints
        self._printed: set[str] = set()
        self._waiting: dict[str, list[Channel]] = {}
        self._unprinted: dict[str, list[int]] = {}  # digest -> ranks that left it to the first one

    def ask(self, peer: Channel, digest: str, rank: int) -> None:
        """Answer a rank whether its traceback is printed already, once that is known."""
        if not self.is_shared or digest not in self._first:
            self._first.setdefault(digest, rank)
            _answer(peer, is_printed=False)
        elif digest in self._printed:
            _answer(peer, is_printed=True)
        else:
            self._waiting.setdefault(digest, []).append(peer)

    def ended(self, digest: str, rank: int, *, has_printed: bool) -> None:
        """Note that a rank has printed its traceback, or has left it to the first one."""
        if not has_printed:
            self._unprinted.setdefault(digest, []).append(rank)
            return
        self._printed.add(digest)
        for peer in self._waiting.pop(digest, []):
            _answer(peer, is_printed=True)

    def lines(self) -> list[str]:
        """Return a line for each traceback that some ranks have left to another one."""
        found = []
        for digest, ranks in self._unprinted.items():
            others = f"{len(ranks)} other rank{'s' * (len(ranks) > 1)}"
            found.append(
                f"{others} reported the same error as rank {self._first[digest]}: "
                f"{name_ranks(ranks)}"
            )
        return found


def _answer(peer: Channel, *, is_printed: bool) -> None:
    peer.send({"kind": "traceback", "is_printed": is_printed})
