"""The state of a training as plain data and named tensors, and back.

Nothing is pickled, and reading never imports or calls what a file names. What a state may hold, and how it comes back:

- In place, into the object at the same place of the state: objects with state_dict() and load_state_dict(), tensors,
  random number generators (torch, random.Random, numpy), dataclasses that are not frozen, and all that these hold.
- As a new value: None, numbers, strings, bytes, numpy arrays (masked ones too), paths, dates, Decimal, Fraction,
  torch.dtype, torch.device; dict, OrderedDict, Counter, defaultdict, list, tuple, set, frozenset, deque of these.
- As a new value of a class of which the state holds an instance, anywhere: namedtuple, Enum, frozen dataclass. A
  defaultdict whose factory is not a type of Python takes it from the defaultdict at the same place.

All else is refused with its place: tensors that are sparse, quantised, on the meta device or sharded over the ranks,
lazy modules that have not run, numpy arrays of Python objects, more than 100 levels of nesting.
"""
from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .checkpoint_sums import memory
from .checkpoint_values import (
    DTYPES,
    Tree,
    Unfit,
    checked_shape,
    decode_array,
    decode_value,
    encode_array,
    encode_value,
    generator_kind,
    generator_state,
    is_array,
    is_masked,
    is_value,
)

Path = tuple[object, ...]  # the keys that lead to an entry of the state

MAX_DEPTH = 100  # levels of nesting; more are a state that contains itself
_LONG = 64 << 10  # bytes and characters from which on they are not in the header of the file
_ATOMS = (bool, float, type(None))
MAPPINGS: dict[str, type[Any]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}
SEQUENCES: dict[str, type[Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "torch.Size": torch.Size, "deque": collections.deque}
_FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
                                  collections.OrderedDict, collections.Counter, collections.deque)}
CLASSES = ("dataclass", "namedtuple", "enum")  # tags of what is restored as a class of the given state
_OBJECTS = ("object", "generator", "per rank")  # tags of what is restored into an object of the given state


@dataclass(frozen=True)
class PerRank:
    """Marks a part of the state that differs between the ranks, so that every rank saves and restores its own."""

    value: Any


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
    """Take the state apart; the tensors are not copied. Raises Unfit for what cannot be saved, with its place."""
    packed = Packed()
    packed.tree = _Packer(packed, replicas or Replicas(), parameter_names(state)).tree(state, (), packed.main)
    return packed


