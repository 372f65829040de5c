"""Find each rank's part of a sharded tensor, and put a tensor together from parts.

A sharded tensor is a DTensor from fully_shard() or tensor parallelism. Each of its slices is a box:
the offsets of its first element in the whole tensor, and its sizes. It is written once: if several
ranks hold equal slices (HSDP), the first of them writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .entries import DTYPES, Path, StateError, Tree, is_sharded, plain_key, show_path, unwrap, walk
from .rank_file import allocate, memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A box-shaped part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Box) -> Box:
        """Return the intersection of two boxes of one tensor; its sizes have a 0 if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(max, starts, map(min, self.ends(), other.ends()))
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def of(self, tensor: Tensor, held: Box) -> Tensor:
        """Return a view of this box in a tensor that holds the box `held`."""
        for dimension, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, start - held.offsets[dimension], size)
        return tensor


class Shard(NamedTuple):
    """This rank's part of a sharded tensor."""

    local: Tensor
    box: Box
    is_written: bool  # whether this rank writes it
    layout: tuple[object, ...]  # equal for two tensors if every rank holds equal slices of both


def shard_of(value: DTensor, path: Path) -> Shard:
    """Return this rank's part of a sharded tensor. Raises StateError if it is not one box."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    coordinate, placements = value.device_mesh.get_coordinate(), value.placements
    if coordinate is None or any(
        type(placement) not in (Replicate, Sharded) for placement in placements
    ):
        raise StateError(
            f"{show_path(path)} is a DTensor with placements {list(placements)} on "
            f"{value.device_mesh}; expected Shard and Replicate, and this rank in the mesh. "
            "Redistribute it, or leave it out"
        )
    local = value.to_local()
    chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as torch.distributed.checkpoint finds it
    box = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if chunks else None
    if box is None or box.sizes != tuple(local.shape):  # the part is empty
        box = Box((0,) * local.dim(), tuple(local.shape))
    copies = [
        number
        for number, placement in zip(coordinate, placements, strict=True)
        if isinstance(placement, Replicate)
    ]
    is_written = local.numel() > 0 and not any(copies)
    return Shard(local, box, is_written, (value.shape, placements, value.device_mesh))


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
    """Return saved tensor name -> tensor of the state whose layout it gets.

    An optimizer that has made no step has no state yet: its parameters' layout is used.
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
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
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
    """Return the tree at a path; None if there is none."""
    for key in path:
        if type(tree) is dict and "tuple" in tree:
            tree = tree["tuple"]
        if type(tree) is list:
            tree = tree[key] if isinstance(key, int) and key < len(tree) else None
        else:
            tree = next((item for name, item in _pairs(tree) if name == key), None)
    return tree


class Needed:
    """The part of a saved tensor that a rank needs, and the data read so far.

    entry: the tree of the tensor, with "tensor", "dtype" and "shape".
    layout: a sharded tensor of the state, whose layout it gets; None for the whole tensor.
    """

    def __init__(self, entry: Mapping[str, Any], layout: DTensor | None) -> None:
        self.name: str = entry["tensor"]
        self._layout = layout
        self._whole = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))
        self.box = self._whole if layout is None else shard_of(layout, (self.name,)).box
        self._local = allocate(self.box.sizes, DTYPES[entry["dtype"]])
        self._missing = self._local.numel()
        self._parts: list[tuple[Box, Tensor]] = []

    def piece(self, held: Box | None, start: int) -> tuple[int, memoryview]:
        """Return the offset to read from in a file that holds a slice, and the memory to fill.

        held: the slice; None for the whole tensor.
        start: offset of the slice's first byte in the file's data.
        """
        held = held or self._whole
        shared = self.box.overlap(held)
        place = shared.of(self._local, self.box)
        self._missing -= place.numel()
        if held == self.box:
            return start, memory(place)
        if self.box.sizes[1:] == shared.sizes[1:] == held.sizes[1:]:  # contiguous rows of the slice
            rows = shared.offsets[0] - held.offsets[0]
            return start + rows * place[0].nbytes, memory(place)
        part = allocate(held.sizes, self._local.dtype)
        self._parts.append((held, part))
        return start, memory(part)

    def copy_parts(self) -> None:
        """Copy the needed parts out of slices that were read whole."""
        for held, part in self._parts:
            shared = self.box.overlap(held)
            shared.of(self._local, self.box).copy_(shared.of(part, held))
        self._parts.clear()

    def tensor(self) -> Tensor:
        """Return the tensor. Raises StateError if the slices do not cover it."""
        if self._missing:
            raise StateError(f"{self.name}: the checkpoint lacks {self._missing} of its elements")
        return self._local if self._layout is None else like(self._layout, self._local)
