"""Single values as JSON and tensors: numbers, dates, paths, numpy arrays, random number generators.

Nothing is pickled, and decoding never imports or calls what a file names. A file may have been changed by anybody:
each decoder accepts only what its encoder writes, and raises Unfit for everything else.
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


class Unfit(ValueError):
    """A state that cannot be saved, or that does not match the checkpoint; the message names the entries."""


def _dtypes() -> dict[str, torch.dtype]:
    names = ("float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
             "float8_e8m0fnu complex128 complex64 complex32 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool")
    return {name: getattr(torch, name) for name in names.split() if hasattr(torch, name)}


DTYPES = _dtypes()  # of tensors that can be saved, by their names


# --- values that fit into the header of a file

def _datetime(value: datetime) -> list[str | int]:
    zone = value.tzinfo
    if zone is not None and (type(zone) is not timezone or zone.tzname(None) != timezone(
            zone.utcoffset(None)).tzname(None)):
        raise ValueError(f"has the time zone {zone!r}; expected none, or a datetime.timezone without a name. "
                         "Convert it with astimezone(datetime.timezone.utc)")
    return [value.isoformat(), value.fold]


_CODECS: dict[str, tuple[type[Any], Callable[[Any], Tree], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # decimal text is limited to 4300 digits
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text)),
    "bytearray": (bytearray, lambda value: base64.b64encode(value).decode(),
                  lambda text: bytearray(base64.b64decode(text))),
    "torch.dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: DTYPES[name]),
    "torch.device": (torch.device, str, torch.device),
    "Path": (type(Path()), str, Path),
    "PurePosixPath": (PurePosixPath, str, PurePosixPath),
    "datetime": (datetime, _datetime, lambda parts: datetime.fromisoformat(parts[0]).replace(fold=parts[1])),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds],
                  lambda parts: timedelta(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, lambda value: [hex(value.numerator), hex(value.denominator)],
                 lambda parts: Fraction(int(parts[0], 16), int(parts[1], 16))),
    "range": (range, lambda value: [hex(value.start), hex(value.stop), hex(value.step)],
              lambda parts: range(*(int(part, 16) for part in parts))),
}
_TAGS = {cls: tag for tag, (cls, _, _) in _CODECS.items()}


def encode_value(value: Any) -> Tree:
    """The tree of a single value; None for a type that has none. Raises ValueError, whose words follow the entry."""
    tag = _TAGS.get(type(value))
    if tag is not None:
        return {tag: _CODECS[tag][1](value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.ma.core.mvoid):
        array = numpy.asarray(value)
        return {"numpy scalar": encode_dtype(array.dtype), "bytes": base64.b64encode(array.tobytes()).decode()}
    return None


def is_value(tag: str) -> bool:
    return tag in _CODECS or tag == "numpy scalar"


def decode_value(tag: str, tree: dict[str, Tree]) -> Any:
    """The value that encode_value() took. Raises ValueError for what encode_value() does not write."""
    if tag == "numpy scalar":
        raw = torch.frombuffer(bytearray(_CODECS["bytes"][2](tree["bytes"]) or b"\0"), dtype=torch.uint8)
        dtype = decode_dtype(tree[tag])
        return decode_array({"dtype": tree[tag], "shape": []}, raw if dtype.itemsize else raw[:0])[()]
    cls, encode, decode = _CODECS[tag]
    value = decode(tree[tag])
    if type(value) is not cls or json.dumps(encode(value)) != json.dumps(tree[tag]):
        raise ValueError(f"its text is not that of a {tag}")
    return value


# --- numpy

def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_masked(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ma.MaskedArray


def encode_dtype(dtype: Any) -> Tree:
    """The name of a numpy type, or the list of its fields. Raises ValueError for types that hold Python objects."""
    import numpy
    if dtype.hasobject:
        raise ValueError(f"is of the numpy type {dtype}, which holds Python objects; expected numbers, fixed-width "
                         "strings, dates or fields of these. Convert it, for example with tolist()")
    try:
        tree = json.loads(json.dumps(numpy.lib.format.dtype_to_descr(dtype)))
        if decode_dtype(tree) == dtype:
            return tree
    except (ValueError, TypeError):  # fields that overlap
        pass
    raise ValueError(f"is of the numpy type {dtype}; expected one whose fields follow each other. Convert it")


def decode_dtype(tree: Tree) -> Any:
    import numpy

    def fields(descr: Tree) -> Any:
        if type(descr) is str:
            return descr
        return [(tuple(name) if type(name) is list else name, fields(kind), *map(tuple, shape))
                for name, kind, *shape in descr]
    dtype = numpy.lib.format.descr_to_dtype(fields(tree))
    if dtype.hasobject or dtype.kind not in "biufcmMSUV":
        raise ValueError(f"the numpy type {dtype} cannot be saved")
    return dtype


def encode_array(array: Any) -> tuple[dict[str, Tree], Tensor]:
    """Type, shape and order of a numpy array, and its bytes; they are not copied if they are contiguous."""
    tree: dict[str, Tree] = {"dtype": encode_dtype(array.dtype), "shape": list(array.shape)}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        tree["order"] = "F"
        array = array.T
    elif not array.flags.c_contiguous:
        array = array.copy(order="C")
    return tree, _bytes_of(array, array.ctypes.data, array.nbytes)


def _bytes_of(owner: Any, address: int, size: int) -> Tensor:
    """The memory of an object as a tensor, also where the object is read-only."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_char * size).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]  # lives as long as the tensor
    return torch.frombuffer(buffer, dtype=torch.uint8)


def decode_array(tree: dict[str, Tree], data: Tensor) -> Any:
    """A new numpy array of those bytes. Raises an Exception for a tree that encode_array() does not write."""
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
    if type(shape) is not list or not all(type(length) is int and 0 <= length < 2**63 for length in shape):
        raise ValueError("its shape is not a list of lengths")
    return shape


# --- random number generators

def generator_kind(value: Any) -> str | None:
    """What the state of a random number generator can be restored into; None for any other object."""
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
    """The state of a random number generator as plain data and numpy arrays."""
    if isinstance(value, torch.Generator):
        return to_bytes(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None)
    return value.get_state(legacy=False) if bits is None else bits.state


def set_generator_state(value: Any, state: Any) -> None:
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
    """Raise an Exception if that state cannot be set; `value` is not changed."""
    if isinstance(value, torch.Generator):
        set_generator_state(torch.Generator(value.device), state)
    elif hasattr(value, "bit_generator"):
        set_generator_state(type(value)(type(value.bit_generator)()), state)
    else:
        set_generator_state(type(value)(), state)


def _check_positions(state: Any) -> None:
    """numpy does not check them, and reads memory that is not its own."""
    position = state["state"].get("pos", 0)
    if not 0 <= position <= 624 or not 0 <= state.get("buffer_pos", 0) <= 4:
        raise ValueError("its position is outside of the generator's state")


def to_bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())


def from_bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