class _Packer:
    def __init__(self, packed: Packed, replicas: Replicas, names: Mapping[int, str]) -> None:
        self._packed, self._replicas, self._names = packed, replicas, names
        self._seen: dict[tuple[object, ...], str] = {}

    def tree(self, value: Any, path: Path, kind: dict[str, Tensor]) -> Tree:
        """The tree of `value`. kind: where its tensors go, one of the dictionaries of Packed."""
        packed, cls = self._packed, type(value)
        if cls in _ATOMS or cls is int and -2**63 <= value < 2**64 or cls is str and len(value) < _LONG:
            return value
        check_depth(path)
        if cls is list:
            return self._items(value, path, kind)
        for name, mapping in MAPPINGS.items():
            if cls is mapping:
                return self._mapping(name, value, path, kind)
        if cls is collections.defaultdict:
            return {"defaultdict": self._mapping("OrderedDict", value, path, kind)["OrderedDict"],
                    "factory": factory_name(value)}
        for name, sequence in SEQUENCES.items():
            if cls is sequence:
                tree = {name: self._items(value, path, kind)}
                return {**tree, "maxlen": value.maxlen} if name == "deque" else tree
        if isinstance(value, PerRank):
            if kind is packed.mine:
                raise Unfit(f"{show(path)} is PerRank inside of PerRank. Mark the outer one alone")
            packed.own[show(path)] = self.tree(value.value, (*path, "own"), packed.mine)
            return {"per rank": show(path)}
        if isinstance(value, Tensor):
            return self._tensor(value, path, kind)
        if generator := generator_kind(value):
            return {"generator": generator, "state": self.tree(generator_state(value), (*path, "state"), kind)}
        if cls in (bytes, bytearray, str) and len(value) >= _LONG:
            raw = value.encode("utf-8", "surrogatepass") if cls is str else value
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            return {"long": cls.__name__, "data": self._tensor(data, path, kind)}
        try:
            if is_masked(value):
                return self._masked(value, path, kind)
            if is_array(value):
                return self._array(value, path, kind)
            found = encode_value(value)
        except Unfit:
            raise
        except ValueError as error:
            raise Unfit(f"{show(path)} {error}") from error
        return self._instance(value, path, kind) if found is None else found

    def _items(self, values: Any, path: Path, kind: dict[str, Tensor]) -> list[Tree]:
        return [item if type(item) in _ATOMS else self.tree(item, (*path, index), kind)
                for index, item in enumerate(values)]

    def _mapping(self, name: str, value: dict[Any, Any], path: Path, kind: dict[str, Tensor]) -> Tree:
        tree: Tree
        if name == "dict" and all(type(key) is str for key in value):
            return {"dict": {key: self.tree(item, (*path, key), kind) for key, item in value.items()}}
        for key in value:
            if isinstance(key, Tensor | PerRank) or generator_kind(key) or _is_stateful(key):
                raise Unfit(f"{show(path)} has a key of type {type_name(key)}; expected a number, a string or "
                            "another value that is compared by its content. Use its name as the key")
        tree = {name: [[self.tree(key, (*path, "key"), kind), self.tree(item, (*path, key), kind)]
                       for key, item in value.items()]}
        metadata = getattr(value, "_metadata", None)  # torch.nn.Module.state_dict() leaves versions there
        return tree if metadata is None else {**tree, "metadata": self.tree(dict(metadata), path, kind)}

    def _array(self, value: Any, path: Path, kind: dict[str, Tensor]) -> Tree:
        if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
            raise ValueError(f"is a {type_name(value)}; expected an ordinary or a masked numpy array. Convert it with "
                             "numpy.array(value, subok=False)")
        fields, data = encode_array(value)
        return {"array": fields, "data": self._tensor(data, path, kind)}

    def _masked(self, value: Any, path: Path, kind: dict[str, Tensor]) -> Tree:
        import numpy
        mask = None if value.mask is numpy.ma.nomask else self._array(value.mask, (*path, "mask"), kind)
        return {"masked array": self._array(value.data, path, kind), "mask": mask, "hard": value.hardmask,
                "fill": self._array(numpy.asarray(value.fill_value), (*path, "fill_value"), kind)}

    def _instance(self, value: Any, path: Path, kind: dict[str, Tensor]) -> Tree:
        inner, cls = unwrap(value), type(value)
        if _is_stateful(inner):
            return self._object(inner, path, kind)
        if isinstance(value, enum.Enum):
            member = value.name in cls.__members__
            return {"enum": cls.__qualname__, "member" if member else "value": self.tree(
                value.name if member else value.value, path, kind)}
        if is_namedtuple(value):
            items = [self.tree(item, (*path, name), kind) for name, item in zip(cls._fields, value, strict=True)]
            return {"namedtuple": cls.__qualname__, "fields": dict(zip(cls._fields, items, strict=True))}
        if is_dataclass(value):
            names = field_names(value)
            missing = [name for name in names if not hasattr(value, name)]
            more = [name for name in getattr(value, "__dict__", ()) if name not in names]
            if missing or more:
                found = f"lacks its field {missing[0]!r}" if missing else f"has the attribute {more[0]!r}, not a field"
                raise Unfit(f"{show(path)} is a {cls.__qualname__} that {found}; expected values for all fields and "
                            "nothing else. Give the class state_dict() and load_state_dict()")
            fields = {name: self.tree(getattr(value, name), (*path, name), kind) for name in names}
            return {"dataclass": cls.__qualname__, "fields": fields}
        raise Unfit(f"{show(path)} is of type {type_name(value)}; expected "
                    "tensors, numpy arrays, numbers, strings, None, paths, dates, dataclasses, containers of "
                    "these, and objects with state_dict() and load_state_dict(). Convert it, or leave it out")

    def _object(self, value: Any, path: Path, kind: dict[str, Tensor]) -> Tree:
        name = type(value).__name__
        if isinstance(value, torch.nn.Module):
            check_module(value, path)
        check_optimizer(value, path)
        state = state_of(value, path)
        if isinstance(value, torch.optim.Optimizer):
            # Those of torch.distributed keep each rank's own state.
            if kind is self._packed.main and not type(value).__module__.startswith("torch.distributed") and all(
                    id(parameter) in self._replicas.parameters for parameter in value.state):
                kind = self._packed.common
            return {"object": name, "state": self.tree(state, path, kind),
                    "parameters": describe_parameters(value, self._names)}
        if isinstance(value, torch.nn.Module) and type(state) is collections.OrderedDict:
            return {"object": name, "state": self._module(value, state, path, kind)}
        return {"object": name, "state": self.tree(state, path, kind)}

    def _module(self, module: torch.nn.Module, state: collections.OrderedDict[str, Any], path: Path,
                kind: dict[str, Tensor]) -> Tree:
        kinds = {}
        if kind is self._packed.main:
            kinds = {name: self._packed.common for name, one in module.named_parameters(remove_duplicate=False)
                     if id(one) in self._replicas.parameters}
            kinds |= {name: self._packed.local for name, one in module.named_buffers(remove_duplicate=False)
                      if id(one) in self._replicas.buffers}
        items = []
        for key, item in state.items():
            place = (*path, plain_key(key))
            if isinstance(item, Tensor) and overlaps_itself(item):
                raise Unfit(f"{show(place)} is an expanded tensor, into which load_state_dict() cannot copy; expected "
                            "one with memory for every element. Register a contiguous() one")
            items.append([plain_key(key), self.tree(item, place, kinds.get(key, kind))])
        metadata = {plain_key(key): item for key, item in getattr(state, "_metadata", {}).items()}
        return {"OrderedDict": items, "metadata": self.tree(metadata, path, kind)}

    def _tensor(self, value: Tensor, path: Path, kind: dict[str, Tensor]) -> Tree:
        check_tensor(value, path)
        value = value.detach()
        same = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride(), value.is_conj(),
                value.is_neg(), id(kind))
        name = self._seen.get(same) if value.numel() else None  # tied weights are written once
        if name is None:
            taken = (self._packed.common, self._packed.main, self._packed.local, self._packed.mine)
            place, count = show(path, "state"), 1
            name = place
            # {"a": {"b": x}, "a/b": y}, or the keys 1 and "1"; the last is what safetensors keeps for itself
            while any(name in one for one in taken) or name == "__metadata__":
                count += 1
                name = f"{place}#{count}"
            kind[name] = value
            self._seen[same] = name
        tree = {"tensor": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if not value.is_contiguous() and _is_dense(value.shape, value.stride()):
            tree["stride"] = list(value.stride())  # channels_last and the like
        return tree


# --- what the entries of a state are

def state_of(value: Any, path: Path) -> Any:
    """What state_dict() of an object returns; its errors become Unfit."""
    try:
        return value.state_dict()
    except Exception as error:
        raise Unfit(f"{show(path)}: state_dict() of this {type(value).__name__} failed: {type(error).__name__}: "
                    f"{error}") from error


def check_tensor(value: Tensor, path: Path) -> None:
    """Raise Unfit for a tensor that cannot be saved or restored."""
    if torch.nn.parameter.is_lazy(value):
        raise Unfit(f"{show(path)} is a parameter of a lazy module that is not initialised; expected one with a shape. "
                    "Run one batch through the model first")
    if type(value).__module__.startswith("torch.distributed"):
        raise Unfit(f"{show(path)} is a {type(value).__name__}, sharded over the ranks (FSDP, tensor parallelism); "
                    "expected tensors that are whole on every rank. Save sharded states with "
                    "torch.distributed.checkpoint")
    if value.is_meta:
        raise Unfit(f"{show(path)} is on the meta device and has no values. Give the model memory with "
                    "to_empty(device=...), initialise its values, and then save or load it")
    dtype = str(value.dtype).removeprefix("torch.")
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or (
            value.is_quantized or value.is_nested or dtype not in DTYPES):
        kind = "quantised " if value.is_quantized else "nested " if value.is_nested else ""
        raise Unfit(f"{show(path)} is a {kind}{type(value).__name__} of {dtype} and layout {value.layout} on "
                    f"{value.device}; expected an ordinary dense tensor. Convert it")


def check_module(module: torch.nn.Module, path: Path) -> None:
    """Raise Unfit for a module that holds no whole tensors of its own, before its state_dict() is called."""
    for name, part in module.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise Unfit(f"{show((*path, name) if name else path)} is sharded over the ranks by FSDP; expected a module "
                        "that is whole on every rank. Save sharded states with torch.distributed.checkpoint")
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter) or type(parameter).__module__.startswith("torch.distributed"):
            check_tensor(parameter, (*path, name))


