"""Ranges of numbers as text: CPUs in the kernel's format, and ranks in a message."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def parse_ranges(text: str) -> set[int]:
    """Return the numbers of a list in the kernel's format: "0-2,8" -> {0, 1, 2, 8}.

    Raises ValueError for other text.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


_SHOWN_RANGES = 20  # ranges of ranks in a message


def name_ranks(ranks: Collection[int]) -> str:
    """Return ranks for a message: [5] -> "rank 5", [1, 2, 3, 7] -> "ranks 1-3,7"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks, most=_SHOWN_RANGES)}"


def format_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """Return the list of numbers in the kernel's format: {0, 1, 2, 8} -> "0-2,8".

    most: number of ranges to write; " ..." stands for the rest. None: all.
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = (str(first) if first == last else f"{first}-{last}" for first, last in parts[:most])
    return ",".join(shown) + (" ..." if most is not None and len(parts) > most else "")
