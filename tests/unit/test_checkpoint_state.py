"""utils/checkpoint: values, tensors and arrays of a state are restored exactly, or refused by name."""
from __future__ import annotations

import dataclasses
import enum
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

from tests.unit.checkpoint_states import bits, mismatches, restored, saved, unpacked
from utils.checkpoint import PerRank
from utils.checkpoint.pack import Replicas, pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.rng import derive_random_states, random_states, restore_random_states
from utils.checkpoint.unpack import unpack
from utils.checkpoint.values import StateError

MU = "\N{GREEK SMALL LETTER MU}"


# Plain data -----------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [
    None, True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, "", f"a/b {MU}\n", b"\x00\xff", 1 + 2j,
    (), [], {}, (1, (2, [3])), {1: "a", "1": "b", None: 1, (1, 2): 2.5, False: 0},
    {"tensor": 1, "dict": {}}, {"object": {"per rank": []}}, OrderedDict([("b", 1), ("a", 2)]),
    Counter({3: 1, 5: 2}), {1, 2}, frozenset({7}), torch.bfloat16, torch.Size([2, 3]),
    2**64, -(2**200), 10**5000, "x" * 70_000, b"\x01" * 70_000, bytearray(b"ab"), bytearray(70_000),
    "\ud800", "\ud800" * 70_000, Path("a/b"), PurePosixPath("/x"), date(2024, 5, 1),
    datetime(2024, 5, 1, 12, fold=1),
    datetime(2024, 5, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-3))),
    timedelta(days=-1, microseconds=5), Decimal("1.10"), Decimal("-0E+5"), Fraction(-3, 10**30),
    range(3, 10**30, 7), torch.device("cuda:1"), deque([1, 2], maxlen=3), deque(),
    defaultdict(list, {1: [2]}), defaultdict(None, a=1), defaultdict(int, a=1),
    complex(math.inf, -0.0), {10**30: 1}, {Path("a"): 1, datetime(2024, 1, 1): 2}, Counter(),
    numpy.float32(0.1), numpy.int64(5), numpy.float16(1.5), numpy.str_("ab"), numpy.bytes_(b"ab"),
    numpy.datetime64("2024-01-01"), numpy.datetime64("NaT"), numpy.timedelta64(3, "h"),
    numpy.bool_(True), numpy.longdouble(0.1), numpy.array([(1, 2.5)], dtype="i4,f8")[0],
    numpy.str_(""),
], ids=lambda value: f"{type(value).__name__} {repr(value)[:20] if type(value) is not int else ''}")
def test_plain_data_is_restored_in_type_and_value(value: Any) -> None:
    tree, tensors, _ = saved([value])
    assert bits(unpack(tree, tensors)) == bits([value])
    assert len(json.dumps(tree)) < 20_000, "long values are tensors of the file"


def test_a_time_zone_that_would_be_lost_is_refused() -> None:
    with pytest.raises(StateError, match="^t has the time zone"):
        pack({"t": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET"))})


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def test_more_than_100_levels_of_nesting_are_refused() -> None:
    assert unpacked(nested(100)) == nested(100)
    itself: dict[str, Any] = {}
    itself["again"] = itself
    for state in (nested(101), nested(5000), itself, {"x": {"y": nested(5000)}}):
        for use in (pack, lambda state: Restorer(state, [], {}, {})):
            with pytest.raises(StateError, match="is nested more than 100 levels deep"):
                use(state)  # type: ignore[operator]


def test_a_key_that_is_compared_by_identity_is_refused() -> None:
    with pytest.raises(StateError, match="^x has a key of type torch.Tensor"):
        pack({"x": {torch.ones(1): 1}})


# Tensors --------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2fnuz, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool], ids=str)
def test_tensors_of_every_type_are_restored(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3).to(torch.float32).to(dtype)
    assert bits(unpacked({"x": tensor})) == bits({"x": tensor})


def test_scalars_empty_and_strided_tensors_are_restored() -> None:
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "nhwc": images,
             "turned": torch.rand(2, 3).t()}
    packed = pack(state)
    back = unpack(packed.tree, packed.main)
    assert bits(back) == bits(state)
    assert all(back[name].stride() == state[name].stride() for name in state)


def test_tied_weights_are_written_once() -> None:
    weight = torch.rand(4, 4)
    assert len(pack({"a": weight, "b": weight}).main) == 1
    assert len(pack({"a": weight, "b": weight.t()}).main) == 2


def test_names_that_collide_are_kept_apart() -> None:
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
], ids=["conj", "conj first", "imag of conj", "negative", "transposed", "overlapping", "strided",
        "expanded", "empty", "unfolded"])