def check_optimizer(value: Any, path: Path) -> None:
    if type(value).__name__ == "ZeroRedundancyOptimizer":
        raise Unfit(f"{show(path)} is a ZeroRedundancyOptimizer, whose state is sharded over the ranks; expected an "
                    "optimizer that is whole on every rank. Use one, or torch.distributed.checkpoint")


def check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        raise Unfit(f"{show(path[:8])}/... is nested more than {MAX_DEPTH} levels deep; expected fewer. Does it "
                    "contain itself?")


def overlaps_itself(value: Tensor) -> bool:
    return value.layout is torch.strided and not torch.nn.parameter.is_lazy(value) and any(
        stride == 0 and length > 1 for length, stride in zip(value.shape, value.stride(), strict=True))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides are those of a permuted contiguous tensor."""
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def unwrap(value: Any) -> Any:
    """The model inside of DistributedDataParallel and torch.compile, in whatever order."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(value, torch.nn.Module) and isinstance(getattr(value, "_orig_mod", None), torch.nn.Module):
            value = value._orig_mod
        else:
            return value


def plain_key(key: str) -> str:
    """The name of a parameter without what torch.compile puts into it."""
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def _is_stateful(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and hasattr(type(value), "_make")


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | PerRank)


def field_names(value: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(value)]


