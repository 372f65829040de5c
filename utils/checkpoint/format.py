"""Render and parse manifests and safetensors headers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

FORMAT = 5  # raise it whenever another version of the kit would misread the files
MANIFEST = "manifest.json"
_BEFORE, _BYTES_AFTER = b'{"manifest": ', len(b', "crc32": "01234567"}\n')

# Tensors of other types are stored as bytes, with their type in the tree of the state.
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
    """A file is not as it was written.

    file: its name. The message names it, too, with the reason.
    """

    def __init__(self, file: str, message: str) -> None:
        super().__init__(message)
        self.file = file


class Unreadable(Exception):
    """A checkpoint may be intact, but this process cannot use it."""


class FileEntry(TypedDict):
    """A rank's file in the manifest."""

    name: str
    size: int  # bytes
    header_size: int  # bytes
    checksums: str  # CRC-32 of the header, then of each block of data: 8 hexadecimal digits each


class _WrittenManifest(TypedDict):
    """The fields of a manifest as it is written."""

    format: int
    step: int
    world_size: int
    metric: float | None
    files: list[FileEntry]  # indexed by rank
    whole: dict[str, int]  # tensor -> rank whose file holds it; all other tensors are in every file
    sharded: dict[str, int]  # sharded tensor -> index in layouts
    layouts: list[list[tuple[int, Sequence[int], Sequence[int]]]]  # rank, offsets, sizes


class Manifest(_WrittenManifest, total=False):
    """The content of manifest.json, which also has a checksum of itself.

    A layout lists the slices of all tensors that are sharded alike: with 1,024 ranks and
    thousands of tensors, the manifest is still read in milliseconds. The header of a file says
    where a tensor is in it.
    """

    crc32: str  # checksum of the manifest's text


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's type and shape, and its position in the data of a file in bytes."""

    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    end: int


def slice_name(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a sharded tensor's slice in a file: model/weight@0,512."""
    return f"{name}@{','.join(map(str, offsets))}"


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file: rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def place_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
    """Return each tensor's place in the data of a file, largest elements first.

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
    text = json.dumps(manifest).encode()
    return b'%s%s, "crc32": "%08x"}\n' % (_BEFORE, text, zlib.crc32(text))


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
    """Return the manifest. Raises Damaged if its checksum does not match, and Unreadable.

    After that all other fields are trusted, and so are files whose checksums match the manifest.
    """
    text, end = raw[len(_BEFORE) : -_BYTES_AFTER], raw[-_BYTES_AFTER:]
    crc32 = f"{zlib.crc32(text):08x}"
    if not raw.startswith(_BEFORE) or end != b', "crc32": "%s"}\n' % crc32.encode():
        raise Damaged(MANIFEST, f"{MANIFEST}: its text does not match its checksum")
    manifest: Manifest = json.loads(text)
    manifest["crc32"] = crc32
    number = manifest["format"]
    if number != FORMAT:
        writer = "an earlier" if number < FORMAT else "a later"
        raise Unreadable(
            f"it has format {number}, of {writer} version of the kit; expected format {FORMAT}. "
            "Continue with the version that wrote it, or start in another folder"
        )
    return manifest
