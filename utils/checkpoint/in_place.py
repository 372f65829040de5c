"""Put restored values into the tensors, containers and arrays of a state."""

from __future__ import annotations

import collections
import sys
from typing import Any

import torch
from torch import Tensor

from .entries import Path, PerRank, check_tensor, overlaps_itself, show_path


class TensorTargets:
    """Checks which saved values can be copied into the tensors of a state, and stay there."""

    def __init__(self) -> None:
        self._by_memory: dict[tuple[object, ...], tuple[Path, Tensor]] = {}

    def find_mismatch(self, state: Tensor, saved: Tensor, path: Path) -> str:
        """Return why `saved` cannot be copied into `state`; "" if it can.

        Raises StateError for a tensor that cannot be restored at all.
        """
        check_tensor(state, path)
        if _type_and_shape(state) != _type_and_shape(saved):
            return f"is {_type_and_shape(state)}, but was saved as {_type_and_shape(saved)}"
        if overlaps_itself(state) and not _same_bits(_narrow(state, saved).expand_as(saved), saved):
            return "is an expanded tensor, but was saved with different values. Give it a clone()"
        if not state.numel():
            return ""

        memory = (
            state.data_ptr(),
            state.device,
            state.stride(),
            state.is_conj(),
            state.is_neg(),
            _type_and_shape(state),
        )
        other, first = self._by_memory.setdefault(memory, (path, saved))
        if first is saved or _same_bits(first, saved):
            return ""
        return (
            f"shares its memory with {show_path(other)}, but was saved with different values. "
            "Are weights tied that were not tied when they were saved?"
        )


def copy_into(state: Tensor, saved: Tensor) -> None:
    """Copy saved values into a tensor of the same type and shape, expanded or not."""
    with torch.no_grad():
        _narrow(state, state).copy_(_narrow(state, saved))


def put(state: Any, restored: Any) -> Any:
    """Put restored data into the containers and numpy arrays of the state.

    Returns what now stands in its place. Dicts, lists, deques and arrays of the same shape and
    type keep their identity. What cannot change, such as numbers, strings and arrays of another
    shape, is replaced in the container that holds it.
    """
    if restored is state or type(restored) is not type(state):
        return restored
    if isinstance(state, dict):
        items = {
            key: put(state[key], value) if key in state else value
            for key, value in restored.items()
        }
        state.clear()
        state.update(items)
        return state
    if type(state) in (list, collections.deque):
        values = list(restored)
        if len(state) == len(values):
            values = [put(*pair) for pair in zip(state, values, strict=True)]
        state.clear()
        state.extend(values)
        return state
    if isinstance(state, PerRank):
        return PerRank(put(state.value, restored.value))

    numpy = sys.modules.get("numpy")
    if numpy is not None and type(state) is numpy.ndarray:
        same = state.shape == restored.shape and state.dtype == restored.dtype
        if same and state.flags.writeable:
            state[...] = restored
            return state
    return restored


def _narrow(like: Tensor, tensor: Tensor) -> Tensor:
    """Return the part of `tensor` for which an expanded tensor `like` has memory."""
    for dimension, (length, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _same_bits(a: Tensor, b: Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*raw)


def _type_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