def factory_name(value: collections.defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    if factory is None or _FACTORIES.get(name) is factory:
        return None if factory is None else name
    return f"other: {name}"


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def show(path: Path, empty: str = "the state") -> str:
    return "/".join(hex(key) if type(key) is int and key.bit_length() > 64 else str(key) for key in path) or empty


def walk(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All entries of a state but numbers and strings, also those of containers in containers. Raises Unfit."""
    check_depth(path)
    yield path, state
    if isinstance(state, dict):
        items = iter(state.items())
    elif isinstance(state, PerRank):
        items = iter([("own", state.value)])
    elif is_namedtuple(state):
        items = iter(zip(type(state)._fields, state, strict=True))
    elif isinstance(state, list | tuple | collections.deque):
        items = iter(enumerate(state))
    elif is_dataclass(state) and not _is_stateful(state):
        items = iter([(name, getattr(state, name, None)) for name in field_names(state)])
    else:
        return
    for key, item in items:
        if type(item) not in (*_ATOMS, int, str):
            yield from walk(item, (*path, key))


def parameter_names(state: Any) -> dict[int, str]:
    """The names of all parameters of the modules in a state, by the id of the parameter."""
    names: dict[int, str] = {}
    for path, value in walk(state):
        module = unwrap(value)
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), show((*path, plain_key(name))))
    return names


def describe_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[list[Any]]]:
    """Name and shape of each parameter, by groups, in the order in which the optimizer numbers them."""
    groups = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        groups.append([[names.get(id(one), name), list(one.shape)]
                       for one, name in zip(group["params"], own, strict=True)])
    return groups


# --- back

def unpack(tree: Tree, tensors: Mapping[str, Tensor], *, copies: bool = False,
           classes: Mapping[tuple[str, str], type[Any]] | None = None) -> Any:
    """What pack() took apart, an object as its state_dict(). Raises Unfit for a tree that pack() does not write.

    copies: whether tensors get memory of their own. classes: those of the user, by kind and name.
    """
    return Unpacker(tensors, copies=copies, classes=classes).value(tree, ())


class Unpacker:
    """Reads trees, which may have been changed by anybody: every type and number is checked before it is used."""

    def __init__(self, tensors: Mapping[str, Tensor], *, copies: bool = False,
                 classes: Mapping[tuple[str, str], type[Any]] | None = None) -> None:
        self._tensors, self._copies = tensors, copies
        self.classes = dict(classes or {})
        self._made: dict[str, Tensor] = {}  # copies, so that tensors which were one stay one

    def value(self, tree: Tree, path: Path) -> Any:
        """The value of a tree. path: names the entry in errors."""
        if type(tree) not in (dict, list):
            return tree
        check_depth(path)
        if type(tree) is list:
            return [item if type(item) in _ATOMS else self.value(item, (*path, index))
                    for index, item in enumerate(tree)]
        try:
            return self._tagged(tree, path)
        except Unfit:
            raise
        except ImportError as error:
            raise Unfit(f"{show(path)} was saved as {kind_of(tree)}, but numpy cannot be imported here: {error}. "
                        "Install it") from error
        except Exception as error:
            raise _invalid(tree, path, error) from error

    def mapping(self, tree: dict[str, Tree], path: Path) -> dict[Any, Tree]:
        """The trees of a mapping by their keys."""
        try:
            return dict(self._pairs(tree, path))
        except (TypeError, ValueError, KeyError) as error:
            raise error if isinstance(error, Unfit) else _invalid(tree, path, error) from error

    def _tagged(self, tree: dict[str, Tree], path: Path) -> Any:
        tag = tag_of(tree)
        content = tree.get(tag)
        if tag == "tensor":
            return self._tensor(tree)
        if tag in MAPPINGS:
            mapping = MAPPINGS[tag]()
            for key, value in self._pairs(tree, path):
                mapping[key] = self.value(value, (*path, key))
            if "metadata" in tree:
                mapping._metadata = self.value(tree["metadata"], path)
            return mapping
        if tag == "defaultdict":
            factory = tree["factory"]
            if factory is not None and factory not in _FACTORIES:
                raise Unfit(f"{show(path)} was saved as a defaultdict whose factory is {factory!r}, which a checkpoint "
                            "cannot hold. Put a defaultdict with that factory at this place of the state")
            return collections.defaultdict(None if factory is None else _FACTORIES[factory], [
                (key, self.value(value, (*path, key))) for key, value in self._pairs(tree, path)])
        if tag in SEQUENCES:
            items = self._items(tree, path)
            return collections.deque(items, tree["maxlen"]) if tag == "deque" else SEQUENCES[tag](items)
        if tag == "object":
            return self.value(tree["state"], path)
        if tag == "long":
            if content not in ("bytes", "bytearray", "str"):
                raise ValueError("it is neither bytes nor a string")
            raw = bytearray(memory(self._bytes(tree["data"]).contiguous()))
            return raw if content == "bytearray" else bytes(raw) if content == "bytes" else raw.decode(
                "utf-8", "surrogatepass")
        if tag == "array":
            return decode_array(tree["array"], self._bytes(tree["data"]))
        if tag == "masked array":
            return self._masked(tree, path)
        if tag in CLASSES:
            return self._instance(tag, tree, path)
        if is_value(tag):
            return decode_value(tag, tree)
        raise Unfit(f"{show(path)}: the checkpoint holds {tag[:100]!r} where plain data was expected")

    def _pairs(self, tree: dict[str, Tree], path: Path) -> list[tuple[Any, Tree]]:
        """Keys and trees of a mapping."""
        content = tree[tag_of(tree)]
        if type(content) is dict:
            return list(content.items())
        return [(self.value(key, (*path, "key")), value) for key, value in content]

    def _items(self, tree: dict[str, Tree], path: Path) -> list[Any]:
        content = tree[tag_of(tree)]
        if type(content) is not list:
            raise ValueError("its items are not a list")
        found: list[Any] = self.value(content, path)
        return found

    def _tensor(self, tree: dict[str, Tree]) -> Tensor:
        name, dtype, shape = tree["tensor"], DTYPES[tree["dtype"]], checked_shape(tree["shape"])
        key = f"{name} {dtype} {shape} {tree.get('stride')}"
        if key in self._made:
            return self._made[key]
        found = self._tensors[name]
        if found.dtype is not dtype:  # safetensors does not know the type
            if found.dtype is not torch.uint8:
                raise ValueError(f"its tensor is of type {found.dtype}; expected {dtype}")
            found = found.view(dtype)
        found = found.view(shape)
        if "stride" in tree:
            stride = checked_shape(tree["stride"])
            if not _is_dense(shape, stride):
                raise ValueError("its strides do not match its shape")
            found = torch.empty_strided(shape, stride, dtype=dtype).copy_(found)
        elif self._copies:
            found = found.clone(memory_format=torch.contiguous_format)
        if self._copies:
            self._made[key] = found
        return found

    def _bytes(self, tree: Tree) -> Tensor:
        found = self._tensors[tree["tensor"]]
        if found.dtype is not torch.uint8 or found.dim() != 1:
            raise ValueError("its tensor does not hold bytes")
        return found

    def _masked(self, tree: dict[str, Tree], path: Path) -> Any:
        import numpy
        data, fill = self.value(tree["masked array"], path), self.value(tree["fill"], path)
        mask = numpy.ma.nomask if tree["mask"] is None else self.value(tree["mask"], path)
        if not isinstance(data, numpy.ndarray) or type(tree["hard"]) is not bool:
            raise ValueError("it has no data")
        if mask is not numpy.ma.nomask and (mask.shape != data.shape or mask.dtype != numpy.ma.make_mask_descr(
                data.dtype)):
            raise ValueError("its mask does not match its data")
        return numpy.ma.MaskedArray(data, mask=mask, fill_value=fill[()], hard_mask=tree["hard"])

    def _instance(self, tag: str, tree: dict[str, Tree], path: Path) -> Any:
        cls = self.classes.get((tag, tree[tag]))
        if cls is None:
            raise Unfit(f"{show(path)} was saved as the {tag} {str(tree[tag])[:100]}; expected an instance of it in "
                        "the state, because no class is imported for a file. Put one into the state")
        if tag == "enum":
            return cls[tree["member"]] if "member" in tree else cls(self.value(tree["value"], path))
        fields = tree["fields"]
        names = list(getattr(cls, "_fields", ())) or [one.name for one in dataclasses.fields(cls)]
        if list(fields) != names:
            raise Unfit(f"{show(path)} is the {tag} {cls.__qualname__} with the fields {', '.join(names)}, but was "
                        f"saved with {', '.join(fields)[:200]}. Resume with the same fields")
        values = {name: self.value(value, (*path, name)) for name, value in fields.items()}
        return cls._make(values.values()) if tag == "namedtuple" else new_dataclass(cls, values)


def _invalid(tree: Tree, path: Path, error: Exception) -> Unfit:
    return Unfit(f"{show(path)}: the checkpoint holds an invalid {kind_of(tree)}: {type(error).__name__}: "
                 f"{str(error)[:200]}. Was the file changed?")


def new_dataclass(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance with these fields; frozen ones too. Its __init__ and __post_init__ ran before it was saved."""
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def tag_of(tree: Tree) -> str:
    """What kind of value a tree is; "" for plain data."""
    return next(iter(tree), "?") if type(tree) is dict else ""


def kind_of(tree: Tree) -> str:
    """The same in words."""
    tag = tag_of(tree) or type(tree).__name__
    return str(tree[tag])[:100] if tag in ("object", "generator", *CLASSES) else tag[:100]


def tags(tree: Tree) -> set[str]:
    """The tags of a tree and of all that it contains."""
    found, stack = set(), [tree]
    while stack:
        one = stack.pop()
        if type(one) is list:
            stack.extend(item for item in one if type(item) in (list, dict))
        elif type(one) is dict:
            tag = tag_of(one)
            found.add(tag)
            stack.append(one.get("state"))
            for content in (one.get(tag), one.get("fields")):
                stack.extend(content.values() if type(content) is dict else [content])
    return found


def holds_objects(tree: Tree) -> bool:
    """Whether the tree holds what can only be restored into an object."""
    return not tags(tree).isdisjoint(_OBJECTS)
