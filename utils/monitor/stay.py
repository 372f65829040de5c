"""How long a thread has been at the same few lines, from samples: does it poll? No torch."""

from __future__ import annotations

from types import FrameType

from .hang import Stay, thread_location

_MOST_PLACES = 6  # of a loop that polls: it sleeps in one, and looks in the others


class StayWatch:
    """The places of a thread in its last samples, at most six different ones.

    A place is a line of the script, with the function that runs there: an import or a training step
    has many, also where it stays at one line of the script.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # place -> last seen, how often
        self._since = 0.0  # the places seen are all since then

    def add(self, now: float, location: str, running: str) -> None:
        """Take a sample. location: thread_location(). running: the innermost function."""
        place = location, running
        if not self._seen:
            self._since = now
        _, count = self._seen.pop(place, (now, 0))
        self._seen[place] = now, count + 1
        if len(self._seen) > _MOST_PLACES:
            self._since, _ = self._seen.pop(next(iter(self._seen)))  # the one seen least recently

    def stay(self, now: float) -> Stay:
        """Return for how long the thread has been there, and where it was most often."""
        counts: dict[str, int] = {}
        for (location, _), (_, count) in self._seen.items():
            counts[location] = counts.get(location, 0) + count
        if not counts:
            return Stay()
        return Stay(now - self._since, max(counts, key=lambda location: counts[location]))


def sample(frame: FrameType | None) -> tuple[str, str]:
    """Return where a thread is in the script, and the innermost function that it runs."""
    running = f"{frame.f_code.co_filename}:{frame.f_code.co_name}" if frame else ""
    return thread_location(frame), running
