"""Checkpoints that somebody has changed: whatever the text of a file says, only a CheckpointError comes out."""
from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import json
import random
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from utils.checkpoint_fitting import Fitting
from utils.checkpoint_random import random_states, read_random_states, restore_random_states
from utils.checkpoint_state import PerRank, pack, unpack
from utils.checkpoint_values import Unfit


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    rate: Any
    mode: Any


def training() -> dict[str, Any]:
    """One of everything."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "tensor": torch.rand(2, 3).t(), "generator": torch.Generator(), "python": random.Random(1),
        "numpy": numpy.random.default_rng(1), "twister": numpy.random.Generator(numpy.random.MT19937(1)),
        "legacy": numpy.random.RandomState(1), "philox": numpy.random.Generator(numpy.random.Philox(1)),
        "mine": PerRank({"seen": 1, "x": torch.zeros(2)}), "config": Config(0.1, Mode.COLD), "point": Point(1, (2,)),
        "plain": {1: [1.5, None, {"a": (True, {3})}], (1, 2): b"bytes"}, "long": "x" * 70_000, "huge": 10**40,
        "arrays": [numpy.ones((2, 3)), numpy.ma.array([1, 2], mask=[True, False]), numpy.float32(3)],
        "more": [Path("a"), Decimal(1), datetime(2024, 1, 1), timedelta(1), torch.float32, torch.device("cpu"), 1j,
                 collections.deque([1], 3), collections.defaultdict(list, {1: [2]}), collections.Counter("ab"),
                 collections.OrderedDict(a=1), torch.Size([1]), frozenset({1}), range(3)],
    }


VALUES: list[Any] = [
    None, True, 0, -1, 2**62, 2**70, 1e300, float("nan"), "", "load", "0x", "O", "dict", "cuda", [], {}, [[]],
    {"tensor": "missing"}, {"torch.dtype": "load"}, {"tensor": {}}, {"per rank": "mine"}, {"generator": "x"},
    {"object": 1}, {"deque": 1}, {"array": {"dtype": "O", "shape": [2]}}, {"int": "f" * 9000}, {"set": [[[]]]},
    {"enum": "Mode", "member": "HOT"}, {"dataclass": "Config", "fields": {}}, {"dict": [[{"dict": {}}, 1]]}, [[]] * 3,
]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of each entry of a tree."""
    found, stack = [], [tree]
    while stack:
        one = stack.pop()
        for key in list(one) if type(one) is dict else range(len(one)):
            found.append((one, key))
            if type(one[key]) in (dict, list) and len(one[key]) < 100:  # the state of random.Random has 625 numbers
                stack.append(one[key])
    return found


def mutate(tree: Any, rng: random.Random) -> None:
    entries = places(tree)
    one, key = rng.choice(entries)
    kind = rng.randrange(5)
    if kind == 0:
        del one[key]
    elif kind == 1 and type(one) is dict:
        one[rng.choice(["tensor", "x", "state", "", "OrderedDict", "object"])] = one.pop(key)
    elif kind == 2:
        other, name = rng.choice(entries)
        one[key] = copy.deepcopy(other[name])
    elif kind == 3 and type(one[key]) in (int, str, float) and type(one[key]) is not bool:
        one[key] = one[key] + rng.choice([1, -1, 2**40]) if type(one[key]) is not str else one[key][:-1] + "~"
    else:
        one[key] = rng.choice(VALUES)


def test_5000_changed_trees_end_in_nothing_but_a_clear_error() -> None:
    packed = pack(training())
    tensors = {**packed.common, **packed.main, **packed.local, **packed.mine}
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    text, rng = json.dumps({"tree": packed.tree, "own": packed.own}), random.Random(0)
    ends: collections.Counter[str] = collections.Counter()
    for number in range(5001):
        read = json.loads(text)
        for _ in range(rng.choice([1, 1, 2]) if number else 0):
            mutate(read, rng)
        if set(read) != {"tree", "own"} or type(read["own"]) is not dict:
            continue
        restore = number % 50 == 0
        try:
            fitting = Fitting(training() if restore else STATE, read["tree"], tensors, read["own"])
            ends["problems" if fitting.problems else "accepted"] += 1
            if restore and not fitting.problems:
                fitting.restore()
                ends["restored"] += 1
        except Unfit as error:
            ends["refused"] += 1
            assert str(error)
    assert ends["refused"] > 500 and ends["problems"] > 500 and ends["restored"] > 5, ends


