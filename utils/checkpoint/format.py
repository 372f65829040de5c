"""Render and parse manifests and safetensors headers. What is parsed is untrusted input."""

from __future__ import annotations

import json
import math
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from .checksums import BLOCK_BYTES

FORMAT = 3  # raise it whenever one version of the kit would misread checkpoints of another
MANIFEST = "manifest.json"

_MAX_COUNT = 1 << 62  # of bytes or elements
_MAX_DIMENSIONS = 64

# Tensors of all other types are stored as bytes; their type is in the tree of the state.
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


class Damaged(Exception):
    """Files differ from what was written. The message names file, field and reason."""


class Unreadable(Exception):
    """A checkpoint may be intact, but this process cannot use it."""


class FileEntry(TypedDict):
    """A rank's file in the manifest."""

    name: str
    size: int  # bytes
    blocks: Sequence[Sequence[Any]]  # (bytes, checksum) of each block
    replicated: bool  # whether it holds a part of the state that all ranks need


class Manifest(TypedDict):
    """The content of manifest.json, which also has a checksum of itself."""

    format: int
    step: int
    world_size: int
    metric: float | None
    files: list[FileEntry]  # by rank


@dataclass(frozen=True)
class TensorPlace:
    """Type and shape of a tensor, and where it is in the data of a file, in bytes."""

    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    end: int


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file: rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def place_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
    """Return where each tensor goes in the data of a file, largest elements first.

    In this order each tensor is aligned to its element size.
    """
    places, start = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = start + tensor.nbytes
        places[name] = TensorPlace(tensor.dtype, tuple(tensor.shape), start, end)
        start = end
    return places


def render_manifest(manifest: Manifest) -> bytes:
    """Return the text of manifest.json."""
    text = json.dumps(manifest)
    return f'{{"manifest": {text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def render_header(places: dict[str, TensorPlace], metadata: dict[str, str]) -> bytes:
    """Return the first bytes of a safetensors file: the length of its header, and the header."""
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, place in places.items():
        known = SAFETENSORS_TYPES.get(place.dtype)
        fields[name] = {
            "dtype": known or "U8",
            "shape": place.shape if known else [place.end - place.start],
            "data_offsets": [place.start, place.end],
        }
    text = json.dumps(fields).encode()
    text += b" " * (-(len(text) + 8) % 64)  # aligns the tensors when the file is in memory
    return len(text).to_bytes(8, "little") + text


def parse_manifest(raw: bytes) -> Manifest:
    """Return the manifest, with all fields checked. Raises Damaged or Unreadable."""
    try:
        fields = json.loads(raw)["manifest"]
        intact = render_manifest(fields) == raw
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{MANIFEST}: its text does not match its checksum")
    _expect(type(fields) is dict, "manifest", fields, "an object")

    number = fields.get("format")
    _expect(_is_count(number), "format", number, "a number")
    if number != FORMAT:
        writer = "an earlier" if number < FORMAT else "a later"
        raise Unreadable(
            f"it has format {number}, of {writer} version of the kit; expected format {FORMAT}. "
            "Continue with the version that wrote it, or start in another folder"
        )

    step, metric = fields.get("step"), fields.get("metric")
    _expect(_is_count(step), "step", step, "a number, 0 or more")
    finite = metric is None or type(metric) is float and math.isfinite(metric)
    _expect(finite, "metric", metric, "a finite number")

    world_size, files = fields.get("world_size"), fields.get("files")
    _expect(type(files) is list, "files", files, "a list")
    _expect(
        _is_count(world_size) and 0 < world_size == len(files),
        "world_size",
        world_size,
        f"{len(files)}, the number of files, and at least 1",
    )
    for rank, entry in enumerate(files):
        _check_entry(f"files[{rank}]", rank, entry)
    manifest: Manifest = fields
    return manifest


def _check_entry(place: str, rank: int, entry: Any) -> None:
    _expect(type(entry) is dict, place, entry, "an object")
    name, size, replicated = (entry.get(key) for key in ("name", "size", "replicated"))
    _expect(name == rank_file_name(rank), f"{place}.name", name, rank_file_name(rank))
    _expect(_is_count(size) and size >= 8, f"{place}.size", size, "a number of bytes, 8 or more")
    _expect(type(replicated) is bool, f"{place}.replicated", replicated, "true or false")

    blocks = entry.get("blocks")
    _expect(type(blocks) is list, f"{place}.blocks", blocks, "a list")
    for block in blocks:
        valid = (
            type(block) is list
            and len(block) == 2
            and _is_count(block[0])
            and 0 < block[0] <= BLOCK_BYTES
            and type(block[1]) is str
        )
        pairs = f"pairs of 1 to {BLOCK_BYTES} bytes and a checksum"
        _expect(valid, f"{place}.blocks", block, pairs)
    total = sum(block[0] for block in blocks)
    _expect(total == size, f"{place}.blocks", f"{total} bytes", f"{size} bytes, as its size")


def parse_header(
    raw: bytes, file: str, data_bytes: int
) -> tuple[dict[str, str], dict[str, TensorPlace]]:
    """Return metadata and tensors from the header of a safetensors file. Raises Damaged.

    raw: the header without its length.
    data_bytes: what follows the header; the tensors have to cover it without gaps.
    """
    try:
        fields = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file}: its header is invalid: {str(error)[:200]}") from None
    _expect(type(fields) is dict, "header", fields, "an object", file)

    metadata = fields.pop("__metadata__", {})
    texts = type(metadata) is dict and all(type(text) is str for text in metadata.values())
    _expect(texts, "__metadata__", metadata, "an object of strings", file)

    places = {name: _parse_place(reprlib.repr(name), field, file) for name, field in fields.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        _expect(
            place.start == end,
            f"{name!r:.200}.data_offsets",
            [place.start, place.end],
            f"tensors without gaps or overlaps, this one from {end}",
            file,
        )
        end = place.end
    rest = f"{data_bytes} bytes, the rest of the file"
    _expect(end == data_bytes, "header", f"tensors of {end} bytes", rest, file)
    return metadata, places


def _parse_place(name: str, field: Any, file: str) -> TensorPlace:
    _expect(type(field) is dict, name, field, "an object", file)
    dtype, shape, offsets = (field.get(key) for key in ("dtype", "shape", "data_offsets"))

    known_type = type(dtype) is str and dtype in _DTYPES
    _expect(known_type, f"{name}.dtype", dtype, "a type of safetensors", file)

    valid_shape = (
        type(shape) is list
        and len(shape) <= _MAX_DIMENSIONS
        and all(map(_is_count, shape))
        and math.prod(length for length in shape if length) < _MAX_COUNT
    )
    _expect(valid_shape, f"{name}.shape", shape, "a list of sizes", file)

    valid_offsets = (
        type(offsets) is list
        and len(offsets) == 2
        and all(map(_is_count, offsets))
        and offsets[0] <= offsets[1]
    )
    _expect(valid_offsets, f"{name}.data_offsets", offsets, "the first byte and the end", file)

    size = math.prod(shape) * _DTYPES[dtype].itemsize
    matches = offsets[1] - offsets[0] == size
    _expect(matches, f"{name}.data_offsets", offsets, f"{size} bytes, as of its shape", file)
    return TensorPlace(_DTYPES[dtype], shape, offsets[0], offsets[1])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has a name twice")
    return fields


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _expect(condition: object, field: str, found: Any, expected: str, file: str = MANIFEST) -> None:
    if not condition:
        raise Damaged(f"{file}: {field} is {reprlib.repr(found)}; expected {expected}")
