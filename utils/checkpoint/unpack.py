"""Put a state together again from the tree and the tensors of pack().

Reading never imports or calls what a file names. The files are untrusted input: every type
and every number is checked before it is used.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checksums import memory
from .entries import (
    ATOMS,
    FACTORIES,
    MAPPINGS,
    SEQUENCES,
    Path,
    check_depth,
    field_names,
    is_dense,
    show_path,
)
from .values import DTYPES, StateError, Tree, checked_shape, decode_array, decode_value, is_value

CLASS_TAGS = ("dataclass", "namedtuple", "enum")  # restored as a class of the given state
_OBJECT_TAGS = ("object", "generator", "per rank")  # restored into an object of the given state


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Return what pack() took apart; an object is returned as its state_dict().

    Raises StateError for a tree that pack() does not write, and for classes of the user.
    """
    return Unpacker(tensors).value(tree, ())


class Unpacker:
    """Builds values from trees.

    copies: whether tensors get memory of their own, so that they do not keep a whole file.
    The attribute `classes` holds the classes of the user, by tag and name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, copies: bool = False) -> None:
        self._tensors, self._copies = tensors, copies
        self.classes: dict[tuple[str, str], type[Any]] = {}
        self._copied: dict[str, Tensor] = {}  # so that one tensor stays one

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
            return self._tagged(tree, path)
        except StateError:
            raise
        except ImportError as error:
            raise StateError(
                f"{show_path(path)} was saved as {kind_of(tree)}, but numpy cannot be imported: "
                f"{error}. Install it"
            ) from error
        except Exception as error:
            raise _invalid(tree, path, error) from error

    def mapping(self, tree: dict[str, Tree], path: Path) -> dict[Any, Tree]:
        """Return the trees of a mapping by their keys."""
        try:
            return dict(self._pairs(tree, path))
        except StateError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise _invalid(tree, path, error) from error

    def _tagged(self, tree: dict[str, Tree], path: Path) -> Any:
        tag = tag_of(tree)
        if tag == "tensor":
            return self._tensor(tree)
        if tag in MAPPINGS:
            return self._mapping(tag, tree, path)
        if tag == "defaultdict":
            return self._defaultdict(tree, path)
        if tag in SEQUENCES:
            items = self._items(tree, path)
            if tag == "deque":
                return collections.deque(items, tree["maxlen"])
            return SEQUENCES[tag](items)
        if tag == "object":
            return self.value(tree["state"], path)
        if tag == "long":
            return self._long(tree)
        if tag == "array":
            return decode_array(tree["array"], self._bytes(tree["data"]))
        if tag == "masked array":
            return self._masked_array(tree, path)
        if tag in CLASS_TAGS:
            return self._instance(tag, tree, path)
        if is_value(tag):
            return decode_value(tag, tree)
        raise StateError(
            f"{show_path(path)}: the checkpoint holds {tag[:100]!r} where plain data was expected"
        )

    # --- containers

    def _mapping(self, tag: str, tree: dict[str, Tree], path: Path) -> Any:
        mapping = MAPPINGS[tag]()
        for key, value in self._pairs(tree, path):
            mapping[key] = self.value(value, (*path, key))
        if "metadata" in tree:
            mapping._metadata = self.value(tree["metadata"], path)
        return mapping

    def _defaultdict(self, tree: dict[str, Tree], path: Path) -> Any:
        name = tree["factory"]
        if name is not None and name not in FACTORIES:
            raise StateError(
                f"{show_path(path)} was saved as a defaultdict whose factory is {name!r}, which a "
                "checkpoint cannot hold. Put a defaultdict with that factory at this place of the "
                "state"
            )
        items = [(key, self.value(value, (*path, key))) for key, value in self._pairs(tree, path)]
        return collections.defaultdict(None if name is None else FACTORIES[name], items)

    def _pairs(self, tree: dict[str, Tree], path: Path) -> list[tuple[Any, Tree]]:
        """Return keys and trees of a mapping."""
        content = tree[tag_of(tree)]
        if type(content) is dict:
            return list(content.items())
        return [(self.value(key, (*path, "key")), value) for key, value in content]

    def _items(self, tree: dict[str, Tree], path: Path) -> list[Any]:
        content = tree[tag_of(tree)]
        if type(content) is not list:
            raise ValueError("its items are not a list")
        items: list[Any] = self.value(content, path)
        return items

    # --- tensors and arrays

    def _tensor(self, tree: dict[str, Tree]) -> Tensor:
        name, dtype, shape = tree["tensor"], DTYPES[tree["dtype"]], checked_shape(tree["shape"])
        key = f"{name} {dtype} {shape} {tree.get('stride')}"
        if key in self._copied:
            return self._copied[key]

        found = self._tensors[name]
        if found.dtype is not dtype:  # safetensors does not have the type
            if found.dtype is not torch.uint8:
                raise ValueError(f"its tensor is of type {found.dtype}; expected {dtype}")
            found = found.view(dtype)
        found = found.view(shape)

        if "stride" in tree:
            strides = checked_shape(tree["stride"])
            if not is_dense(shape, strides):
                raise ValueError("its strides do not match its shape")
            found = torch.empty_strided(shape, strides, dtype=dtype).copy_(found)
        elif self._copies:
            found = found.clone(memory_format=torch.contiguous_format)
        if self._copies:
            self._copied[key] = found
        return found

    def _bytes(self, tree: Tree) -> Tensor:
        found = self._tensors[tree["tensor"]]
        if found.dtype is not torch.uint8 or found.dim() != 1:
            raise ValueError("its tensor does not hold bytes")
        return found

    def _long(self, tree: dict[str, Tree]) -> Any:
        """Return a long string or long bytes, which were saved as a tensor."""
        kind = tree["long"]
        if kind not in ("bytes", "bytearray", "str"):
            raise ValueError("it is neither bytes nor a string")
        raw = bytearray(memory(self._bytes(tree["data"]).contiguous()))
        if kind == "str":
            return raw.decode("utf-8", "surrogatepass")
        return raw if kind == "bytearray" else bytes(raw)

    def _masked_array(self, tree: dict[str, Tree], path: Path) -> Any:
        import numpy

        data, fill = self.value(tree["masked array"], path), self.value(tree["fill"], path)
        if not isinstance(data, numpy.ndarray) or type(tree["hard"]) is not bool:
            raise ValueError("it has no data")

        mask = numpy.ma.nomask
        if tree["mask"] is not None:
            mask = self.value(tree["mask"], path)
            expected = numpy.ma.make_mask_descr(data.dtype)
            if mask.shape != data.shape or mask.dtype != expected:
                raise ValueError("its mask does not match its data")
        return numpy.ma.MaskedArray(data, mask=mask, fill_value=fill[()], hard_mask=tree["hard"])

    # --- classes of the user

    def _instance(self, tag: str, tree: dict[str, Tree], path: Path) -> Any:
        cls = self.classes.get((tag, tree[tag]))
        if cls is None:
            raise StateError(
                f"{show_path(path)} was saved as the {tag} {str(tree[tag])[:100]}; expected an "
                "instance of it in the state, because no class is imported for a file. "
                "Put one into the state"
            )
        if tag == "enum":
            return cls[tree["member"]] if "member" in tree else cls(self.value(tree["value"], path))

        fields = tree["fields"]
        names = list(getattr(cls, "_fields", ())) or field_names(cls)
        if list(fields) != names:
            raise StateError(
                f"{show_path(path)} is the {tag} {cls.__qualname__} with the fields "
                f"{', '.join(names)}, but was saved with {', '.join(fields)[:200]}. Resume with "
                "the same fields"
            )
        values = {name: self.value(value, (*path, name)) for name, value in fields.items()}
        return cls._make(values.values()) if tag == "namedtuple" else new_dataclass(cls, values)


def new_dataclass(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance with these fields, frozen or not, without calling its __init__."""
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _invalid(tree: Tree, path: Path, error: Exception) -> StateError:
    return StateError(
        f"{show_path(path)}: the checkpoint holds an invalid {kind_of(tree)}: "
        f"{type(error).__name__}: {str(error)[:200]}. Was the file changed?"
    )


# --- descriptions of trees


def tag_of(tree: Tree) -> str:
    """Return the first key of a tree, which identifies what it holds; "" for plain data."""
    return next(iter(tree), "?") if type(tree) is dict else ""


def kind_of(tree: Tree) -> str:
    """Return what a tree holds, for messages."""
    tag = tag_of(tree) or type(tree).__name__
    return str(tree[tag])[:100] if tag in ("object", "generator", *CLASS_TAGS) else tag[:100]


def tags(tree: Tree) -> set[str]:
    """Return the tags of a tree and of all that it contains."""
    found, remaining = set(), [tree]
    while remaining:
        inner = remaining.pop()
        if type(inner) is list:
            remaining.extend(item for item in inner if type(item) in (list, dict))
        elif type(inner) is dict:
            tag = tag_of(inner)
            found.add(tag)
            remaining.append(inner.get("state"))
            for content in (inner.get(tag), inner.get("fields")):
                remaining.extend(content.values() if type(content) is dict else [content])
    return found


def holds_objects(tree: Tree) -> bool:
    """Return whether a tree holds what can only be restored into an object."""
    return not tags(tree).isdisjoint(_OBJECT_TAGS)
