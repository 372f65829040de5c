"""utils/checkpoint: values, tensors, arrays and generators of a state are restored to the last bit."""
from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from tests.unit.checkpoint_states import bits, refusal, restored, saved, unpacked
from utils.checkpoint import PerRank
from utils.checkpoint.pack import pack
from utils.checkpoint.rng import derive_random_states, random_states, restore_random_states
from utils.checkpoint.unpack import unpack
from utils.checkpoint.values import DTYPES

MU = "\N{GREEK SMALL LETTER MU}"

DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100), 1)

PLAIN = [
    None, True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, "", f"a/b {MU}\n", b"\x00\xff", 1 + 2j,
    (), [], {}, (1, (2, [3])), {1: "a", "1": "b", None: 1, (1, 2): 2.5, False: 0},
    {"tensor": 1, "dict": {}}, {"object": {"per rank": []}}, OrderedDict([("b", 1), ("a", 2)]),
    Counter({3: 1, 5: 2}), {1, 2}, frozenset({7}), torch.bfloat16, torch.Size([2, 3]),
    2**64, -(2**200), 10**5000, "x" * 70_000, b"\x01" * 70_000, bytearray(b"ab"), bytearray(70_000),
    "\ud800", "\ud800" * 70_000, Path("a/b"), PurePosixPath("/x"), date(2024, 5, 1),
    datetime(2024, 5, 1, 12, fold=1), datetime(2024, 5, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-3))),
    timedelta(days=-1, microseconds=5), Decimal("1.10"), Decimal("-0E+5"), Fraction(-3, 10**30),
    range(3, 10**30, 7), torch.device("cuda:1"), deque([1, 2], maxlen=3), deque(),
    defaultdict(list, {1: [2]}), defaultdict(None, a=1), defaultdict(int, a=1),
    complex(math.inf, -0.0), {10**30: 1}, {Path("a"): 1, datetime(2024, 1, 1): 2}, Counter(),
    numpy.float32(0.1), numpy.int64(5), numpy.float16(1.5), numpy.str_("ab"), numpy.bytes_(b"ab"),
    numpy.datetime64("2024-01-01"), numpy.datetime64("NaT"), numpy.timedelta64(3, "h"),
    DEEP, numpy.bool_(True), numpy.longdouble(0.1), numpy.array([(1, 2.5)], dtype="i4,f8")[0], numpy.str_(""),
]
ARRAYS = [
    numpy.array([True, False]), *(numpy.arange(6).astype(kind) for kind in "bBhHiIlLefdgFD"),
    numpy.arange(3, dtype=">i4"), numpy.arange(6, dtype="<u2").reshape(2, 3),
    numpy.array(["2024-01-01", "NaT"], dtype="M8[us]"), numpy.array([3], dtype="m8[s]"),
    numpy.array(["a", f"{MU}b"]), numpy.array([b"ab\0", b"c"]), numpy.array("scalar"),
    numpy.array(5.0), numpy.zeros((0, 3)), numpy.zeros(3, dtype="U0"),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), numpy.arange(10)[::-2],
    numpy.broadcast_to(numpy.arange(3), (2, 3)), numpy.array([b"xy"], dtype="V2"),
    numpy.array([(1, (2.5, [1, 2]))], dtype=[("a", "<i2"), ("b", [("c", ">f8"), ("d", "u1", (2,))])]),
    numpy.zeros(2, dtype=numpy.dtype([("a", "i1"), ("b", "f8")], align=True)),
    numpy.zeros(2, dtype=numpy.dtype({"names": ["a"], "formats": ["i4"], "titles": ["A"]})),
    numpy.ma.array([1.0, 2.0, 3.0], mask=[True, False, True], fill_value=-1.0, hard_mask=True),
    numpy.ma.array([1.0, 2.0], fill_value=-1.0),
]
TENSORS = [
    *(torch.arange(6.0).view(2, 3).to(dtype) for name, dtype in DTYPES.items()
      if name not in ("complex32", "float8_e8m0fnu")),
    torch.tensor(2.5), torch.zeros(0, 3), torch.rand(2, 3).t(),
    torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
]


@pytest.mark.parametrize("value", [*PLAIN, *ARRAYS, *TENSORS], ids=lambda value: type(value).__name__)
def test_values_are_restored_in_type_and_every_bit(value: Any) -> None:
    tree, tensors, _ = saved([value])
    assert len(json.dumps(tree)) < 20_000, "long values are tensors of the file"
    (back,) = unpack(tree, tensors)
    assert bits(back) == bits(value)
    if type(value) is numpy.ndarray:
        assert len(tensors) == 1 and back.flags.writeable
        assert value.dtype.kind == "V" or back.flags.fnc == value.flags.fnc
        (data,) = pack([value]).main.values()
        assert data.data_ptr() == value.ctypes.data or not value.flags.forc or not value.size, "it is not copied"
    if isinstance(value, torch.Tensor):
        (back,) = unpack(pack([value]).tree, pack([value]).main)
        assert back.stride() == value.stride()


def test_names_that_collide_stay_apart() -> None:
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "__metadata__": torch.ones(2),
             "c": {1: torch.tensor(3), "1": torch.tensor(4)}}
    assert bits(unpacked(state)) == bits(state)
    assert "__metadata__" not in pack(state).main