def test_views_of_one_tensor_keep_their_own_values(views: list[torch.Tensor]) -> None:
    state = [torch.zeros_like(view) for view in views]
    back = unpacked(views)
    restored(views, state)
    for view, one, other in zip(views, back, state, strict=True):
        assert one.dtype == view.dtype and torch.equal(one, view) and torch.equal(other, view)


def test_an_expanded_tensor_needs_equal_elements() -> None:
    target = torch.zeros(2, 1).expand(2, 3)
    restored([torch.tensor([[1.0] * 3, [2.0] * 3])], [target])
    assert target.tolist() == [[1.0] * 3, [2.0] * 3]
    assert "0 is an expanded tensor" in mismatches([torch.rand(2, 3)], [target])


def test_weights_that_are_tied_only_in_the_state_are_refused() -> None:
    weight = torch.zeros(2)
    assert "b shares its memory with a" in mismatches(
        {"a": weight + 0, "b": weight + 1}, {"a": weight, "b": weight})


class DTensor(torch.Tensor):
    __module__ = "torch.distributed.tensor"


@pytest.mark.parametrize("value, words", [
    (lambda: 0, "of type builtins.function"), (object, "builtins.type"),
    (PerRank(PerRank(1)), "PerRank inside of PerRank"),
    (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"), (torch.eye(2).to_sparse_csr(), "csr"),
    (torch.zeros(2, device="meta"), "on the meta device"),
    (torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8), "quantised"),
    (torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "nested"),
    (nn.parameter.UninitializedParameter(), "lazy module"), (torch.eye(2).to_mkldnn(), "_mkldnn"),
    (torch.rand(2).as_subclass(DTensor), "sharded over the ranks"),
    (numpy.array([object()]), "holds Python objects"),
    (numpy.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), "holds Python objects"),
    (numpy.rec.array([(1, 2)]), "expected an ordinary or a masked numpy array"),
    (numpy.ma.masked, "expected an ordinary or a masked numpy array"),
    (numpy.zeros(1, dtype=numpy.dtype({"names": ["a", "b"], "formats": ["i4", "i2"],
                                       "offsets": [0, 2]})), "fields follow each other"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_saved_is_refused_by_place(value: Any, words: str) -> None:
    with pytest.raises(StateError, match="^x/0.*") as error:
        pack({"x": [value]})
    assert words in str(error.value)


# numpy arrays ---------------------------------------------------------------------------------

ARRAYS = [
    numpy.array([True, False]), *(numpy.arange(6).astype(kind) for kind in "bBhHiIlLefdgFD"),
    numpy.arange(3, dtype=">i4"), numpy.arange(6, dtype="<u2").reshape(2, 3),
    numpy.array(["2024-01-01", "NaT"], dtype="M8[us]"), numpy.array([3], dtype="m8[s]"),
    numpy.array(["a", f"{MU}b"]), numpy.array([b"ab\0", b"c"]), numpy.array("scalar"),
    numpy.array(5.0), numpy.zeros((0, 3)), numpy.zeros(3, dtype="U0"),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), numpy.arange(10)[::-2],
    numpy.broadcast_to(numpy.arange(3), (2, 3)), numpy.array([b"xy"], dtype="V2"),
    numpy.array([(1, (2.5, [1, 2]))],
                dtype=[("a", "<i2"), ("b", [("c", ">f8"), ("d", "u1", (2,))])]),
    numpy.zeros(2, dtype=numpy.dtype([("a", "i1"), ("b", "f8")], align=True)),
    numpy.zeros(2, dtype=numpy.dtype({"names": ["a"], "formats": ["i4"], "titles": ["A"]})),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_are_tensors_of_the_file(array: Any) -> None:
    tree, tensors, _ = saved({"x": array})
    assert len(tensors) == 1 and "base64" not in json.dumps(tree)
    back = unpack(tree, tensors)["x"]
    assert bits(back) == bits(array) and back.flags.writeable
    assert array.dtype.kind == "V" or back.flags.fnc == array.flags.fnc


def test_a_numpy_array_is_copied_only_when_it_is_read() -> None:
    array = numpy.arange(100_000)
    array.flags.writeable = False
    packed = pack({"x": array})
    assert packed.main["x"].data_ptr() == array.ctypes.data and len(json.dumps(packed.tree)) < 300
    assert unpack(packed.tree, packed.main)["x"].ctypes.data != array.ctypes.data


@pytest.mark.parametrize("mask", [[True, False, True], False])
def test_masked_arrays_keep_mask_fill_value_and_hardness(mask: Any) -> None:
    array = numpy.ma.array([1.0, 2.0, 3.0], mask=mask, fill_value=-1.0, hard_mask=True)
    back = unpacked({"x": array})["x"]
    assert type(back) is numpy.ma.MaskedArray and back.tolist() == array.tolist()
    assert back.data.tolist() == [1.0, 2.0, 3.0] and (back.mask == array.mask).all()
    assert back.hardmask and back.fill_value == -1.0
    assert (back.mask is numpy.ma.nomask) == (array.mask is numpy.ma.nomask)


# In place or as a new value -------------------------------------------------------------------

def test_containers_tensors_and_arrays_are_restored_in_place() -> None:
    def fresh(fill: float) -> dict[str, Any]:
        return {"model": nn.Linear(2, 1), "best": fill, "history": [fill], "mean": torch.ones(2) * fill,
                "array": numpy.full(3, fill), "grows": numpy.full(int(fill) + 1, fill),
                "inner": {"count": int(fill), "list": [numpy.full(2, fill)]},
                "own": PerRank({"steps": int(fill)})}

    state = fresh(0)
    array, history, inner, mean = (state[key] for key in ("array", "history", "inner", "mean"))
    nested_array = inner["list"][0]
    assert restored(fresh(7), state) is state
    assert state["best"] == 7 and state["own"].value == {"steps": 7}
    assert array is state["array"] and array.tolist() == [7, 7, 7] and len(state["grows"]) == 8
    assert history is state["history"] and history == [7]
    assert mean is state["mean"] and mean.tolist() == [7, 7]
    assert inner is state["inner"] and inner["count"] == 7 and nested_array.tolist() == [7, 7]


def test_a_value_may_have_changed_its_kind_and_length() -> None:
    source = {"history": [1.0, 2.0], "best": torch.ones(1), "mean": torch.ones(2)}
    back = restored(source, {"history": [], "best": None, "mean": torch.zeros(2)})
    assert back["history"] == [1.0, 2.0] and back["best"].tolist() == [1.0]


def test_all_mismatches_are_named_before_anything_is_changed() -> None:
    model = nn.Linear(4, 6)
    before = bits(model.state_dict())
    found = mismatches({"m": nn.Linear(4, 5), "t": torch.zeros(3), "n": 1},
                       {"m": model, "t": torch.zeros(3).int(), "extra": 2})
    for words in ("m/weight is float32[6, 4], but was saved as float32[5, 4]",
                  "t is int32[3], but was saved as float32[3]",
                  "state: the checkpoint lacks 'extra'", "state: only the checkpoint has 'n'"):
        assert words in found
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("source, state, words", [
    (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), "0: only the checkpoint has 'bias'"),
    (1, nn.Linear(2, 2), "0 is a Linear, but was saved as int"),
    (nn.Linear(2, 2), None, "0 is a NoneType, but was saved as Linear"),
    (3, torch.Generator(), "0 is a torch.Generator on cpu, but was saved as int"),
    (1, PerRank(1), "0 is PerRank, but was saved as common"),
    (PerRank(1), 1, "0 was saved as PerRank"),
    ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)], "0 has 2 items, but was saved with 1"),
    (torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.optim.SGD([torch.zeros(1)]),
     "0 has groups of [1] parameters, but was saved with [2]"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)
