"""What a launcher tells a process: Placement, and reading it from variables. Standard library only, no torch.

Not here: which launcher it was (launchers.py).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping


class LaunchError(RuntimeError):
    """The process cannot start as part of this launch; the message says what was found and what to do."""

    reported_by_rank_0 = False  # whether rank 0 has the same message, so that this rank need not print it


class Placement:
    """This process among the processes of its launch. All of it comes from one launcher.

    Frozen, compared by value. Not a dataclass: that module alone takes longer to import than all of this file.
    """

    __slots__ = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "notes")
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None  # None where the launcher does not say; the exchange after the start fills it in
    local_world_size: int | None
    notes: tuple[str, ...]  # what a person should be told once

    def __init__(self, launcher: str, rank: int, world_size: int, local_rank: int | None,
                 local_world_size: int | None, notes: tuple[str, ...] = ()) -> None:
        values = (launcher, rank, world_size, local_rank, local_world_size, notes)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)
        self._check()

    def replace(self, **changes: object) -> Placement:
        """A copy with other values in the fields named."""
        return Placement(**{**dict(zip(self.__slots__, self._values(), strict=True)), **changes})  # type: ignore[arg-type]

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: a Placement does not change")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"cannot delete {name}: a Placement does not change")

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, Placement) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[object, ...]:
        return Placement, self._values()

    def __repr__(self) -> str:
        values = zip(self.__slots__, self._values(), strict=True)
        return f"Placement({', '.join(f'{name}={value!r}' for name, value in values)})"

    def _check(self) -> None:
        local_size = self.world_size if self.local_world_size is None else self.local_world_size
        for name, value in (("world size", self.world_size), ("local world size", local_size)):
            if value < 1:
                raise LaunchError(f"{self.launcher}: the {name} is {value}; expected at least 1. "
                                  "Unset the variables that were set by hand")
        for name, value, limit, what in (
                ("rank", self.rank, self.world_size - 1, f"less than {self.world_size}"),
                ("local rank", self.local_rank or 0, local_size - 1, f"less than {local_size}"),
                ("local world size", local_size, self.world_size, f"at most {self.world_size}, the world size")):
            if not 0 <= value <= limit:
                raise LaunchError(f"{self.launcher}: the {name} is {value}; expected {what}. The variables contradict "
                                  "each other: unset those that were set by hand")


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The value of a variable as a whole number; None where it is unset or empty."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise LaunchError(f"{name} is {text!r}; expected a whole number of zero or more. "
                          f"Unset it if it was set by hand")
    return int(text)


def is_set(environ: Mapping[str, str], *names: str) -> list[str]:
    """Those of the variables that are set, and not to white space."""
    return [name for name in names if environ.get(name, "").strip()]


def shown(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Those of the variables that are set, for messages: "RANK=3 WORLD_SIZE=4"."""
    return " ".join(f"{name}={environ[name]}" for name in names if is_set(environ, name))
