"""The entries of a state: their names, their kinds, and which of them cannot be saved."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Path = tuple[object, ...]  # keys that lead to an entry of the state
Tree = Any  # a JSON value: plain data as itself, other values as {tag: content}

MAX_DEPTH = 100  # levels of nesting; a deeper state probably contains itself
ATOMS = (bool, float, type(None))  # plain data that is copied without a check

MAPPINGS: dict[str, type[Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex128 complex64 complex32 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
# Types of tensors that can be saved. An older torch has no float8_e8m0fnu.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}


class StateError(ValueError):
    """A state cannot be saved, or a checkpoint cannot be restored. The message names the entry."""


@dataclass(frozen=True)
class PerRank:
    """Marks a part of the state that differs between ranks: each rank saves and restores its own.

    value: nested like any other part of the state.
    """

    value: Any


# --- names

# Parts that torch's wrappers add to parameter names; no user's model has them.
_WRAPPER_PARTS = frozenset(
    (
        "_orig_mod",  # torch.compile
        "_checkpoint_wrapped_module",  # checkpoint_wrapper(): activation checkpointing
        "_fsdp_wrapped_module",  # FSDP1; only in checkpoints of other programs
    )
)
# DistributedDataParallel and DataParallel inside a model add it; models have such parts, too.
_DDP_PART = "module"


def show_path(path: Path, empty: str = "the state") -> str:
    """Return the name of an entry in messages and files: "model/linear.weight"."""
    return "/".join(map(str, path)) or empty


def plain_key(key: str) -> str:
    """Return a parameter's name without the parts that only torch's wrappers add."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPER_PARTS)


def match_names(names: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Return name -> saved name where the two differ only by parts that wrappers add.

    A name on both sides matches itself, even with a part "module".
    """
    by_bare_name: dict[str, list[str]] = {}
    for name in set(saved) - set(names):
        by_bare_name.setdefault(_bare_name(name), []).append(name)
    missing = [name for name in names if name not in saved]
    counts = collections.Counter(map(_bare_name, missing))
    found = {name: name for name in names if name in saved}
    for name in missing:
        candidates = by_bare_name.get(_bare_name(name), [])
        if len(candidates) == counts[_bare_name(name)] == 1:
            found[name] = candidates[0]
    return found


def _bare_name(name: str) -> str:
    path, slash, key = name.rpartition("/")
    parts = [part for part in plain_key(key).split(".") if part != _DDP_PART]
    return path + slash + ".".join(parts)


# --- kinds


def unwrap(value: Any) -> Any:
    """Return the model inside DistributedDataParallel and torch.compile, in either order."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(value, torch.nn.Module) and isinstance(
            getattr(value, "_orig_mod", None), torch.nn.Module
        ):
            value = value._orig_mod
        else:
            return value