def test_another_state_is_refused(source: Any, state: Any, words: str) -> None:
    assert words in mismatches([source], [state])


def test_per_rank_parts_need_the_same_number_of_ranks() -> None:
    tree, tensors, own = saved({"p": PerRank({"seen": 3})})
    back = Restorer({"p": PerRank({"seen": 0})}, tree, tensors, own).restore()
    assert back["p"].value == {"seen": 3}
    found = Restorer({"p": PerRank({})}, tree, tensors, None).mismatches
    assert "another number of ranks" in found[0]


def test_only_replicas_are_common_or_local() -> None:
    linear, norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
    replicas = Replicas(frozenset(map(id, linear.parameters())), frozenset({id(norm.running_mean)}))
    packed = pack({"model": nn.Sequential(linear, norm), "ema": torch.zeros(3)}, replicas)
    assert set(packed.common) == {"model/0.weight", "model/0.bias"}
    assert set(packed.local) == {"model/1.running_mean"}
    assert set(packed.main) == {"model/1.weight", "model/1.bias", "model/1.running_var",
                                "model/1.num_batches_tracked", "ema"}


# Classes of the user --------------------------------------------------------------------------

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

    def __post_init__(self) -> None:
        self.rate *= 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int
    tensor: Any = None


def test_a_dataclass_is_restored_in_place_with_its_content() -> None:
    source = Config(0.5, Mode.COLD, [Point(1, 2), Point(3, (4,))], nn.Linear(2, 2))
    state = Config(model=nn.Linear(2, 2), points=[Point(0, 0)])
    assert restored({"c": source}, {"c": state})["c"] is state
    assert (state.rate, state.mode, state.points) == (0.5, Mode.COLD, source.points)
    assert torch.equal(state.model.weight, source.model.weight)


