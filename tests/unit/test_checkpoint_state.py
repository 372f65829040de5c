"""utils/checkpoint: values, tensors, arrays and generators of a state are restored to the last bit."""
from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch

from tests.unit.checkpoint_states import bits, restored, saved, unpacked
from utils.checkpoint import PerRank
from utils.checkpoint.entries import DTYPES
from utils.checkpoint.pack import pack
from utils.checkpoint.rng import derive_random_states, random_states, restore_random_states
from utils.checkpoint.unpack import unpack

MU = "\N{GREEK SMALL LETTER MU}"

DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100), 1)

PLAIN = [
    None, True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, "", f"a/b {MU}\n", "\ud800", b"\x00\xff", b"\x01" * 70_000,
    1 + 2j, complex(math.inf, -0.0), 2**64, -(2**200), 10**5000,
    (), [], {}, (1, (2, [3])), {1: "a", "1": "b", None: 1, (1, 2): 2.5, False: 0, b"x": 1, 10**30: 1},
    {"tensor": 1, "dict": {}}, {"object": {"per rank": []}}, OrderedDict([("b", 1), ("a", 2)]),
    Counter({3: 1, 5: 2}), Counter(), DEEP, numpy.float32(0.1), numpy.int64(5), numpy.float16(1.5), numpy.bool_(True),
    numpy.complex64(1j),
]
ARRAYS = [
    numpy.array([True, False]), *(numpy.arange(6).astype(kind) for kind in "bBhHiIlLefdFD"),
    numpy.array(5.0), numpy.zeros((0, 3)), numpy.arange(10)[::-2], numpy.broadcast_to(numpy.arange(3), (2, 3)),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
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
        (data,) = pack([value]).main.values()
        kept = value.flags.c_contiguous and value.size
        assert data.data_ptr() == value.ctypes.data or not kept, "it is not copied"
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
    [torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(7)], [BASE.unfold(1, 2, 1)],
])
def test_views_of_one_tensor_keep_their_own_values(views: list[torch.Tensor]) -> None:
    state = [torch.zeros_like(view) for view in views]
    back = unpacked(views)
    restored(views, state)
    for view, one, other in zip(views, back, state, strict=True):
        assert one.dtype == view.dtype and torch.equal(one, view) and torch.equal(other, view)


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
