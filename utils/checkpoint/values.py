"""Encode single values as JSON and tensors: numbers, dates, paths, numpy arrays, generators.

Nothing is pickled, and decoding never imports or calls what a file names. The files are
untrusted input: each decoder accepts only what its encoder writes, and raises for all else.
"""

from __future__ import annotations

import base64
import ctypes
import json
import random
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

Tree = Any  # what JSON holds: plain data as itself, everything else as {tag: content}


class StateError(ValueError):
    """A state cannot be saved, or a checkpoint cannot be restored. The message names the entry."""


_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex128 complex64 complex32 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
# Types of tensors that can be saved; float8_e8m0fnu is missing in older versions of torch.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}


# --- values in the header of a file


def _datetime(value: datetime) -> list[str | int]:
    zone = value.tzinfo
    unnamed = zone is None or (
        type(zone) is timezone and zone.tzname(None) == timezone(zone.utcoffset(None)).tzname(None)
    )
    if not unnamed:
        raise ValueError(
            f"has the time zone {zone!r}; expected none, or a datetime.timezone without a name. "
            "Convert it with astimezone(datetime.timezone.utc)"
        )
    return [value.isoformat(), value.fold]


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


# by tag: the type, how to encode a value, how to decode it
_CODECS: dict[str, tuple[type[Any], Callable[[Any], Tree], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # decimal text is limited to 4300 digits
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, _base64, base64.b64decode),
    "bytearray": (bytearray, _base64, lambda text: bytearray(base64.b64decode(text))),
    "torch.dtype": (
        torch.dtype,
        lambda value: str(value).removeprefix("torch."),
        lambda name: DTYPES[name],
    ),
    "torch.device": (torch.device, str, torch.device),
    "Path": (type(Path()), str, Path),
    "PurePosixPath": (PurePosixPath, str, PurePosixPath),
    "datetime": (
        datetime,
        _datetime,
        lambda parts: datetime.fromisoformat(parts[0]).replace(fold=parts[1]),
    ),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (
        Fraction,
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda parts: Fraction(int(parts[0], 16), int(parts[1], 16)),
    ),
    "range": (
        range,
        lambda value: [hex(value.start), hex(value.stop), hex(value.step)],
        lambda parts: range(*(int(part, 16) for part in parts)),
    ),
}
_TAGS = {cls: tag for tag, (cls, _, _) in _CODECS.items()}


def encode_value(value: Any) -> Tree:
    """Return the tree of a single value; None for another type.

    Raises ValueError, whose text continues the name of the entry.
    """
    tag = _TAGS.get(type(value))
    if tag is not None:
        return {tag: _CODECS[tag][1](value)}

    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    if isinstance(value, numpy.ma.core.mvoid):
        return None
    array = numpy.asarray(value)
    return {"numpy scalar": encode_dtype(array.dtype), "bytes": _base64(array.tobytes())}


def is_value(tag: str) -> bool:
    """Return whether encode_value() writes trees with this tag."""
    return tag in _CODECS or tag == "numpy scalar"


def decode_value(tag: str, tree: dict[str, Tree]) -> Any:
    """Return the value that encode_value() encoded. Raises an Exception for any other tree."""
    if tag == "numpy scalar":
        raw = base64.b64decode(tree["bytes"])
        data = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)
        if not decode_dtype(tree[tag]).itemsize:
            data = data[:0]
        return decode_array({"dtype": tree[tag], "shape": []}, data)[()]

    cls, encode, decode = _CODECS[tag]
    value = decode(tree[tag])
    if type(value) is not cls or json.dumps(encode(value)) != json.dumps(tree[tag]):
        raise ValueError(f"its text does not describe a {tag}")
    return value