def is_stateful(value: Any) -> bool:
    """Return whether a value has state_dict() and load_state_dict()."""
    return (
        not isinstance(value, type)
        and hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides belong to a permuted contiguous tensor."""
    dimensions = sorted(
        (stride, length) for stride, length in zip(strides, shape, strict=True) if length != 1
    )
    expected = 1
    for stride, length in dimensions:
        if stride != expected:
            return False
        expected *= length
    return True


def walk(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all entries of a state except numbers and strings, at any depth.

    Raises StateError for too deep nesting.
    """
    check_depth(path)
    yield path, state

    items: Iterator[tuple[Any, Any]]
    if isinstance(state, dict):
        items = iter(state.items())
    elif isinstance(state, PerRank):
        items = iter([("own", state.value)])
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return
    for key, item in items:
        if type(item) not in (*ATOMS, int, str):
            yield from walk(item, (*path, key))


# --- state_dict()


def state_of(value: Any, path: Path) -> Any:
    """Return an object's state_dict(). Its errors become StateError."""
    try:
        return value.state_dict()
    except Exception as error:
        raise StateError(
            f"{show_path(path)}: state_dict() of this {type(value).__name__} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


# --- what cannot be saved

_TYPES = (*ATOMS, int, complex, str, bytes, list, tuple, PerRank, *MAPPINGS.values())
_NUMPY_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
).split()

_SHARD_FULLY = "Use fully_shard() (FSDP2), whose DTensors are saved in slices"


def check_depth(path: Path) -> None:
    """Raise StateError for an entry that is nested too deep."""
    if len(path) > MAX_DEPTH:
        raise StateError(
            f"{show_path(path[:8])}/... is nested more than {MAX_DEPTH} levels deep; expected "
            "fewer. Does it contain itself?"
        )


def check_tensor(value: Tensor, path: Path) -> None:
    """Raise StateError for a tensor that cannot be saved or restored."""
    if torch.nn.parameter.is_lazy(value):
        raise StateError(
            f"{show_path(path)} belongs to a lazy module that is not initialised; expected "
            "one with a shape. Run one batch through the model first"
        )
    _check_whole_tensor(value, path)
    if value.is_meta:
        raise StateError(
            f"{show_path(path)} is on the meta device and has no values. Give the model memory "
            "with to_empty(device=...), initialise its values, and then save or load it"
        )

    dimensions = zip(value.shape, value.stride(), strict=True) if _is_strided(value) else ()
    if value.numel() and any(stride == 0 and length > 1 for length, stride in dimensions):
        raise StateError(
            f"{show_path(path)} is an expanded tensor, into which nothing can be restored; "
            "expected one with memory for every element. Give it a clone()"
        )

    dtype = str(value.dtype).removeprefix("torch.")
    special = not _is_strided(value) or value.is_quantized
    plain = type(value) in (Tensor, torch.nn.Parameter) or is_sharded(value)
    if special or dtype not in DTYPES or not plain:
        kind = "quantised " if value.is_quantized else "nested " if value.is_nested else ""
        raise StateError(
            f"{show_path(path)} is a {kind}{type(value).__name__} of {dtype} and layout "
            f"{value.layout} on {value.device}; expected an ordinary dense tensor. Convert it"
        )


def check_module(module: torch.nn.Module, path: Path) -> None:
    """Raise StateError for a sharded or lazy module, before its state_dict() is called."""
    _check_whole_module(module, path)
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            check_tensor(tensor, (*path, name))


def check_optimizer(value: Any, path: Path) -> None:
    """Raise StateError for an optimizer whose state is sharded. Other objects pass."""
    if type(value).__name__ == "ZeroRedundancyOptimizer":
        raise StateError(
            f"{show_path(path)} is a ZeroRedundancyOptimizer, whose state is sharded over the "
            "ranks; expected an optimizer that is whole on every rank. Put PerRank(zero.optim) in "
            "its place, which resumes on the same number of ranks"
        )
    if isinstance(value, torch.optim.Optimizer):
        for number, group in enumerate(value.param_groups):
            for index, parameter in enumerate(group["params"]):
                place = (*path, "param_groups", number, "params", index)
                _check_whole_tensor(parameter, place)


def check_type(value: Any, path: Path) -> None:
    """Raise StateError for a value whose type a state cannot hold."""
    if type(value) in _TYPES or isinstance(value, Tensor) or is_stateful(unwrap(value)):
        return
    numpy = sys.modules.get("numpy")
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        if value.dtype.name in _NUMPY_NAMES and value.dtype.isnative:
            return
        found = f"a numpy value of type {value.dtype}"
    else:
        found = f"of type {type(value).__module__}.{type(value).__qualname__}"
    raise StateError(
        f"{show_path(path)} is {found}; expected None, numbers, strings, bytes, lists, tuples, "
        "dicts, OrderedDicts, Counters, tensors, numpy arrays of numbers, and objects with "
        "state_dict() and load_state_dict(). Convert it, as with str(), list(), vars() or a "
        "generator's get_state(); or give its class these two methods; or leave it out"
    )


def check_state(state: Any) -> None:
    """Raise StateError for a state that cannot be saved, without calling any state_dict()."""
    for path, value in walk(state):
        inner = unwrap(value)
        check_type(value, path)
        if isinstance(inner, Tensor):
            check_tensor(inner, path)
        elif isinstance(inner, torch.nn.Module):
            check_module(inner, path)
        check_optimizer(inner, path)


def _check_whole_tensor(value: Tensor, path: Path) -> None:
    if type(value).__module__.startswith("torch.distributed") and not is_sharded(value):
        raise StateError(
            f"{show_path(path)} is a {type(value).__name__}; expected a tensor that is whole on "
            f"every rank, or a DTensor. {_SHARD_FULLY}"
        )


def _check_whole_module(module: torch.nn.Module, path: Path) -> None:
    for name, part in module.named_modules():
        # Compare the name: importing torch.distributed.fsdp would take longer than a small load.
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(part).__mro__):
            raise StateError(
                f"{show_path((*path, name) if name else path)} is sharded over the ranks by FSDP1; "
                f"expected a module that is whole on every rank, or FSDP2. {_SHARD_FULLY}"
            )
    for name, parameter in module.named_parameters():
        _check_whole_tensor(parameter, (*path, name))


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor. Does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_strided(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested
