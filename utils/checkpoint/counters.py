"""Find numbers of a model that change in training but are in no saved state.

For example `self.num_updates` in a module that averages parameters: state_dict() has tensors only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .entries import MAPPINGS, Path, PerRank, Tree, plain_key, show_path, unwrap, walk
from .pack import Packed, tag_of

_COMPARED_SAVES = 2
_INSTALLED = ("site-packages", "dist-packages")  # library authors know what a resume needs
# Words in names of values that the next batch sets again: max_seq_len_cached of rotary embeddings.
_SET_AGAIN = frozenset("batch cache cached last len length loss max min prev previous size".split())
# Words in names of training loop counters, which often equal another counter by chance.
_PROGRESS = frozenset("step steps iter iters iteration iterations epoch epochs".split())
_NUMBER_OF_TORCH = "num_batches_tracked"  # a buffer of BatchNorm; it also counts steps

_NOT_OF_USER = ("torch", __name__.partition(".")[0])  # packages that save their own counters
_Saved = list[tuple[frozenset[str], float]]  # (words of an entry's key, its number)


class UnsavedCounters:
    """The int and float attributes of a state's modules, compared from save to save.

    The first values are recorded after a load or at the first save. The next two saves compare
    their values with the first ones.
    """

    def __init__(self) -> None:
        self._first: WeakKeyDictionary[torch.nn.Module, dict[str, float]] = WeakKeyDictionary()
        self._is_of_user: dict[type, bool] = {}
        self._found: set[str] = set()
        self._saved_steps: set[int] = set()

    def note(self, state: Any) -> None:
        """Record the values after a load."""
        for _, module in self._modules(state):
            self._first[module] = _numbers(module)

    def find(self, state: Any, packed: Packed, step: int) -> list[str]:
        """Return numbers that changed but are not saved, each once: "ema.num_updates (an int ...)".

        packed: the saved form of the state.
        """
        if len(self._saved_steps | {step}) > _COMPARED_SAVES + 1:
            return []
        self._saved_steps.add(step)
        saved: _Saved | None = None
        found = []
        for name, module in self._modules(state):
            numbers = _numbers(module)
            first = self._first.setdefault(module, numbers)
            for attribute, value in numbers.items():
                if value == first.get(attribute, value):
                    continue
                if saved is None:  # computed only when a number has changed
                    saved = [(frozenset({"step"}), step), *_saved_numbers(state, packed)]
                place = f"{name}.{attribute}"
                if place not in self._found and not _is_saved(_words(place), value, saved):
                    self._found.add(place)
                    article = "an int" if type(value) is int else "a float"
                    found.append(f"{place} ({article} attribute)")
        return found

    def _modules(self, state: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of the user's own classes, with their names."""
        for path, value in walk(state):
            root = unwrap(value)
            if not isinstance(root, torch.nn.Module):
                continue
            for key, module in root.named_modules():
                cls = type(module)
                if cls not in self._is_of_user:
                    self._is_of_user[cls] = any(map(_is_of_user, cls.__mro__))
                if self._is_of_user[cls]:
                    name = show_path(path, type(root).__name__)
                    yield f"{name}.{plain_key(key)}".rstrip("."), module


def _is_of_user(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return not set(_INSTALLED).intersection(PurePath(file).parts)


def _numbers(module: torch.nn.Module) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float)
        and value == value  # not NaN
        and not name.startswith("_")
        and not _SET_AGAIN.intersection(_words(name))
    }


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", name.lower()))


def _is_saved(words: frozenset[str], value: float, saved: _Saved) -> bool:
    """Whether an entry has this value, and not only because it counts the same steps."""
    return any(number == value and (words & key or not _PROGRESS & key) for key, number in saved)


def _saved_numbers(state: Any, packed: Packed) -> Iterator[tuple[frozenset[str], float]]:
    """Yield the numbers in the saved state, except counters of torch and the kit."""
    skipped = {
        show_path(path)
        for path, value in walk(state)
        if type(value).__module__.partition(".")[0] in _NOT_OF_USER
        and not isinstance(value, torch.nn.Module | torch.Tensor | PerRank)
    }

    def numbers_in(tree: Tree, path: Path) -> Iterator[tuple[frozenset[str], float]]:
        tag = tag_of(tree)
        if type(tree) in (int, float):
            yield _words(show_path(path)), tree
        elif type(tree) is list:
            for index, item in enumerate(tree):
                yield from numbers_in(item, (*path, index))
        elif tag in MAPPINGS:
            content = tree[tag]
            for key, item in content.items() if type(content) is dict else content:
                yield from numbers_in(item, (*path, key))
        elif tag == "tuple":
            yield from numbers_in(tree[tag], path)
        elif tag == "per rank":
            yield from numbers_in(packed.own[tree[tag]], (*path, "own"))
        elif tag == "object" and show_path(path) not in skipped:
            # If the state is a single module, its class name is a word of the key.
            yield from numbers_in(tree["state"], path or (tree[tag],))
        elif tag == "numpy scalar":
            yield from numbers_in(tree[tag], path)
        elif tag == "tensor" and not tree["shape"] and tree["tensor"] in packed.tensors:
            if not str(path[-1]).endswith(_NUMBER_OF_TORCH):
                yield _words(show_path(path)), packed.tensors[tree["tensor"]].item()

    yield from numbers_in(packed.tree, ())
