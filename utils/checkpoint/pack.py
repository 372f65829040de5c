"""Take a training's state apart into a plain tree for JSON and named tensors, and rebuild it.

Nothing is pickled, and reading never imports or calls anything that a file names. A state may hold,
and is restored:

- In place, into the object at the same place of the state: objects with state_dict() and
  load_state_dict(), and tensors.
- As a new value: None, numbers, strings, bytes, numpy arrays of numbers, and dict, OrderedDict,
  Counter, list and tuple of all these.

Anything else is refused, and the error names its position (entries.py).
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .entries import (
    ATOMS,
    DTYPES,
    MAPPINGS,
    Path,
    PerRank,
    StateError,
    Tree,
    check_depth,
    check_module,
    check_optimizer,
    check_tensor,
    check_type,
    is_dense,
    is_sharded,
    plain_key,
    show_path,
    state_of,
    unwrap,
)
from .optimizers import ParameterNames, describe_parameters
from .slices import Shard, shard_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Who writes a tensor. common: any rank, since it is equal on all; main: rank 0; local: each rank, a
# small buffer; mine: each rank, in a PerRank part.
Kind = Literal["common", "main", "local", "mine"]

_LONG = 64 << 10  # bytes; longer values are stored as tensors
_MAX_LOCAL_BYTES = 1 << 20  # larger buffers are masks, not running statistics
_KEY_TYPES = (*ATOMS, int, str, bytes, tuple)


@dataclass
class Packed:
    """A state as it is written: trees of plain data, and the tensors they refer to."""

    tree: Tree = None
    own: dict[str, Tree] = field(default_factory=dict)  # path of a PerRank part -> its tree
    tensors: dict[str, Tensor] = field(default_factory=dict)  # name in the file -> tensor
    kinds: dict[str, Kind] = field(default_factory=dict)  # name in the file -> who writes it
    shards: dict[str, Shard] = field(default_factory=dict)  # name in the file -> this rank's slice
    # path -> settings of an optimizer of replicated parameters; they must be equal on all ranks
    settings: dict[str, Tree] = field(default_factory=dict)

    def of(self, *kinds: Kind) -> dict[str, Tensor]:
        """Return the tensors of these kinds."""
        return {name: tensor for name, tensor in self.tensors.items() if self.kinds[name] in kinds}


def pack(state: Any, replicated: frozenset[int] = frozenset()) -> Packed:
    """Take a state apart. The tensors are not copied.

    replicated: id() of each parameter that is equal on all ranks.
    Raises StateError for what cannot be saved.
    """
    packed = Packed()
    packer = _Packer(packed, replicated, ParameterNames(state))
    packed.tree = packer.tree(state, (), "main")
    return packed


class _Packer:
    """Builds the tree of a state. `kind` says who writes the tensors of a value."""

    def __init__(self, packed: Packed, replicated: frozenset[int], names: ParameterNames) -> None:
        self._packed, self._replicated, self._names = packed, replicated, names
        self._named: dict[tuple[object, ...], str] = {}  # memory of a tensor -> its name

    def tree(self, value: Any, path: Path, kind: Kind) -> Tree:
        """Return the tree of a value."""
        if _is_json_value(value):
            return value
        check_depth(path)
        check_type(value, path)
        cls = type(value)
        if cls is list:
            return self._items(value, path, kind)
        if cls is tuple:
            return {"tuple": self._items(value, path, kind)}
        for name, mapping in MAPPINGS.items():
            if cls is mapping:
                return self._mapping(name, value, path, kind)
        if cls is PerRank:
            return self._per_rank(value, path, kind)
        if isinstance(value, Tensor):
            return self._tensor(value, path, kind)
        if cls is int:
            return {"int": hex(value)}  # json limits decimal text to 4300 digits
        if cls is complex:
            return {"complex": [value.real, value.imag]}
        if cls is bytes:
            if len(value) < _LONG:
                return {"bytes": base64.b64encode(value).decode()}
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return {"bytes": self._tensor(data, path, kind)}
        if cls.__module__ == "numpy":
            return self._numpy(value, path, kind)
        return self._object(unwrap(value), path, kind)

    # --- containers

    def _items(self, values: Any, path: Path, kind: Kind) -> list[Tree]:
        return [
            item if _is_json_value(item) else self.tree(item, (*path, index), kind)
            for index, item in enumerate(values)
        ]

    def _mapping(self, name: str, value: dict[Any, Any], path: Path, kind: Kind) -> Tree:
        if name == "dict" and all(type(key) is str for key in value):
            items = {key: self.tree(item, (*path, key), kind) for key, item in value.items()}
            return {"dict": items}

        for key in value:
            if type(key) not in _KEY_TYPES:
                raise StateError(
                    f"{show_path(path)} has a key of type {type(key).__qualname__}; expected "
                    "None, a number, a string, bytes or a tuple of these. Use its name"
                )
        pairs = [
            [self.tree(key, (*path, "key"), kind), self.tree(item, (*path, key), kind)]
            for key, item in value.items()
        ]
        return {name: pairs}

    def _per_rank(self, value: PerRank, path: Path, kind: Kind) -> Tree:
        if kind == "mine":
            raise StateError(
                f"{show_path(path)} is PerRank inside of PerRank. Mark the outer one alone"
            )
        tree = self.tree(value.value, (*path, "own"), "mine")
        self._packed.own[show_path(path)] = tree
        return {"per rank": show_path(path)}

    def _numpy(self, value: Any, path: Path, kind: Kind) -> Tree:
        import numpy

        # torch warns about arrays that are not writable; a contiguous array is not copied
        array = numpy.require(value, requirements=["C", "W"])
        tag = "array" if type(value) is numpy.ndarray else "numpy scalar"
        return {tag: self._tensor(torch.from_numpy(array), path, kind)}

    # --- objects

    def _object(self, value: Any, path: Path, kind: Kind) -> Tree:
        """Return the tree of an object with state_dict()."""
        name = type(value).__name__
        if isinstance(value, torch.nn.Module):
            check_module(value, path)
        check_optimizer(value, path)
        state = state_of(value, path)

        if isinstance(value, torch.optim.Optimizer):
            if kind == "main" and self._is_replicated(value):
                kind = "common"
                self._note_settings(value, path)
            return {
                "object": name,
                "state": self.tree(state, path, kind),
                "parameters": describe_parameters(value, self._names),
            }
        if isinstance(value, torch.nn.Module) and type(state) is collections.OrderedDict:
            return {"object": name, "state": self._module(value, state, path, kind)}
        return {"object": name, "state": self.tree(state, path, kind)}

    def _is_replicated(self, optimizer: torch.optim.Optimizer) -> bool:
        # Optimizers in torch.distributed keep a different state on each rank.
        is_distributed = type(optimizer).__module__.startswith("torch.distributed")
        groups = optimizer.param_groups
        parameters = {id(parameter) for group in groups for parameter in group["params"]}
        parameters = {id(parameter) for parameter in optimizer.state} or parameters
        return bool(parameters) and not is_distributed and parameters <= self._replicated

    def _note_settings(self, optimizer: torch.optim.Optimizer, path: Path) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for key, item in group.items():
                values = item if isinstance(item, tuple) else (item,)
                if all(map(_is_json_value, values)):
                    place = show_path((*path, "param_groups", number, key))
                    self._packed.settings[place] = item

    def _module(
        self,
        module: torch.nn.Module,
        state: collections.OrderedDict[str, Any],
        path: Path,
        kind: Kind,
    ) -> Tree:
        kinds: dict[str, Kind] = {}
        if kind == "main":
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in self._replicated:
                    kinds[plain_key(name)] = "common"
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if buffer.numel() * buffer.element_size() <= _MAX_LOCAL_BYTES:
                    kinds[plain_key(name)] = "local"

        items = []
        for key, item in state.items():
            plain = plain_key(key)
            items.append([plain, self.tree(item, (*path, plain), kinds.get(plain, kind))])
        return {"OrderedDict": items}

    # --- tensors

    def _tensor(self, value: Tensor, path: Path, kind: Kind) -> Tree:
        check_tensor(value, path)
        value = value.detach()
        if is_sharded(value):
            return self._sharded(value, path)
        memory = (
            value.data_ptr(),
            value.dtype,
            value.device,
            value.shape,
            value.stride(),
            value.is_conj(),
            value.is_neg(),
            kind,
        )
        name = self._named.get(memory) if value.numel() else None  # tied weights are written once
        if name is None:
            name = self._named[memory] = self._free_name(show_path(path, "state"))
            self._packed.tensors[name], self._packed.kinds[name] = value, kind

        dtype = str(value.dtype).removeprefix("torch.")
        tree: dict[str, Tree] = {"tensor": name, "dtype": dtype, "shape": list(value.shape)}
        if not value.is_contiguous() and is_dense(value.shape, value.stride()):
            tree["stride"] = list(value.stride())  # such as channels_last
        return tree

    def _sharded(self, value: DTensor, path: Path) -> Tree:
        shard = shard_of(value, path)
        memory = (shard.local.untyped_storage().data_ptr(), value.shape, value.dtype)
        name = self._named.get(memory) if memory[0] else None  # tied weights are written once
        if name is None:
            name = self._named[memory] = self._free_name(show_path(path, "state"))
            self._packed.shards[name] = shard
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": name, "dtype": dtype, "shape": list(value.shape), "sharded": True}

    def _free_name(self, name: str) -> str:
        # Names clash in {"a": {"b": x}, "a/b": y}, or for the keys 1 and "1"; safetensors
        # reserves "__metadata__".
        taken = (self._packed.tensors, self._packed.shards, {"__metadata__"})
        free, count = name, 1
        while any(free in names for names in taken):
            count += 1
            free = f"{name}#{count}"
        return free


def _is_json_value(value: Any) -> bool:
    """Whether JSON in the file's header stores a value unchanged."""
    cls = type(value)
    if cls is int:
        return bool(-(2**63) <= value < 2**64)
    return cls is str or cls in ATOMS


