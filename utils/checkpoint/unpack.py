"""Put values together again from the tree and the tensors of pack().

Reading never imports or calls what a file names.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .entries import (
    ATOMS,
    DTYPES,
    MAPPINGS,
    Path,
    StateError,
    Tree,
    check_depth,
    is_dense,
    is_sharded,
    show_path,
)

_OBJECT_TAGS = ("object", "per rank")  # restored into an object of the given state


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Return what pack() took apart; an object is returned as its state_dict().

    Raises StateError for a tree that pack() does not write.
    """
    return Unpacker(tensors).value(tree, ())


class Unpacker:
    """Builds values from trees."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._strided: dict[str, Tensor] = {}  # so that one tensor stays one

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
        """Return keys and trees of a mapping."""
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
    """Return the first key of a tree, which identifies what it holds; "" for plain data."""
    return next(iter(tree), "?") if type(tree) is dict else ""


def kind_of(tree: Tree) -> str:
    """Return what a tree holds, for messages."""
    tag = tag_of(tree) or type(tree).__name__
    return str(tree[tag])[:100] if tag == "object" else tag[:100]


def holds_objects(tree: Tree) -> bool:
    """Return whether a tree holds, at any depth, what can only be restored into an object."""
    if type(tree) is list:
        return any(holds_objects(item) for item in tree if type(item) in (list, dict))
    if type(tree) is not dict:
        return False
    tag = tag_of(tree)
    content = tree.get(tag)
    items = content.values() if type(content) is dict and tag == "dict" else [content]
    return tag in _OBJECT_TAGS or any(map(holds_objects, items))