def test_classes_are_taken_from_anywhere_in_the_state() -> None:
    source = {"a": Mode.COLD, "b": Flags.A | Flags.B, "c": [Frozen(3), Frozen(4)],
              "d": {Mode.WARM: Point(1, 2)}}
    assert restored(source, {"a": Mode.WARM, "b": Flags.A, "c": [Frozen(0)], "d": {},
                             "e": Point(0, 0)}) == source
    target = torch.zeros(1)
    back = restored([Frozen(3, torch.ones(1)), Point(1, torch.ones(2))],
                    [Frozen(0, target), Point(0, torch.zeros(2))])
    assert back[0].size == 3 and back[0].tensor is target and target.tolist() == [1.0]
    assert back[1].x == 1


@pytest.mark.parametrize("source, state, words", [
    ([Mode.COLD], [None], "0 was saved as the enum Mode; expected an instance of it in the state"),
    ([Point(1, 2)], [None], "0 was saved as the namedtuple Point"),
    ([Config()], [None], "0 was saved as the dataclass Config"),
    ([defaultdict(lambda: 1)], [None], "0 was saved as a defaultdict whose factory is "),
])
def test_no_class_is_imported_for_a_file(source: Any, state: Any, words: str) -> None:
    with pytest.raises(StateError) as error:
        Restorer(state, *saved(source))
    assert words in str(error.value)


def test_a_class_with_other_fields_is_refused() -> None:
    other = dataclasses.make_dataclass("Frozen", ["size", "width"])
    assert ("c is a Frozen with the fields size, width, but was saved as Frozen with size, tensor"
            in mismatches({"c": Frozen(1)}, {"c": other(1, 2)}))
    config = Config()
    config.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="^c is a Config that has the attribute 'extra'"):
        pack({"c": config})


def test_a_defaultdict_takes_its_factory_from_the_state() -> None:
    state = {"d": defaultdict(lambda: 7)}
    back = restored({"d": defaultdict(state["d"].default_factory, {1: 2})}, state)["d"]
    assert back == {1: 2} and back[5] == 7
    assert "d is a defaultdict with the factory 'list'" in mismatches(state, {"d": defaultdict(list)})


# Random number generators ---------------------------------------------------------------------

@pytest.mark.parametrize("make", [
    lambda seed: torch.Generator().manual_seed(seed), random.Random, numpy.random.RandomState,
    numpy.random.default_rng, lambda seed: numpy.random.Generator(numpy.random.MT19937(seed)),
    lambda seed: numpy.random.Generator(numpy.random.Philox(seed)),
    lambda seed: numpy.random.Generator(numpy.random.SFC64(seed)),
    lambda seed: numpy.random.Generator(numpy.random.PCG64DXSM(seed)),
], ids=["torch", "python", "RandomState", "PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_generators_continue_where_they_were(make: Any) -> None:
    def draw(generator: Any, count: int = 700) -> list[float]:
        if isinstance(generator, torch.Generator):
            return [torch.rand(1, generator=generator).item() for _ in range(count)]
        return [generator.random() for _ in range(count)]

    generator, other = make(1), make(2)
    draw(generator, 3)
    tree, tensors, own = saved({"g": generator})
    expected = draw(generator)
    restorer = Restorer({"g": other}, tree, tensors, own)
    assert restorer.mismatches == [] and restorer.restore()["g"] is other
    assert draw(other) == expected
    tree["dict"]["g"]["generator"] = "torch.Generator on cuda"
    assert "but was saved as torch.Generator on cuda" in Restorer(
        {"g": other}, tree, tensors, own).mismatches[0]


def draws() -> list[float]:
    return [random.random(), float(torch.rand(1)), float(numpy.random.rand())]


def seeded(seed: int) -> dict[str, Any]:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    states: dict[str, Any] = unpacked(random_states())
    return states


def test_global_generators_continue_where_they_were() -> None:
    states = seeded(1)
    expected = draws()
    assert restore_random_states(states) == []
    assert draws() == expected
    for rank in range(3):  # and on another number of ranks, if they were equal on all
        assert derive_random_states([states, states], rank, 3) == []
        assert draws() == expected


def test_generators_that_differed_are_reseeded_by_rank() -> None:
    states = [seeded(1), seeded(2)]
    drawn = []
    for rank in (0, 1, 2, 0):
        assert set(derive_random_states(states, rank, 3)) == {"python", "torch", "numpy"}
        drawn.append(tuple(draws()))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3