STATE = training()


@pytest.mark.parametrize("tree", [
    {"torch.dtype": "load"}, {"torch.dtype": "Tensor"}, {"torch.device": "x"}, {"eval": "1"}, {}, {"int": "12"},
    {"Path": ["a"]}, {"complex": [1]}, {"bytes": "?"}, {"Decimal": "x"}, {"datetime": ["x", 0]}, {"range": [1, 2]},
    {"numpy scalar": "O", "bytes": ""}, {"numpy scalar": "f8", "bytes": "AA=="}, {"tensor": "t"},
    {"numpy scalar": "M8[xx]", "bytes": ""},
    {"tensor": "t", "dtype": "load", "shape": [4]}, {"tensor": "t", "dtype": "float32", "shape": [5]},
    {"tensor": "t", "dtype": "float32", "shape": [2, -2]}, {"tensor": "t", "dtype": "int64", "shape": [2]},
    {"tensor": "t", "dtype": "float32", "shape": [2, 2], "stride": [1, 10**12]},
    {"tensor": "t", "dtype": "float32", "shape": [0, 2**62, 4]}, {"tensor": [], "dtype": "float32", "shape": []},
    {"array": {"dtype": "f8", "shape": [10**12]}, "data": {"tensor": "b"}}, {"set": [[1]]},
    {"deque": [], "maxlen": "x"},
    {"array": {"dtype": "O", "shape": [1]}, "data": {"tensor": "b"}}, {"tuple": {"a": 1}}, {"dict": 1}, {"object": "x"},
    {"array": {"dtype": [["a", "O"]], "shape": [1]}, "data": {"tensor": "b"}}, {"defaultdict": [], "factory": "eval"},
    {"defaultdict": [], "factory": []}, {"torch.Size": ["x"]}, {"dict": {}, "metadata": {"dict": {}}},
    {"generator": "random.Random"}, {"enum": "Mode", "member": "WARM"}, {"long": "str", "data": {"tensor": "b"}},
], ids=lambda tree: json.dumps(tree)[:60])
def test_what_is_never_written_is_refused_by_place(tree: Any) -> None:
    tensors = {"t": torch.zeros(4), "b": torch.full((8,), 255, dtype=torch.uint8)}
    with pytest.raises(Unfit, match="^x/0"):
        unpack({"dict": {"x": [tree]}}, tensors)


def test_nesting_without_end_is_refused() -> None:
    tree: Any = []
    for _ in range(900):
        tree = {"tuple": [tree]}
    for read in (lambda: unpack(tree, {}), lambda: Fitting({"x": torch.zeros(1)}, {"dict": {"x": tree}}, {}, {}),
                 lambda: Fitting({}, tree, {}, {}), lambda: read_random_states(tree)):
        try:
            fitting = read()
        except Unfit:
            continue
        assert fitting.problems


def test_changed_states_of_the_generators_are_refused_before_one_is_set() -> None:
    text, rng = json.dumps(pack(random_states()).tree), random.Random(0)
    before = random_states()
    refused = 0
    for _ in range(300):
        tree = json.loads(text)
        mutate(tree, rng)
        try:
            restore_random_states(read_random_states(tree))
        except Unfit as error:
            refused += 1
            assert str(error)
    assert refused > 30
    restore_random_states(before)


@pytest.mark.parametrize("state", [
    {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]}, {"numpy": ["MT19937", [1] * 624, -1, 0, 0.0]}, {"numpy": 1},
    {"numpy": ["PCG64", [1] * 624, 3, 0, 0.0]}, {"torch": b"short"}, {"python": [3, [1], None]}, {"cuda": "x"}, [1],
], ids=repr)
def test_a_generator_state_that_would_read_other_memory_is_refused(state: Any) -> None:
    with pytest.raises(Unfit):
        read_random_states(pack(state).tree)
