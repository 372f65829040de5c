"""Describe the entries of a state: their names, their kinds, and which of them cannot be saved."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .values import DTYPES, StateError

Path = tuple[object, ...]  # the keys that lead to an entry of the state

MAX_DEPTH = 100  # levels of nesting; a deeper state probably contains itself
ATOMS = (bool, float, type(None))  # plain data that is copied without a look at it

MAPPINGS: dict[str, type[Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
SEQUENCES: dict[str, type[Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
    "deque": collections.deque,
}
# the factories of a defaultdict that a checkpoint can hold
FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls
    for cls in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        list,
        tuple,
        dict,
        set,
        frozenset,
        collections.OrderedDict,
        collections.Counter,
        collections.deque,
    )
}


@dataclass(frozen=True)
class PerRank:
    """Marks a part of the state that differs between ranks: each rank saves and restores its own.

    value: nested as any other part of the state.
    """

    value: Any


# --- names


def show_path(path: Path, empty: str = "the state") -> str:
    """Return the name of an entry in messages and files: "model/linear.weight"."""
    return "/".join(map(_show_key, path)) or empty


def _show_key(key: object) -> str:
    # str() refuses integers of more than 4300 digits.
    return hex(key) if type(key) is int and key.bit_length() > 64 else str(key)


def type_name(value: Any) -> str:
    """Return the module and the name of a value's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def plain_key(key: str) -> str:
    """Return the name of a parameter without what torch.compile adds to it."""
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def factory_name(value: collections.defaultdict[Any, Any]) -> str | None:
    """Return the name of a defaultdict's factory, with "other: " if a file cannot hold it."""
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    return name if FACTORIES.get(name) is factory else f"other: {name}"


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


def is_namedtuple(value: Any) -> bool:
    """Return whether a value is an instance of a namedtuple."""
    cls = type(value)
    return isinstance(value, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass of the user."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | PerRank)


def field_names(value: Any) -> list[str]:
    """Return the names of the fields of a dataclass or of its instance."""
    return [field.name for field in dataclasses.fields(value)]


def overlaps_itself(value: Tensor) -> bool:
    """Return whether some elements of a tensor share memory, as after expand()."""
    if value.layout is not torch.strided or torch.nn.parameter.is_lazy(value):
        return False
    dimensions = zip(value.shape, value.stride(), strict=True)
    return any(stride == 0 and length > 1 for length, stride in dimensions)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether these strides are those of a permuted contiguous tensor."""
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

    Raises StateError for too many levels of nesting.
    """
    check_depth(path)
    yield path, state

    items: Iterator[tuple[Any, Any]]
    if isinstance(state, dict):
        items = iter(state.items())
    elif isinstance(state, PerRank):
        items = iter([("own", state.value)])
    elif is_namedtuple(state):
        items = zip(type(state)._fields, state, strict=True)
    elif isinstance(state, list | tuple | collections.deque):
        items = enumerate(state)
    elif is_dataclass(state) and not is_stateful(state):
        items = ((name, getattr(state, name, None)) for name in field_names(state))
    else:
        return
    for key, item in items:
        if type(item) not in (*ATOMS, int, str):
            yield from walk(item, (*path, key))


# --- state_dict()


def state_of(value: Any, path: Path) -> Any:
    """Return state_dict() of an object. Its errors become StateError."""
    try:
        return value.state_dict()
    except Exception as error:
        raise StateError(
            f"{show_path(path)}: state_dict() of this {type(value).__name__} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


# --- what cannot be saved

_FSDP_CLASSES = ("FullyShardedDataParallel", "FSDPModule")  # FSDP1; what fully_shard() makes
_SAVE_SHARDED = "Save sharded states with torch.distributed.checkpoint, as examples/07_fsdp.py does"


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

    dtype = str(value.dtype).removeprefix("torch.")
    special = value.layout is not torch.strided or value.is_quantized or value.is_nested
    if special or dtype not in DTYPES or type(value) not in (Tensor, torch.nn.Parameter):
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
            "ranks; expected an optimizer that is whole on every rank. Use one, or "
            "torch.distributed.checkpoint"
        )
    if isinstance(value, torch.optim.Optimizer):
        for number, group in enumerate(value.param_groups):
            for index, parameter in enumerate(group["params"]):
                place = (*path, "param_groups", number, "params", index)
                _check_whole_tensor(parameter, place)


def check_whole(state: Any) -> None:
    """Raise StateError for a state of which a part is sharded over the ranks."""
    for path, value in walk(state):
        inner = unwrap(value)
        if isinstance(inner, Tensor):
            _check_whole_tensor(inner, path)
        elif isinstance(inner, torch.nn.Module):
            _check_whole_module(inner, path)
        else:
            check_optimizer(inner, path)


def _check_whole_tensor(value: Tensor, path: Path) -> None:
    if type(value).__module__.startswith("torch.distributed"):
        raise StateError(
            f"{show_path(path)} is a {type(value).__name__}, sharded over the ranks (FSDP, tensor "
            f"parallelism); expected tensors that are whole on every rank. {_SAVE_SHARDED}"
        )


def _check_whole_module(module: torch.nn.Module, path: Path) -> None:
    for name, part in module.named_modules():
        # By name: an import of torch.distributed.fsdp would take longer than a small load.
        names = {cls.__name__ for cls in type(part).__mro__}
        if not names.isdisjoint(_FSDP_CLASSES):
            raise StateError(
                f"{show_path((*path, name) if name else path)} is sharded over the ranks by FSDP; "
                f"expected a module that is whole on every rank. {_SAVE_SHARDED}"
            )
    for name, parameter in module.named_parameters():
        _check_whole_tensor(parameter, (*path, name))
