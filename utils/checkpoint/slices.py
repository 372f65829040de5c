"""Which part of a sharded tensor each rank holds, and how a tensor is put together from parts.

A sharded tensor is a DTensor, as fully_shard() and tensor parallelism make them. Each of its slices
is a box: the offsets of its first element in the whole tensor, and its sizes. It is written once:
of the ranks that hold equal slices (HSDP), the first one writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .entries import DTYPES, Path, StateError, Tree, is_sharded, plain_key, show_path, unwrap, walk

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def overlap(self, other: Box) -> Box:
        """Return what two boxes of one tensor share; its sizes are 0 if that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(max, starts, map(min, self.ends(), other.ends()))
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def meets(self, other: Box) -> bool:
        """Return whether two boxes share elements, or are equal."""
        return self == other or 0 not in self.overlap(other).sizes

    def ends(self) -> tuple[int, ...]:
        return tuple(one + size for one, size in zip(self.offsets, self.sizes, strict=True))

    def of(self, tensor: Tensor, held: Box) -> Tensor:
        """Return the view of this box in a tensor that holds the box `held`."""
        for dimension, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, start - held.offsets[dimension], size)
        return tensor


class Shard(NamedTuple):
    """What this rank holds of a sharded tensor."""

    local: Tensor
    box: Box
    shape: tuple[int, ...]  # of the whole tensor
    is_written: bool  # by this rank


def shard_of(value: DTensor, path: Path) -> Shard:
    """Return this rank's part of a sharded tensor. StateError for a layout without one box."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    coordinate, placements = value.device_mesh.get_coordinate(), value.placements
    if coordinate is None or any(type(one) not in (Replicate, Sharded) for one in placements):
        raise StateError(
            f"{show_path(path)} is a DTensor with placements {list(placements)} on "
            f"{value.device_mesh}; expected Shard and Replicate, and this rank in the mesh. "
            "Redistribute it, or leave it out"
        )
    local = value.to_local()
    chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as torch.distributed.checkpoint finds it
    box = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if chunks else None
    if box is None or box.sizes != tuple(local.shape):  # an empty part
        box = Box((0,) * local.dim(), tuple(local.shape))
    copies = [
        number
        for number, placement in zip(coordinate, placements, strict=True)
        if isinstance(placement, Replicate)
    ]
    is_written = local.numel() > 0 and not any(copies)
    return Shard(local, box, tuple(value.shape), is_written)


def like(value: DTensor, local: Tensor) -> DTensor:
    """Return a sharded tensor with the layout of `value`, and another local part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(value.to_local().device),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def tensor_entries(tree: Tree) -> Iterator[dict[str, Any]]:
    """Yield the trees of all tensors in a tree."""
    remaining = [tree]
    while remaining:
        inner = remaining.pop()
        if type(inner) is dict:
            if "tensor" in inner and "dtype" in inner:
                yield inner
            remaining.extend(inner.values())
        elif type(inner) is list:
            remaining.extend(inner)


def layouts(state: Any, tree: Tree) -> dict[str, DTensor]:
    """Return the tensors of a state whose layouts the saved ones get, by the names of these.

    An optimizer that has made no step has no state yet: it gets the layout of its parameters.
    """
    found: dict[str, DTensor] = {}
    for path, value in walk(state):
        inner, saved = unwrap(value), _at(tree, path)
        if is_sharded(inner) and type(saved) is dict and "tensor" in saved:
            found[saved["tensor"]] = inner
        elif isinstance(inner, torch.nn.Module) and type(saved) is dict:
            entries = dict(_pairs(saved.get("state")))
            for key, tensor in inner.state_dict().items():
                entry = entries.get(plain_key(key))
                if is_sharded(tensor) and type(entry) is dict and "tensor" in entry:
                    found[entry["tensor"]] = tensor
    for path, value in walk(state):
        optimizer, saved = unwrap(value), _at(tree, path)
        if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(saved, dict):
            continue
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        for number, of_parameter in _pairs(_at(saved.get("state"), ("state",))):
            if isinstance(number, int) and number < len(parameters):
                parameter = parameters[number]
                for entry in tensor_entries(of_parameter):
                    if is_sharded(parameter) and list(parameter.shape) == entry["shape"]:
                        found[entry["tensor"]] = parameter
    return found


def _pairs(tree: Tree) -> list[tuple[Any, Tree]]:
    if type(tree) is not dict:
        return []
    content = next(iter(tree.values()), None)
    if type(content) is dict:
        return list(content.items())
    return [(pair[0], pair[1]) for pair in content] if type(content) is list else []


def _at(tree: Tree, path: Path) -> Tree:
    """Return the tree at a place of the state; None where there is none."""
    for key in path:
        if type(tree) is dict and "tuple" in tree:
            tree = tree["tuple"]
        if type(tree) is list:
            tree = tree[key] if isinstance(key, int) and key < len(tree) else None
        else:
            tree = next((item for name, item in _pairs(tree) if name == key), None)
    return tree


def assemble(entry: Mapping[str, Any], box: Box, parts: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """Return a box of a tensor, from parts that cover it. StateError where they do not.

    entry: its tree, with "dtype" and "shape".
    """
    for held, part in parts:
        if held == box:
            return part
    found = torch.empty(box.sizes, dtype=DTYPES[entry["dtype"]])
    missing = found.numel()
    for held, part in parts:
        shared = box.overlap(held)
        shared.of(found, box).copy_(shared.of(part, held))
        missing -= shared.of(found, box).numel()
    if missing:
        raise StateError(f"{entry['tensor']}: the checkpoint lacks {missing} of its elements")
    return found