# --- numpy


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array of any kind."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_masked_array(value: Any) -> bool:
    """Return whether a value is a masked numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ma.MaskedArray


def encode_dtype(dtype: Any) -> Tree:
    """Return the name of a numpy type, or the list of its fields.

    Raises ValueError for types with Python objects or overlapping fields.
    """
    import numpy

    if dtype.hasobject:
        raise ValueError(
            f"is of the numpy type {dtype}, which holds Python objects; expected numbers, "
            "fixed-width strings, dates or fields of these. Convert it, for example with tolist()"
        )
    try:
        tree = json.loads(json.dumps(numpy.lib.format.dtype_to_descr(dtype)))
        if decode_dtype(tree) == dtype:
            return tree
    except (ValueError, TypeError):  # fields that overlap
        pass
    raise ValueError(
        f"is of the numpy type {dtype}; expected one whose fields follow each other. Convert it"
    )


def decode_dtype(tree: Tree) -> Any:
    """Return the numpy type that encode_dtype() encoded. Raises an Exception for any other tree."""
    import numpy

    def fields(descr: Tree) -> Any:
        if type(descr) is str:
            return descr
        return [
            (tuple(name) if type(name) is list else name, fields(kind), *map(tuple, shape))
            for name, kind, *shape in descr
        ]

    dtype = numpy.lib.format.descr_to_dtype(fields(tree))
    if dtype.hasobject or dtype.kind not in "biufcmMSUV":
        raise ValueError(f"the numpy type {dtype} cannot be saved")
    return dtype


def encode_array(array: Any) -> tuple[dict[str, Tree], Tensor]:
    """Return type, shape and order of a numpy array, and its bytes.

    The bytes of a contiguous array are not copied.
    """
    tree: dict[str, Tree] = {"dtype": encode_dtype(array.dtype), "shape": list(array.shape)}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        tree["order"] = "F"
        array = array.T
    elif not array.flags.c_contiguous:
        array = array.copy(order="C")
    return tree, _bytes_of(array, array.ctypes.data, array.nbytes)


def _bytes_of(owner: Any, address: int, size: int) -> Tensor:
    """Return the memory of an object as a tensor; the object may be read-only."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_char * size).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]  # keeps the memory alive
    return torch.frombuffer(buffer, dtype=torch.uint8)


def decode_array(tree: dict[str, Tree], data: Tensor) -> Any:
    """Return a new numpy array. Raises an Exception for a tree that encode_array() does not write.

    data: the bytes of the array.
    """
    import numpy

    dtype, shape = decode_dtype(tree["dtype"]), checked_shape(tree["shape"])
    size = dtype.itemsize
    for length in shape:
        size *= length
    if data.dtype is not torch.uint8 or data.numel() != size:
        raise ValueError(f"it has {data.nbytes} bytes; expected {size}")
    if tree.get("order", "C") not in ("C", "F"):
        raise ValueError("its order is neither C nor F")
    array = numpy.empty(shape, dtype, order=tree.get("order", "C"))
    if size:
        data = data.contiguous()
        ctypes.memmove(array.ctypes.data, data.data_ptr(), size)
    return array


def checked_shape(shape: Tree) -> list[int]:
    """Return a shape from a file. Raises ValueError if it is none."""
    if type(shape) is not list or not all(
        type(length) is int and 0 <= length < 2**63 for length in shape
    ):
        raise ValueError("its shape is not a list of lengths")
    return shape


# --- random number generators


def generator_kind(value: Any) -> str | None:
    """Return the kind of a random number generator; None for any other object.

    A state can be restored into a generator of the same kind, such as "torch.Generator on cpu".
    """
    if isinstance(value, torch.Generator):
        return f"torch.Generator on {value.device.type}"
    if type(value) is random.Random:
        return "random.Random"
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.random.Generator:
        return f"numpy.random.Generator of {type(value.bit_generator).__name__}"
    if numpy is not None and type(value) is numpy.random.RandomState:
        return "numpy.random.RandomState"
    return None


def generator_state(value: Any) -> Any:
    """Return the state of a random number generator as plain data and numpy arrays."""
    if isinstance(value, torch.Generator):
        return to_bytes(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None)
    return value.get_state(legacy=False) if bits is None else bits.state


def set_generator_state(value: Any, state: Any) -> None:
    """Set the state of a generator, as generator_state() returned it."""
    if isinstance(value, torch.Generator):
        value.set_state(from_bytes(state))
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        _check_positions(state)
        bits = getattr(value, "bit_generator", None)
        if bits is None:
            value.set_state(state)
        else:
            bits.state = state


def check_generator_state(value: Any, state: Any) -> None:
    """Raise an Exception if that state cannot be set. `value` is not changed."""
    if isinstance(value, torch.Generator):
        set_generator_state(torch.Generator(value.device), state)
    elif hasattr(value, "bit_generator"):
        set_generator_state(type(value)(type(value.bit_generator)()), state)
    else:
        set_generator_state(type(value)(), state)


def _check_positions(state: Any) -> None:
    """Raise ValueError for positions that numpy would not check before it reads that memory."""
    position = state["state"].get("pos", 0)
    if not 0 <= position <= 624 or not 0 <= state.get("buffer_pos", 0) <= 4:
        raise ValueError("its position is outside the generator's state")


def to_bytes(state: Tensor) -> bytes:
    """Return the state of a torch generator as bytes."""
    return bytes(state.tolist())


def from_bytes(raw: bytes) -> Tensor:
    """Return the state of a torch generator from its bytes."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
