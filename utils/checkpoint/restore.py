"""Compare a checkpoint with the state that it is to restore, then restore it in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .entries import (
    MAPPINGS,
    Path,
    PerRank,
    StateError,
    Tree,
    check_module,
    check_optimizer,
    check_tensor,
    is_sharded,
    match_names,
    plain_key,
    show_path,
    state_of,
    unwrap,
    walk,
)
from .optimizers import (
    ParameterNames,
    changed_schedule,
    changed_settings,
    find_mismatch,
    load_optimizer,
)
from .pack import Unpacker, holds_objects, kind_of, tag_of

_SHOWN_KEYS = 5
_KINDS: dict[str, tuple[type, ...]] = {
    "the truth value": (bool,),
    "the number": (int, float, complex),
    "the text": (str,),
    "the bytes": (bytes,),
    "the list": (list,),
    "the tuple": (tuple,),
    "the dictionary": (dict,),
}


class Restorer:
    """Compares a checkpoint with a state without changing it; restore() then changes it.

    own: the trees of this rank's PerRank parts; None if another number of ranks saved them.
    Raises StateError for a checkpoint that no state matches. `mismatches` lists entries that only
    the state has, or only the checkpoint.
    """

    def __init__(
        self, state: Any, tree: Tree, tensors: Mapping[str, Tensor], own: dict[str, Tree] | None
    ) -> None:
        self.mismatches: list[str] = []
        self.changes: list[str] = []  # settings whose saved value replaces another one
        self._own = own
        self._actions: list[tuple[Path, Callable[[], object]]] = []
        self._by_memory: dict[tuple[object, ...], tuple[Path, Tensor]] = {}
        self._saved = Unpacker(tensors)
        self._names = ParameterNames(state)
        self._schedulers = [value for _, value in walk(state) if isinstance(value, LRScheduler)]
        self._state = state
        self._result = self._match(state, tree, ())

    def restore(self) -> Any:
        """Restore the state in place, and return it as _put() does."""
        for path, action in self._actions:
            try:
                action()
            except Exception as error:
                raise StateError(
                    f"{show_path(path)}: it could not be restored, and the entries before it are "
                    f"restored already: {type(error).__name__}: {error}"
                ) from error
        return _put(self._state, self._result)

    def _match(self, state: Any, tree: Tree, path: Path) -> Any:
        """Compare an entry, note how to restore it, and return its value after the restore."""
        tag, inner = tag_of(tree), unwrap(state)
        if isinstance(state, PerRank):
            return self._match_per_rank(state, tree, path)
        if tag == "per rank":
            return self._mismatch(path, "was saved as PerRank; expected PerRank in the state")
        if isinstance(state, Tensor):
            return self._match_tensor(state, tree, path)
        if hasattr(inner, "load_state_dict"):
            if tag != "object":
                what = f"is a {type(inner).__name__}, but was saved as {kind_of(tree)}"
                return self._mismatch(path, what)
            self._match_object(inner, tree, path)
            return state
        if holds_objects(tree) or _holds_objects(state):
            return self._match_container(state, tree, path)
        value = self._saved.value(tree, path)
        self.changes += _changed_types(state, value, path)
        return value

    def _match_per_rank(self, state: PerRank, tree: Tree, path: Path) -> Any:
        if tag_of(tree) != "per rank":
            return self._mismatch(path, "is PerRank, but was saved as common to all ranks")
        if self._own is None:
            return self._mismatch(
                path,
                "is PerRank and was saved under another number of ranks. Resume with that number, "
                "or leave it out of the state",
            )
        place = tree["per rank"]
        if place not in self._own:
            return self._mismatch(path, "is PerRank, but the checkpoint lacks this rank's part")
        return PerRank(self._match(state.value, self._own[place], path))

    def _match_container(self, state: Any, tree: Tree, path: Path) -> Any:
        """Compare a container that holds objects; all its keys have to match."""
        tag = tag_of(tree)
        if isinstance(state, dict) and tag in MAPPINGS:
            saved = dict(self._saved.pairs(tree, path))
            needed = {  # the state may lack PerRank parts
                key: item
                for key, item in saved.items()
                if key in state or tag_of(item) != "per rank"
            }
            self._compare_keys(path, state, needed)
            # In the order of the file, so that messages and actions keep that order.
            found = {
                key: self._match(state[key], item, (*path, key))
                for key, item in saved.items()
                if key in state
            }
            return type(state)((key, found[key]) for key in state if key in found)

        content = tree if type(tree) is list else tree["tuple"] if tag == "tuple" else None
        if isinstance(state, list | tuple) and content is not None:
            if len(content) != len(state):
                what = f"has {len(state)} items, but was saved with {len(content)}"
                return self._mismatch(path, what)
            return type(state)(
                self._match(value, item, (*path, index))
                for index, (value, item) in enumerate(zip(state, content, strict=True))
            )
        what = f"is a {type(state).__name__}, but was saved as {kind_of(tree)}"
        return self._mismatch(path, what)

    # --- tensors

    def _match_tensor(self, state: Tensor, tree: Tree, path: Path) -> Tensor:
        if tag_of(tree) != "tensor":
            self._mismatch(path, f"is a tensor, but was saved as {kind_of(tree)}")
            return state
        saved = self._saved.value(tree, path)
        self._compare_tensors(state, saved, path)

        def copy() -> None:
            with torch.no_grad():
                state.copy_(saved)

        self._actions.append((path, copy))
        return state

    def _compare_tensors(self, state: Tensor, saved: Tensor, path: Path) -> None:
        """Note why saved values cannot be copied into a tensor of the state, or would not stay."""
        check_tensor(state, path)
        if _type_and_shape(state) != _type_and_shape(saved):
            self._mismatch(
                path, f"is {_type_and_shape(state)}, but was saved as {_type_and_shape(saved)}"
            )
        elif state.numel() and not is_sharded(state):
            memory = (
                state.data_ptr(),
                state.device,
                state.stride(),
                state.is_conj(),
                state.is_neg(),
                _type_and_shape(state),
            )
            other, first = self._by_memory.setdefault(memory, (path, saved))
            if first is not saved and not _same_bits(first, saved):
                self._mismatch(
                    path,
                    f"shares its memory with {show_path(other)}, but was saved with different "
                    "values. Are weights tied that were not tied when they were saved?",
                )

    # --- objects

    def _match_object(self, state: Any, tree: dict[str, Tree], path: Path) -> None:
        check_optimizer(state, path)
        is_optimizer = isinstance(state, torch.optim.Optimizer)
        if is_optimizer or isinstance(state, LRScheduler):
            name = type(state).__name__
            if tree["object"] != name:
                self._mismatch(path, f"is a {name}, but was saved as {kind_of(tree)}")
                return

        if isinstance(state, torch.nn.Module):
            saved = self._match_module(state, tree, path)
        else:
            saved = self._saved.value(tree["state"], path)
        if isinstance(state, LRScheduler):
            self.changes += changed_schedule(state, saved, show_path(path))
        if not is_optimizer:
            self._actions.append((path, lambda: state.load_state_dict(saved)))
            return
        if mismatch := find_mismatch(state, self._names, tree["parameters"]):
            self._mismatch(path, mismatch)
        else:
            self.changes += changed_settings(state, saved, show_path(path), self._schedulers)
        self._actions.append((path, lambda: load_optimizer(state, saved)))

    def _match_module(self, module: torch.nn.Module, tree: dict[str, Tree], path: Path) -> Any:
        """Compare a module; return the state_dict() to load into it."""
        check_module(module, path)
        own: dict[str, Any] = state_of(module, path)
        if tag_of(tree["state"]) not in MAPPINGS:
            what = f"is a {type(module).__name__}, but was saved as {kind_of(tree)} without entries"
            return self._mismatch(path, what)
        keys = {plain_key(key): key for key in own}
        trees = dict(self._saved.pairs(tree["state"], path))
        for name, saved_name in match_names(keys, trees).items():
            trees[name] = trees.pop(saved_name)
        self._compare_keys(path, keys, trees)
        saved: Any = type(own)()
        # _metadata holds the version of each module's class.
        saved._metadata = getattr(own, "_metadata", {})
        for plain, key in keys.items():
            if plain in trees:
                saved[key] = self._match_module_entry(key, own[key], trees[plain], (*path, plain))
        return saved

    def _match_module_entry(self, key: str, value: Any, tree: Tree, path: Path) -> Any:
        """Compare an entry of a module's state_dict(); return the value to load."""
        # load_state_dict() copies tensors, but keeps an extra state as it is.
        if not isinstance(value, Tensor) or key.endswith("_extra_state"):
            return self._saved.value(tree, path)
        saved = self._saved.value(tree, path)
        if isinstance(saved, Tensor):
            self._compare_tensors(value, saved, path)
        else:
            self._mismatch(path, f"is a tensor, but was saved as {kind_of(tree)}")
        return saved

    # --- mismatches

    def _compare_keys(self, path: Path, state: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
        for what, keys in (
            ("the checkpoint lacks", [key for key in state if key not in saved]),
            ("only the checkpoint has", [key for key in saved if key not in state]),
        ):
            if keys:
                shown = ", ".join(map(repr, keys[:_SHOWN_KEYS]))
                more = len(keys) - _SHOWN_KEYS
                suffix = f" and {more} more" if more > 0 else ""
                self.mismatches.append(f"{show_path(path, 'state')}: {what} {shown}{suffix}")

    def _mismatch(self, path: Path, text: str) -> None:
        self.mismatches.append(f"{show_path(path)} {text}")


def _holds_objects(state: Any) -> bool:
    """Return whether anything in a state, at any depth, is restored in place."""
    return any(
        isinstance(value, Tensor | PerRank) or hasattr(unwrap(value), "load_state_dict")
        for _, value in walk(state)
    )


def _changed_types(state: Any, saved: Any, path: Path) -> list[str]:
    """Return plain values whose type differs from the saved one: "epoch: text '3', here 3".

    None may become any type. Numbers of all types match: a best loss may begin as infinity.
    """
    if isinstance(state, dict) and isinstance(saved, dict):
        return [
            text
            for key in state
            if key in saved
            for text in _changed_types(state[key], saved[key], (*path, key))
        ]
    kinds = [
        next((name for name, types in _KINDS.items() if isinstance(value, types)), "")
        for value in (saved, state)
    ]
    if "" in kinds or kinds[0] == kinds[1]:
        return []
    return [f"{show_path(path)}: {kinds[0]} {saved!r:.40}, here {kinds[1]} {state!r:.40}"]


def _put(state: Any, restored: Any) -> Any:
    """Put restored data into the containers and numpy arrays of the state.

    Returns the result. Dicts, lists and arrays of the same shape and type keep their identity.
    Values that cannot change in place, such as numbers, strings and arrays of another shape, are
    replaced in their container.
    """
    if restored is state or type(restored) is not type(state):
        return restored
    if isinstance(state, dict):
        items = {
            key: _put(state[key], value) if key in state else value
            for key, value in restored.items()
        }
        state.clear()
        state.update(items)
        return state
    if type(state) is list:
        if len(state) == len(restored):
            restored = [_put(*pair) for pair in zip(state, restored, strict=True)]
        state[:] = restored
        return state
    if isinstance(state, PerRank):
        return PerRank(_put(state.value, restored.value))

    numpy = sys.modules.get("numpy")
    if numpy is not None and type(state) is numpy.ndarray:
        same = state.shape == restored.shape and state.dtype == restored.dtype
        if same and state.flags.writeable:
            state[...] = restored
            return state
    return restored


def _same_bits(a: Tensor, b: Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*raw)


def _type_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
