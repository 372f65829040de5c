"""The state of a training as plain data and named tensors, and back: nested containers, models, optimizers, generators.

Not here: files (checkpoint_files.py), ranks and threads (checkpoint.py). Nothing is pickled, in neither direction.
"""
from __future__ import annotations

import base64
import collections
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Tree = Any  # what json writes: plain data as itself, everything else as {kind: content}
_MAPPINGS: dict[str, type[Any]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "torch.Size": torch.Size}


@dataclass(frozen=True)
class PerRank:
    """Marks a part of the state that differs between the ranks, so that every rank saves and restores its own."""

    value: Any


class Unfit(ValueError):
    """A state that cannot be saved, or that does not fit to the checkpoint; the message names the places."""


@dataclass
class Packed:
    """A state as what is written: trees of plain data, and the tensors to which they refer by name."""

    tree: Tree = None
    own: dict[str, Tree] = field(default_factory=dict)  # the trees of the PerRank parts, by their place
    common: dict[str, Tensor] = field(default_factory=dict)  # equal on all ranks: any of them may write it
    main: dict[str, Tensor] = field(default_factory=dict)  # written by rank 0 alone, as rank 0 has it
    local: dict[str, Tensor] = field(default_factory=dict)  # written by each rank; rank 0's are for other world sizes
    mine: dict[str, Tensor] = field(default_factory=dict)  # of this rank, marked as PerRank


@dataclass(frozen=True)
class Replicas:
    """What DistributedDataParallel tells about tensors; each set holds the id() of parameters or buffers."""

    parameters: frozenset[int] = frozenset()  # equal on all ranks
    buffers: frozenset[int] = frozenset()  # every rank has its own: running statistics and the like


def pack(state: Any, replicas: Replicas | None = None) -> Packed:
    """Take the state apart; the tensors are not copied. Raises Unfit for what is neither plain data nor a tensor."""
    packed = Packed()
    packed.tree = _Packer(packed, replicas or Replicas()).tree(state, "", packed.main)
    return packed