_OBJECT_TAGS = ("object", "per rank")  # restored into an existing object of the state


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a value from pack()'s output; an object becomes its state_dict().

    Raises StateError for a tree that pack() does not write.
    """
    return Unpacker(tensors).value(tree, ())


class Unpacker:
    """Builds values from trees."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._strided: dict[str, Tensor] = {}  # name -> tensor: a tensor used twice stays one

    def value(self, tree: Tree, path: Path) -> Any:
        """Return the value of a tree. Raises StateError, with the name of the entry."""
        if type(tree) not in (dict, list):
            return tree
        check_depth(path)
        if type(tree) is list:
            return [
                item if type(item) in ATOMS else self.value(item, (*path, index))
                for index, item in enumerate(tree)
            ]
        try:
            return self._tagged(tag_of(tree), tree, path)
        except StateError:
            raise
        except ImportError as error:
            raise StateError(
                f"{show_path(path)} was saved as {kind_of(tree)}, but numpy cannot be imported: "
                f"{error}. Install it"
            ) from error
        except Exception as error:
            raise StateError(
                f"{show_path(path)}: the checkpoint holds an invalid {kind_of(tree)}: "
                f"{type(error).__name__}: {str(error)[:200]}. Was the file changed?"
            ) from error

    def _tagged(self, tag: str, tree: dict[str, Tree], path: Path) -> Any:
        content = tree[tag]
        if tag == "tensor":
            return self._tensor(tree)
        if tag in MAPPINGS:
            found = MAPPINGS[tag]()
            for key, item in self.pairs(tree, path):
                found[key] = self.value(item, (*path, key))
            return found
        if tag == "tuple":
            return tuple(self.value(content, path))
        if tag == "object":
            return self.value(tree["state"], path)
        if tag == "int":
            return int(content, 16)
        if tag == "complex":
            return complex(*content)
        if tag == "bytes":
            is_text = type(content) is str
            return (
                base64.b64decode(content, validate=True)
                if is_text
                else bytes(self._tensor(content).numpy())
            )
        if tag in ("array", "numpy scalar"):
            array = self._tensor(content).contiguous().numpy().copy()
            return array if tag == "array" else array[()]
        raise ValueError(f"expected plain data where it has {tag[:100]!r}")

    def pairs(self, tree: dict[str, Tree], path: Path) -> list[tuple[Any, Tree]]:
        """Return the keys of a mapping, and the tree of each value."""
        content = tree[tag_of(tree)]
        if type(content) is dict:
            return list(content.items())
        return [(self.value(key, (*path, "key")), item) for key, item in content]

    def _tensor(self, tree: dict[str, Tree]) -> Tensor:
        name, dtype, shape = tree["tensor"], DTYPES[tree["dtype"]], tree["shape"]
        found = self._tensors[name]
        if is_sharded(found):
            return found
        if found.dtype is not dtype or list(found.shape) != shape:
            raise ValueError(f"its tensor is {found.dtype}{list(found.shape)}")
        if "stride" in tree:
            strides = tree["stride"]
            if not is_dense(shape, strides):
                raise ValueError("its strides do not match its shape")
            strided = torch.empty_strided(shape, strides, dtype=dtype)
            found = self._strided.setdefault(f"{name} {strides}", strided.copy_(found))
        return found


# --- descriptions of trees


def tag_of(tree: Tree) -> str:
    """Return the first key of a tree, which names its kind; "" for plain data."""
    return next(iter(tree), "?") if type(tree) is dict else ""


def kind_of(tree: Tree) -> str:
    """Return the kind of value in a tree, for messages."""
    tag = tag_of(tree) or type(tree).__name__
    return str(tree[tag])[:100] if tag == "object" else tag[:100]


def holds_objects(tree: Tree) -> bool:
    """Whether a tree contains, at any depth, a value that needs an object to be restored into."""
    if type(tree) is list:
        return any(holds_objects(item) for item in tree if type(item) in (list, dict))
    if type(tree) is not dict:
        return False
    tag = tag_of(tree)
    content = tree.get(tag)
    items = content.values() if type(content) is dict and tag == "dict" else [content]
    return tag in _OBJECT_TAGS or any(map(holds_objects, items))
