"""Render and parse manifests and safetensors headers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

FORMAT = 5  # raise it whenever one version of the kit would misread checkpoints of another
MANIFEST = "manifest.json"

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


class Damaged(Exception):
    """Files differ from what was written. The message names file, field and reason."""


class Unreadable(Exception):
    """A checkpoint may be intact, but this process cannot use it."""


class StoredTensor(NamedTuple):
    """A tensor in a file, or a slice of a sharded tensor."""

    name: str
    dtype: str
    offsets: Sequence[int]  # of the slice; 0 for a whole tensor
    sizes: Sequence[int]
    start: int  # byte in the file
    checksums: Sequence[str]  # of its blocks


class FileEntry(TypedDict):
    """A rank's file in the manifest."""

    name: str
    size: int  # bytes
    header: tuple[int, Sequence[str]]  # bytes, and checksums of its blocks
    tensors: Mapping[str, StoredTensor]  # by their names in the file
    local: Sequence[str]  # those that only this rank restores; none are listed for rank 0


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
    """Return the manifest. Raises Damaged unless its checksum matches, and Unreadable.

    All other fields are trusted then, and so are files whose checksums match theirs here.
    """
    try:
        manifest: Manifest = json.loads(raw)["manifest"]
        intact = render_manifest(manifest) == raw
        number = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{MANIFEST}: its text does not match its checksum")
    if number != FORMAT:
        writer = "an earlier" if number < FORMAT else "a later"
        raise Unreadable(
            f"it has format {number}, of {writer} version of the kit; expected format {FORMAT}. "
            "Continue with the version that wrote it, or start in another folder"
        )
    return manifest