Z = torch.tensor([1 + 2j, 3 - 4j])
BASE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("views", [
    [Z, Z.conj()], [Z.conj(), Z], [Z.imag, Z.conj().imag], [torch._neg_view(BASE), BASE],
    [BASE, BASE.mT, BASE.t()], [BASE[:2], BASE[1:], BASE], [BASE[:, ::2], BASE[0, 1]],
    [torch.tensor([1.0]).expand(5), BASE[:1].expand(3, 4)],
    [torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(7)], [BASE.unfold(1, 2, 1)],
])
def test_views_of_one_tensor_keep_their_own_values(views: list[torch.Tensor]) -> None:
    state = [torch.zeros_like(view) for view in views]
    back = unpacked(views)
    restored(views, state)
    for view, one, other in zip(views, back, state, strict=True):
        assert one.dtype == view.dtype and torch.equal(one, view) and torch.equal(other, view)


def test_an_expanded_tensor_needs_equal_elements() -> None:
    target, rows = torch.zeros(2, 1).expand(2, 3), torch.tensor([[1.0] * 3, [2.0] * 3])
    restored([rows], [target])
    assert torch.equal(target, rows)
    assert "0 is an expanded tensor" in refusal([torch.rand(2, 3)], [target])


def test_containers_tensors_and_arrays_are_restored_in_place() -> None:
    def fresh(fill: float) -> dict[str, Any]:
        return {"best": fill, "history": [fill], "mean": torch.ones(2) * fill, "array": numpy.full(3, fill),
                "grows": numpy.full(int(fill) + 1, fill), "inner": {"count": int(fill), "list": [numpy.full(2, fill)]},
                "own": PerRank({"steps": int(fill)}), "longer": [fill] * int(fill),
                "kind": torch.ones(1) if fill else None}

    state, source = fresh(0), fresh(7)
    before = {**state, "nested array": state["inner"]["list"][0]}
    assert restored(source, state) is state and bits(state) == bits(source)
    assert all(state[name] is before[name] for name in ("history", "mean", "array", "inner"))
    assert state["inner"]["list"][0] is before["nested array"]


class Mode(enum.Enum):
    WARM = 1
    COLD = (2, "x")


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    mode: Mode = Mode.WARM
    points: list[Point] = dataclasses.field(default_factory=list)
    model: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int
    tensor: Any = None


def test_classes_of_the_user_are_taken_from_the_state() -> None:
    source = Config(0.5, Mode.COLD, [Point(1, 2), Point(3, (4,))], nn.Linear(2, 2))
    state = Config(model=nn.Linear(2, 2), points=[Point(0, 0)])
    assert restored({"c": source}, {"c": state})["c"] is state
    assert (state.rate, state.mode, state.points) == (0.5, Mode.COLD, source.points)
    assert torch.equal(state.model.weight, source.model.weight)

    anywhere = {"a": Mode.COLD, "b": Flags.A | Flags.B, "c": [Frozen(3), Frozen(4)], "d": {Mode.WARM: Point(1, 2)}}
    assert restored(anywhere, {"a": Mode.WARM, "b": Flags.A, "c": [Frozen(0)], "d": {}, "e": Point(0, 0)}) == anywhere

    target = torch.zeros(1)
    frozen, point = restored([Frozen(3, torch.ones(1)), Point(1, torch.ones(2))],
                             [Frozen(0, target), Point(0, torch.zeros(2))])
    assert frozen.size == 3 and frozen.tensor is target and target.tolist() == [1.0] and point.x == 1

    factory = {"d": defaultdict(lambda: 7)}
    back = restored({"d": defaultdict(factory["d"].default_factory, {1: 2})}, factory)["d"]
    assert back == {1: 2} and back[5] == 7


@pytest.mark.parametrize("make", [
    lambda seed: torch.Generator().manual_seed(seed), random.Random, numpy.random.RandomState,
    *(lambda seed, kind=kind: numpy.random.Generator(kind(seed)) for kind in (
        numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64, numpy.random.PCG64DXSM)),
], ids=["torch", "python", "RandomState", "PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_generators_continue_where_they_were(make: Any) -> None:
    def draw(generator: Any, count: int) -> list[float]:
        if isinstance(generator, torch.Generator):
            return [torch.rand(1, generator=generator).item() for _ in range(count)]
        return [generator.random() for _ in range(count)]

    generator, other = make(1), make(2)
    draw(generator, 3)
    assert restored({"g": generator}, {"g": other})["g"] is other
    assert draw(other, 700) == draw(generator, 700)


def draws() -> list[float]:
    return [random.random(), float(torch.rand(1)), float(numpy.random.rand())]


def test_global_generators_continue_or_are_seeded_anew_where_they_differed() -> None:
    states = []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        states.append(unpacked(random_states()))
    expected = draws()
    assert restore_random_states(states[1]) == [] and draws() == expected

    different = []
    for rank in (0, 1, 2, 0):
        assert derive_random_states([states[1]] * 2, rank, 3) == [] and draws() == expected
        assert set(derive_random_states(states, rank, 3)) == {"python", "torch", "numpy"}
        different.append(tuple(draws()))
    assert different[0] == different[3] and len(set(different)) == 3
