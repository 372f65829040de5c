"""Parse the manifest of a checkpoint and the headers of its safetensors files. Both are untrusted input."""
from __future__ import annotations

import json
import math
import reprlib
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint_sums import BLOCK

FORMAT = 2  # raise it whenever an older version would misread a new checkpoint, or this one an older checkpoint
MANIFEST = "manifest.json"
_LARGEST = 1 << 62  # of any number of bytes or elements
_MOST_DIMENSIONS = 64

# What safetensors knows; tensors of all other types are stored as bytes, their type is in the tree of the state.
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


class Damaged(Exception):
    """A checkpoint whose files are not what was written; the message names the file, the field and the reason."""


class Unreadable(Exception):
    """A checkpoint that may be whole, but cannot be used from here."""


@dataclass(frozen=True)
class Field:
    """Where a tensor is in the data of a file."""

    dtype: torch.dtype
    shape: list[int]
    first: int
    end: int


def part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def render_manifest(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields)
    return f'{{"manifest": {text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def parse_manifest(raw: bytes) -> dict[str, Any]:
    """Return the fields of a manifest, all of them checked. Raises Damaged or Unreadable."""
    try:
        fields = json.loads(raw)["manifest"]
        whole = render_manifest(fields) == raw
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{MANIFEST}: its text does not agree with its checksum")
    _expect(type(fields) is dict, "manifest", fields, "an object")
    number = fields.get("format")
    _expect(_is_count(number), "format", number, "a number")
    if number != FORMAT:
        writer = "an earlier" if number < FORMAT else "a later"
        raise Unreadable(f"it has format {number}, of {writer} version of the kit; expected format {FORMAT}. Continue "
                         "with the version that wrote it, or start in another folder")
    _expect(_is_count(fields.get("step")), "step", fields.get("step"), "a number, 0 or more")
    metric = fields.get("metric")
    _expect(metric is None or type(metric) is float and math.isfinite(metric), "metric", metric, "a finite number")
    world_size, files = fields.get("world_size"), fields.get("files")
    _expect(type(files) is list, "files", files, "a list")
    _expect(_is_count(world_size) and 0 < world_size == len(files), "world_size", world_size,
            f"{len(files)}, the number of files, and at least 1")
    for rank, entry in enumerate(files):
        _check_entry(f"files[{rank}]", rank, entry)
    answer: dict[str, Any] = fields
    return answer


def _check_entry(place: str, rank: int, entry: Any) -> None:
    _expect(type(entry) is dict, place, entry, "an object")
    name, size, blocks = entry.get("name"), entry.get("size"), entry.get("blocks")
    _expect(name == part_name(rank), f"{place}.name", name, part_name(rank))
    _expect(_is_count(size) and size >= 8, f"{place}.size", size, "a number of bytes, 8 or more")
    _expect(type(entry.get("replicated")) is bool, f"{place}.replicated", entry.get("replicated"), "true or false")
    _expect(type(blocks) is list, f"{place}.blocks", blocks, "a list")
    for block in blocks:
        _expect(type(block) is list and len(block) == 2 and _is_count(block[0]) and 0 < block[0] <= BLOCK
                and type(block[1]) is str, f"{place}.blocks", block, f"pairs of 1 to {BLOCK} bytes and a checksum")
    total = sum(block[0] for block in blocks)
    _expect(total == size, f"{place}.blocks", f"{total} bytes", f"{size} bytes, the size of the file")


def parse_header(raw: bytes, file: str, data_bytes: int) -> tuple[dict[str, str], dict[str, Field]]:
    """Return metadata and the places of the tensors from the header of a safetensors file. Raises Damaged.

    data_bytes: what follows the header; the tensors have to cover it without gaps.
    """
    try:
        fields = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file}: its header is invalid: {str(error)[:200]}") from None
    _expect(type(fields) is dict, "header", fields, "an object", file)
    metadata = fields.pop("__metadata__", {})
    _expect(type(metadata) is dict and all(type(text) is str for text in metadata.values()), "__metadata__", metadata,
            "an object of strings", file)
    found = {name: _parse_field(reprlib.repr(name), field, file) for name, field in fields.items()}
    end = 0
    for name, place in sorted(found.items(), key=lambda item: (item[1].first, item[1].end)):
        _expect(place.first == end, f"{name!r:.200}.data_offsets", [place.first, place.end],
                f"tensors without gaps or overlaps, this one from {end}", file)
        end = place.end
    _expect(end == data_bytes, "header", f"tensors of {end} bytes", f"{data_bytes} bytes, the rest of the file", file)
    return metadata, found


def _parse_field(name: str, field: Any, file: str) -> Field:
    _expect(type(field) is dict, name, field, "an object", file)
    dtype, shape, offsets = (field.get(key) for key in ("dtype", "shape", "data_offsets"))
    _expect(type(dtype) is str and dtype in _DTYPES, f"{name}.dtype", dtype, "a type of safetensors", file)
    _expect(type(shape) is list and len(shape) <= _MOST_DIMENSIONS and all(map(_is_count, shape))
            and math.prod(one for one in shape if one) < _LARGEST, f"{name}.shape", shape, "a list of sizes", file)
    _expect(type(offsets) is list and len(offsets) == 2 and all(map(_is_count, offsets)) and offsets[0] <= offsets[1],
            f"{name}.data_offsets", offsets, "the first byte and the end", file)
    size = math.prod(shape) * _DTYPES[dtype].itemsize
    _expect(offsets[1] - offsets[0] == size, f"{name}.data_offsets", offsets, f"{size} bytes, as of its shape", file)
    return Field(_DTYPES[dtype], shape, offsets[0], offsets[1])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _expect(condition: object, field: str, found: Any, expected: str, file: str = MANIFEST) -> None:
    if not condition:
        raise Damaged(f"{file}: {field} is {reprlib.repr(found)}; expected {expected}")