class _Packer:
    def __init__(self, packed: Packed, replicas: Replicas) -> None:
        self._packed, self._replicas = packed, replicas
        self._seen: dict[tuple[object, ...], str] = {}

    def tree(self, value: Any, place: str, kind: dict[str, Tensor]) -> Tree:
        """The tree of `value`. kind: where its tensors go, one of the dictionaries of Packed."""
        packed = self._packed
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.tree(item, _join(place, index), kind) for index, item in enumerate(value)]
        for name, cls in _MAPPINGS.items():
            if type(value) is cls:
                return self._mapping(name, value, place, kind)
        for name, cls in _SEQUENCES.items():
            if type(value) is cls:
                return {name: [self.tree(item, _join(place, index), kind) for index, item in enumerate(value)]}
        if isinstance(value, PerRank):
            if kind is packed.mine:
                raise Unfit(f"{place} is PerRank inside of PerRank. Mark the outer one alone")
            packed.own[place] = self.tree(value.value, _join(place, "own"), packed.mine)
            return {"per rank": place}
        if isinstance(value, Tensor):
            return self._tensor(value, place, kind)
        if isinstance(value, torch.Generator):
            return {"generator": self.tree(to_bytes(value.get_state()), place, kind)}
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if type(value) is torch.dtype:
            return {"torch.dtype": str(value).removeprefix("torch.")}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
            raw = base64.b64encode(value.tobytes()).decode()
            return {"numpy": [value.dtype.str, list(value.shape), raw, isinstance(value, numpy.generic)]}
        inner = unwrap(value)
        if hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict"):
            return {"object": type(inner).__name__, "state": self._object(inner, place, kind)}
        raise Unfit(f"{place or 'the state'} is of type {type(value).__module__}.{type(value).__qualname__}; expected "
                    "tensors, numbers, strings, None, containers of these, and objects with state_dict() and "
                    "load_state_dict(). Convert it, or leave it out")

    def _mapping(self, name: str, value: dict[Any, Any], place: str, kind: dict[str, Tensor],
                 kinds_by_key: Mapping[str, dict[str, Tensor]] | None = None) -> Tree:
        """kinds_by_key: where the tensors of these keys go instead."""
        kinds = {key: (kinds_by_key or {}).get(key, kind) for key in value}
        tree: Tree
        if name == "dict" and all(type(key) is str for key in value):
            tree = {"dict": {key: self.tree(item, _join(place, key), kinds[key]) for key, item in value.items()}}
        else:
            tree = {name: [[self.tree(key, place, kind), self.tree(item, _join(place, key), kinds[key])]
                           for key, item in value.items()]}
        metadata = getattr(value, "_metadata", None)  # torch.nn.Module.state_dict() leaves versions there
        return tree if metadata is None else {**tree, "metadata": self.tree(dict(metadata), place, kind)}

    def _object(self, value: Any, place: str, kind: dict[str, Tensor]) -> Tree:
        state = value.state_dict()
        packed, replicas = self._packed, self._replicas
        if kind is packed.main and isinstance(value, torch.optim.Optimizer):
            # Those of torch.distributed keep each rank's own state.
            common = not type(value).__module__.startswith("torch.distributed") and all(
                id(parameter) in replicas.parameters for parameter in value.state)
            return self.tree(state, place, packed.common if common else kind)
        if kind is packed.main and isinstance(value, torch.nn.Module) and type(state) is collections.OrderedDict:
            kinds = {name: packed.common for name, one in value.named_parameters(remove_duplicate=False)
                     if id(one) in replicas.parameters}
            kinds |= {name: packed.local for name, one in value.named_buffers(remove_duplicate=False)
                      if id(one) in replicas.buffers}
            return self._mapping("OrderedDict", state, place, kind, kinds)
        return self.tree(state, place, kind)

    def _tensor(self, value: Tensor, place: str, kind: dict[str, Tensor]) -> Tree:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or (
                value.is_quantized or value.is_meta):
            raise Unfit(f"{place} is a {type(value).__name__} of layout {value.layout} on {value.device}; expected an "
                        "ordinary dense tensor. For states sharded over the ranks use torch.distributed.checkpoint")
        value = value.detach()
        same = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride(), id(kind))
        name = self._seen.get(same) if value.numel() else None  # tied weights are written once
        if name is None:
            taken = (self._packed.common, self._packed.main, self._packed.local, self._packed.mine)
            name, count = place or "state", 1
            while any(name in one for one in taken):  # {"a": {"b": x}, "a/b": y}, or the keys 1 and "1"
                count += 1
                name = f"{place}#{count}"
            kind[name] = value
            self._seen[same] = name
        tree = {"tensor": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if not value.is_contiguous() and torch.empty_like(value, device="meta").stride() == value.stride():
            tree["stride"] = list(value.stride())  # channels_last and the like
        return tree


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """What pack() took apart, an object as its state_dict(). The tensors are those given, no copies."""
    if type(tree) is list:
        return [unpack(item, tensors) for item in tree]
    if type(tree) is not dict:
        return tree
    kind, content = next(iter(tree.items()))
    if kind == "tensor":
        found = tensors[content].view(getattr(torch, tree["dtype"])).view(tree["shape"])
        if "stride" not in tree:
            return found
        return torch.empty_strided(tree["shape"], tree["stride"], dtype=found.dtype).copy_(found)
    if kind in _MAPPINGS:
        pairs = content.items() if type(content) is dict else (
            (unpack(key, tensors), value) for key, value in content)
        mapping = _MAPPINGS[kind]()
        for key, value in pairs:
            mapping[key] = unpack(value, tensors)
        if "metadata" in tree:
            mapping._metadata = unpack(tree["metadata"], tensors)
        return mapping
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([unpack(item, tensors) for item in content])
    if kind == "object":
        return unpack(tree["state"], tensors)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    if kind == "torch.dtype":
        return getattr(torch, content)
    if kind == "numpy":
        import numpy
        dtype, shape, raw, scalar = content
        array = numpy.frombuffer(base64.b64decode(raw), dtype).reshape(shape).copy()
        return array[()] if scalar else array
    raise Unfit(f"the checkpoint holds a {kind!r} where plain data was expected")


def unwrap(value: Any) -> Any:
    """The model inside of DistributedDataParallel and torch.compile, in whatever order."""
    while True:
        if isinstance(value, DistributedDataParallel):
            value = value.module
        elif isinstance(value, torch.nn.Module) and isinstance(getattr(value, "_orig_mod", None), torch.nn.Module):
            value = value._orig_mod
        else:
            return value


# --- back into the objects

class Fitting:
    """Compares a checkpoint with the state that it shall restore, without changing anything; then restore() does.

    own: the trees of this rank's PerRank parts; None when they were saved under another number of ranks.
    """

    def __init__(self, state: Any, tree: Tree, tensors: Mapping[str, Tensor], own: dict[str, Tree] | None) -> None:
        self.problems: list[str] = []
        self._tensors, self._own = tensors, own
        self._actions: list[tuple[str, Callable[[], object]]] = []
        self._result = self._fit(state, tree, "")

    def restore(self) -> Any:
        """Restore objects and tensors in place; returns the state with its plain data replaced by what was saved."""
        for place, action in self._actions:
            try:
                action()
            except Exception as error:
                raise Unfit(f"{place}: its load_state_dict() failed, and what comes before it is restored already: "
                            f"{type(error).__name__}: {error}") from error
        return self._result

    def _fit(self, state: Any, tree: Tree, place: str) -> Any:
        kind = next(iter(tree)) if type(tree) is dict else ""
        inner = unwrap(state)
        if isinstance(state, PerRank):
            if kind != "per rank":
                return self._problem(place, "is PerRank, but was saved as common to all ranks")
            if self._own is None:
                return self._problem(place, "is PerRank and was saved under another number of ranks. Resume with that "
                                            "number, or leave it out of the state")
            return PerRank(self._fit(state.value, self._own[tree["per rank"]], place))
        if _is_per_rank(tree):
            return self._problem(place, "was saved as PerRank; expected the same here")
        if isinstance(state, torch.Generator):
            if kind != "generator":
                return self._problem(place, f"is a torch.Generator, but was saved as {_kind(tree)}")
            raw = unpack(tree["generator"], {})
            self._actions.append((place, lambda: state.set_state(from_bytes(raw))))
            return state
        if isinstance(state, Tensor):
            return self._fit_tensor(state, tree, place)
        if hasattr(inner, "load_state_dict"):
            if kind != "object":
                return self._problem(place, f"is a {type(inner).__name__}, but was saved as {_kind(tree)}")
            self._fit_object(inner, tree, place)
            return state
        if not _holds_objects(state) and not _saved_objects(tree):
            return unpack(tree, _Copies(self._tensors))
        return self._fit_container(state, tree, kind, place)

    def _fit_container(self, state: Any, tree: Tree, kind: str, place: str) -> Any:
        if isinstance(state, dict) and kind in _MAPPINGS:
            content = tree[kind]
            saved = dict(content if type(content) is dict else ((unpack(key, {}), value) for key, value in content))
            self._differences(place, state, {key: value for key, value in saved.items()
                                             if key in state or not _is_per_rank(value)})  # those may be left out
            return type(state)((key, self._fit(value, saved[key], _join(place, key)))
                               for key, value in state.items() if key in saved)
        items = tree if type(tree) is list else tree.get("tuple") if kind == "tuple" else None
        if isinstance(state, list | tuple) and items is not None:
            if len(items) != len(state):
                return self._problem(place, f"has {len(state)} items, but was saved with {len(items)}")
            return type(state)([self._fit(value, item, _join(place, index))
                                for index, (value, item) in enumerate(zip(state, items, strict=True))])
        return self._problem(place, f"is a {type(state).__name__}, but was saved as {_kind(tree)}")

    def _fit_tensor(self, state: Tensor, tree: Tree, place: str) -> Tensor:
        if type(tree) is not dict or "tensor" not in tree:
            self._problem(place, f"is a tensor, but was saved as {_kind(tree)}")
        elif _shape(state) != (saved := _shape(unpack(tree, self._tensors))):
            self._problem(place, f"is {_shape(state)}, but was saved as {saved}")
        else:
            def copy() -> None:
                with torch.no_grad():
                    state.copy_(unpack(tree, self._tensors))
            self._actions.append((place, copy))
        return state

    def _fit_object(self, state: Any, tree: Tree, place: str) -> None:
        if isinstance(state, torch.nn.Module):
            saved, own = unpack(tree, self._tensors), state.state_dict()
            self._differences(place, own, saved)
            for name, value in own.items():
                if isinstance(value, Tensor) and isinstance(saved.get(name), Tensor) and (
                        _shape(value) != _shape(saved[name])):
                    self._problem(_join(place, name), f"is {_shape(value)}, but was saved as {_shape(saved[name])}")
            for name in saved:
                if name.endswith("_extra_state"):  # kept as it is, whereas parameters and buffers are copied
                    saved[name] = _clone(saved[name])
        else:
            saved = unpack(tree, _Copies(self._tensors))
        if isinstance(state, torch.optim.Optimizer):
            groups = [[len(group["params"]) for group in one] for one in (state.param_groups, saved["param_groups"])]
            if groups[0] != groups[1]:
                self._problem(place, f"has groups of {groups[0]} parameters, but was saved with {groups[1]}")
        self._actions.append((place, lambda: state.load_state_dict(saved)))

    def _differences(self, place: str, own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
        for words, names in (("the checkpoint lacks", [key for key in own if key not in saved]),
                             ("only the checkpoint has", [key for key in saved if key not in own])):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                self.problems.append(f"{place or 'state'}: {words} {', '.join(map(repr, names[:5]))}{more}")

    def _problem(self, place: str, text: str) -> None:
        self.problems.append(f"{place or 'the state'} {text}")


class _Copies(Mapping[str, Tensor]):
    """The same tensors, each in memory of its own: an object that keeps one shall not keep the whole file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _holds_objects(state: Any) -> bool:
    """Whether anything in it, at any depth, is restored in place."""
    if isinstance(state, dict | list | tuple):
        return any(map(_holds_objects, state.values() if isinstance(state, dict) else state))
    return isinstance(state, Tensor | PerRank | torch.Generator) or hasattr(unwrap(state), "load_state_dict")


def _saved_objects(tree: Tree) -> bool:
    """Whether the tree holds what can only be restored into an object."""
    if type(tree) is list:
        return any(map(_saved_objects, tree))
    if type(tree) is not dict:
        return False
    kind, content = next(iter(tree.items()))
    return kind in ("object", "generator", "per rank") or (
        any(map(_saved_objects, content.values())) if type(content) is dict else _saved_objects(content))


def _is_per_rank(tree: Tree) -> bool:
    return type(tree) is dict and "per rank" in tree


def _kind(tree: Tree) -> str:
    kind = next(iter(tree)) if type(tree) is dict else type(tree).__name__
    return str(tree["object"]) if kind == "object" else kind


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _join(place: str, key: object) -> str:
    return f"{place}/{key}" if place else str(key)


def to_bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())


def from_bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
