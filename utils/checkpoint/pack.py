"""Take the state of a training apart: a plain tree for JSON, and named tensors.

Nothing is pickled. What a state may hold, and how it is restored:

- In place, into the object at the same place of the state: objects with state_dict() and
  load_state_dict(), tensors, random number generators (torch, random.Random, numpy), dataclasses
  that are not frozen, and all that these hold.
- As a new value: None, numbers, strings, bytes, numpy arrays (masked ones too), paths, dates,
  Decimal, Fraction, torch.dtype, torch.device; dict, OrderedDict, Counter, defaultdict, list,
  tuple, set, frozenset, deque of these.
- As a new value of a class of which the state holds an instance, anywhere: namedtuple, Enum,
  frozen dataclass. A defaultdict whose factory is not a type of Python takes it from the
  defaultdict at the same place.

Anything else is rejected, and the error names its position: tensors that are sparse, quantised, on
the meta device or sharded over the ranks, lazy modules that have not run, numpy arrays of Python
objects, more than 100 levels of nesting.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .entries import (
    ATOMS,
    MAPPINGS,
    SEQUENCES,
    Path,
    PerRank,
    check_depth,
    check_module,
    check_optimizer,
    check_tensor,
    factory_name,
    field_names,
    is_dataclass,
    is_dense,
    is_namedtuple,
    is_stateful,
    overlaps_itself,
    plain_key,
    show_path,
    state_of,
    type_name,
    unwrap,
)
from .optimizers import describe_parameters, parameter_names
from .values import (
    StateError,
    Tree,
    encode_array,
    encode_value,
    generator_kind,
    generator_state,
    is_array,
    is_masked_array,
)

Tensors = dict[str, Tensor]  # by their names in the file

_LONG = 64 << 10  # bytes or characters; longer values are tensors of the file
_MAX_LOCAL_BYTES = 1 << 20  # of a buffer: running statistics are smaller, masks are larger


@dataclass
class Packed:
    """A state as it is written: trees of plain data, and the tensors that they name."""

    tree: Tree = None
    own: dict[str, Tree] = field(default_factory=dict)  # trees of the PerRank parts, by place
    common: Tensors = field(default_factory=dict)  # equal on all ranks: any of them may write it
    main: Tensors = field(default_factory=dict)  # rank 0 writes it, as rank 0 has it
    local: Tensors = field(default_factory=dict)  # each rank writes its own: small buffers
    mine: Tensors = field(default_factory=dict)  # each rank writes its own: PerRank parts
    # of the optimizers of replicated parameters: equal on all ranks
    settings: dict[str, Tree] = field(default_factory=dict)


def pack(state: Any, replicated: frozenset[int] = frozenset()) -> Packed:
    """Take a state apart. The tensors are not copied.

    replicated: id() of the parameters that are equal on all ranks.
    Raises StateError for what cannot be saved.
    """
    packed = Packed()
    packer = _Packer(packed, replicated, parameter_names(state))
    packed.tree = packer.tree(state, (), packed.main)
    return packed


class _Packer:
    """Builds the tree of a state. The argument `target` is where a value's tensors go in Packed."""

    def __init__(
        self, packed: Packed, replicated: frozenset[int], names: Mapping[int, str]
    ) -> None:
        self._packed, self._replicated, self._names = packed, replicated, names
        self._named: dict[tuple[object, ...], str] = {}  # tensors that have a name already

    def tree(self, value: Any, path: Path, target: Tensors) -> Tree:
        """Return the tree of a value."""
        if _is_json_value(value):
            return value
        check_depth(path)
        container = self._container(value, path, target)
        if container is not None:
            return container

        if isinstance(value, PerRank):
            return self._per_rank(value, path, target)
        if isinstance(value, Tensor):
            return self._tensor(value, path, target)
        if generator := generator_kind(value):
            state = self.tree(generator_state(value), (*path, "state"), target)
            return {"generator": generator, "state": state}
        if type(value) in (bytes, bytearray, str) and len(value) >= _LONG:
            raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            return {"long": type(value).__name__, "data": self._tensor(data, path, target)}

        try:
            if is_masked_array(value):
                return self._masked_array(value, path, target)
            if is_array(value):
                return self._array(value, path, target)
            found = encode_value(value)
        except StateError:
            raise
        except ValueError as error:
            raise StateError(f"{show_path(path)} {error}") from error
        return self._instance(value, path, target) if found is None else found

    # --- containers

    def _container(self, value: Any, path: Path, target: Tensors) -> Tree:
        """Return the tree of a container of Python's own; None for another value."""
        cls = type(value)
        if cls is list:
            return self._items(value, path, target)
        for name, mapping in MAPPINGS.items():
            if cls is mapping:
                return self._mapping(name, value, path, target)
        if cls is collections.defaultdict:
            items = self._mapping("OrderedDict", value, path, target)["OrderedDict"]
            return {"defaultdict": items, "factory": factory_name(value)}
        for name, sequence in SEQUENCES.items():
            if cls is sequence:
                tree = {name: self._items(value, path, target)}
                return {**tree, "maxlen": value.maxlen} if name == "deque" else tree
        return None

    def _items(self, values: Any, path: Path, target: Tensors) -> list[Tree]:
        return [
            item if _is_json_value(item) else self.tree(item, (*path, index), target)
            for index, item in enumerate(values)
        ]

    def _mapping(self, name: str, value: dict[Any, Any], path: Path, target: Tensors) -> Tree:
        if name == "dict" and all(type(key) is str for key in value):
            items = {key: self.tree(item, (*path, key), target) for key, item in value.items()}
            return {"dict": items}

        for key in value:
            if isinstance(key, Tensor | PerRank) or generator_kind(key) or is_stateful(key):
                raise StateError(
                    f"{show_path(path)} has a key of type {type_name(key)}; expected a number, a "
                    "string or another value that is compared by its content. Use its name"
                )
        pairs = [
            [self.tree(key, (*path, "key"), target), self.tree(item, (*path, key), target)]
            for key, item in value.items()
        ]
        tree: dict[str, Tree] = {name: pairs}
        metadata = getattr(value, "_metadata", None)  # versions, from torch.nn.Module.state_dict()
        if metadata is not None:
            tree["metadata"] = self.tree(dict(metadata), path, target)
        return tree

    def _per_rank(self, value: PerRank, path: Path, target: Tensors) -> Tree:
        if target is self._packed.mine:
            raise StateError(
                f"{show_path(path)} is PerRank inside of PerRank. Mark the outer one alone"
            )
        tree = self.tree(value.value, (*path, "own"), self._packed.mine)
        self._packed.own[show_path(path)] = tree
        return {"per rank": show_path(path)}

    # --- numpy

    def _array(self, value: Any, path: Path, target: Tensors) -> Tree:
        if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
            raise ValueError(
                f"is a {type_name(value)}; expected an ordinary or a masked numpy array. "
                "Convert it with numpy.array(value, subok=False)"
            )
        fields, data = encode_array(value)
        return {"array": fields, "data": self._tensor(data, path, target)}

    def _masked_array(self, value: Any, path: Path, target: Tensors) -> Tree:
        import numpy

        mask = None
        if value.mask is not numpy.ma.nomask:
            mask = self._array(value.mask, (*path, "mask"), target)
        fill_value = numpy.asarray(value.fill_value)
        return {
            "masked array": self._array(value.data, path, target),
            "mask": mask,
            "hard": value.hardmask,
            "fill": self._array(fill_value, (*path, "fill_value"), target),
        }

    # --- objects

    def _instance(self, value: Any, path: Path, target: Tensors) -> Tree:
        inner, cls = unwrap(value), type(value)
        if is_stateful(inner):
            return self._object(inner, path, target)
        if isinstance(value, enum.Enum):
            if value.name in cls.__members__:
                return {"enum": cls.__qualname__, "member": self.tree(value.name, path, target)}
            return {"enum": cls.__qualname__, "value": self.tree(value.value, path, target)}
        if is_namedtuple(value):
            items = {
                name: self.tree(item, (*path, name), target)
                for name, item in zip(cls._fields, value, strict=True)
            }
            return {"namedtuple": cls.__qualname__, "fields": items}
        if is_dataclass(value):
            return self._dataclass(value, path, target)
        raise StateError(
            f"{show_path(path)} is of type {type_name(value)}; expected tensors, numpy arrays, "
            "numbers, strings, None, paths, dates, dataclasses, containers of these, and objects "
            "with state_dict() and load_state_dict(). Convert it, or leave it out"
        )

    def _dataclass(self, value: Any, path: Path, target: Tensors) -> Tree:
        cls, names = type(value), field_names(value)
        missing = [name for name in names if not hasattr(value, name)]
        added = [name for name in getattr(value, "__dict__", ()) if name not in names]
        if missing or added:
            found = f"has the attribute {added[0]!r}, not a field" if added else ""
            found = f"lacks its field {missing[0]!r}" if missing else found
            raise StateError(
                f"{show_path(path)} is a {cls.__qualname__} that {found}; expected values for all "
                "fields and nothing else. Give the class state_dict() and load_state_dict()"
            )
        fields = {name: self.tree(getattr(value, name), (*path, name), target) for name in names}
        return {"dataclass": cls.__qualname__, "fields": fields}

    def _object(self, value: Any, path: Path, target: Tensors) -> Tree:
        """Return the tree of an object with state_dict()."""
        name = type(value).__name__
        if isinstance(value, torch.nn.Module):
            check_module(value, path)
        check_optimizer(value, path)
        state = state_of(value, path)

        if isinstance(value, torch.optim.Optimizer):
            if target is self._packed.main and self._is_replicated(value):
                target = self._packed.common
                self._note_settings(value, path)
            return {
                "object": name,
                "state": self.tree(state, path, target),
                "parameters": describe_parameters(value, self._names),
            }
        if isinstance(value, torch.nn.Module) and type(state) is collections.OrderedDict:
            return {"object": name, "state": self._module(value, state, path, target)}
        return {"object": name, "state": self.tree(state, path, target)}

    def _is_replicated(self, optimizer: torch.optim.Optimizer) -> bool:
        # Optimizers of torch.distributed keep a different state on each rank.
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
        target: Tensors,
    ) -> Tree:
        targets: dict[str, Tensors] = {}
        if target is self._packed.main:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in self._replicated:
                    targets[name] = self._packed.common
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if buffer.numel() * buffer.element_size() <= _MAX_LOCAL_BYTES:
                    targets[name] = self._packed.local

        items = []
        for key, item in state.items():
            plain = plain_key(key)
            place = (*path, plain)
            if isinstance(item, Tensor) and overlaps_itself(item):
                raise StateError(
                    f"{show_path(place)} is an expanded tensor, into which load_state_dict() "
                    "cannot copy; expected one with memory for every element. Register a "
                    "contiguous() one"
                )
            items.append([plain, self.tree(item, place, targets.get(key, target))])
        metadata = {plain_key(key): item for key, item in getattr(state, "_metadata", {}).items()}
        return {"OrderedDict": items, "metadata": self.tree(metadata, path, target)}

    # --- tensors

    def _tensor(self, value: Tensor, path: Path, target: Tensors) -> Tree:
        check_tensor(value, path)
        value = value.detach()
        memory = (
            value.data_ptr(),
            value.dtype,
            value.device,
            value.shape,
            value.stride(),
            value.is_conj(),
            value.is_neg(),
            id(target),
        )
        name = self._named.get(memory) if value.numel() else None  # tied weights are written once
        if name is None:
            name = self._named[memory] = self._free_name(show_path(path, "state"))
            target[name] = value

        dtype = str(value.dtype).removeprefix("torch.")
        tree: dict[str, Tree] = {"tensor": name, "dtype": dtype, "shape": list(value.shape)}
        if not value.is_contiguous() and is_dense(value.shape, value.stride()):
            tree["stride"] = list(value.stride())  # channels_last and the like
        return tree

    def _free_name(self, name: str) -> str:
        # {"a": {"b": x}, "a/b": y}, or the keys 1 and "1". safetensors reserves "__metadata__".
        packed = self._packed
        taken = (packed.common, packed.main, packed.local, packed.mine, {"__metadata__"})
        free, count = name, 1
        while any(free in names for names in taken):
            count += 1
            free = f"{name}#{count}"
        return free


def _is_json_value(value: Any) -> bool:
    """Return whether JSON holds a value unchanged, in the header of the file."""
    cls = type(value)
    if cls is int:
        return bool(-(2**63) <= value < 2**64)
    return cls in ATOMS or cls is str and len(value) < _LONG
