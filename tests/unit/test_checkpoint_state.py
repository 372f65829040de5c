"""utils/checkpoint_state.py and checkpoint_random.py: a state comes back exactly as it was, or is refused by name."""
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

from utils.checkpoint_fitting import Fitting
from utils.checkpoint_random import derive_random_states, random_states, restore_random_states
from utils.checkpoint_state import PerRank, Replicas, pack, unpack
from utils.checkpoint_values import Unfit


def through_json(state: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    packed = pack(state)
    tree, own = json.loads(json.dumps([packed.tree, packed.own]))
    return tree, {**packed.common, **packed.main, **packed.mine}, own


def there_and_back(state: Any) -> Any:
    tree, tensors, _ = through_json(state)
    return unpack(tree, tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in type, in value to the last bit, and in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    return bool(a == b) or a != a and b != b


@pytest.mark.parametrize("value", [
    None, True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, "", "a/b \N{GREEK SMALL LETTER MU}\n", b"\x00\xff", 1 + 2j,
    (), [], {}, (1, (2, [3])), {1: "a", "1": "b", None: 1, (1, 2): 2.5, True and 2: 0}, {"tensor": 1, "dict": {}},
    {"object": {"per rank": []}}, OrderedDict([("b", 1), ("a", 2)]), Counter({3: 1, 5: 2}), {1, 2}, frozenset({7}),
    torch.bfloat16, torch.Size([2, 3]), numpy.float32(0.1), numpy.int64(5), numpy.arange(6, dtype="<u2").reshape(2, 3),
], ids=repr)
def test_plain_data_comes_back_in_type_and_value(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint64, torch.bool], ids=str)
def test_tensors_of_every_type_come_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3).to(torch.float32).to(dtype)
    back = there_and_back({"x": tensor})["x"]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_scalars_empty_and_strided_tensors_come_back() -> None:
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "nhwc": images, "turned": torch.rand(2, 3).t()}
    assert same(there_and_back(state), state)


def test_tied_weights_are_written_once() -> None:
    weight = torch.rand(4, 4)
    assert len(pack({"a": weight, "b": weight}).main) == 1
    assert len(pack({"a": weight, "b": weight.t()}).main) == 2


def test_names_that_collide_are_kept_apart() -> None:
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "c": {1: torch.tensor(3), "1": torch.tensor(4)}}
    assert same(there_and_back(state), state)


@pytest.mark.parametrize("value, words", [
    (lambda: 0, "x/0 is of type builtins.function"), (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
    (torch.zeros(2, device="meta"), "on the meta device"), (object, "builtins.type"), (PerRank(PerRank(1)), "PerRank"),
])
def test_what_is_neither_plain_data_nor_a_tensor_is_refused_by_place_and_type(value: Any, words: str) -> None:
    with pytest.raises(Unfit, match=r"x/0.*") as error:
        pack({"x": [value]})
    assert words in str(error.value)


class Tiny(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


def trained() -> tuple[Tiny, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), amsgrad=True)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])], [2])
    for _ in range(3):
        model(torch.rand(8, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_model_optimizer_and_schedule_are_restored_in_place_to_the_last_bit() -> None:
    first, second = trained(), trained()
    parameters = list(second[0].parameters())
    tree, tensors, _ = through_json({"all": first})
    fitting = Fitting({"all": second}, tree, tensors, {})
    assert fitting.problems == []
    restored = fitting.restore()
    assert restored["all"] == second and list(second[0].parameters()) == parameters
    for a, b in zip(first, second, strict=True):
        assert same(a.state_dict(), b.state_dict())  # type: ignore[attr-defined]


def test_an_optimizer_that_was_restored_holds_none_of_the_memory_that_was_read() -> None:
    (model, optimizer, _), (other, fresh, _) = trained(), trained()
    tree, tensors, _ = through_json({"model": model, "optimizer": optimizer})
    Fitting({"model": other, "optimizer": fresh}, tree, tensors, {}).restore()
    for tensor in tensors.values():
        tensor.detach().zero_()
    assert all(bool(state["exp_avg"].any()) for state in fresh.state.values())
    assert bool(other.linear.weight.any())


def test_only_known_replicas_are_common_or_local() -> None:
    model = Tiny()
    replicas = Replicas(frozenset(map(id, model.linear.parameters())), frozenset({id(model.norm.running_mean)}))
    packed = pack({"model": model, "ema": torch.zeros(3)}, replicas)
    assert set(packed.common) == {"model/linear.weight", "model/linear.bias"}
    assert set(packed.local) == {"model/norm.running_mean"}
    assert set(packed.main) == {"model/norm.weight", "model/norm.bias", "model/norm.running_var",
                                "model/norm.num_batches_tracked", "ema"}


def test_a_compiled_model_is_saved_as_the_plain_one() -> None:
    assert set(pack({"model": torch.compile(nn.Linear(2, 2))}).main) == {"model/weight", "model/bias"}


def test_plain_data_is_replaced_and_tensors_are_filled() -> None:
    tree, tensors, _ = through_json({"epoch": 7, "history": [1.0, 2.0], "mean": torch.ones(2), "best": torch.ones(1)})
    mean = torch.zeros(2)
    pattern = {"epoch": 0, "history": [], "mean": mean, "best": None}
    restored = Fitting(pattern, tree, tensors, {}).restore()
    assert restored["epoch"] == 7 and restored["history"] == [1.0, 2.0] and restored["best"].tolist() == [1.0]
    assert restored["mean"] is mean and mean.tolist() == [1.0, 1.0]
    assert restored is pattern


def test_a_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(1)
    tree, tensors, _ = through_json([generator])
    expected = torch.rand(3, generator=generator)
    Fitting([generator], tree, tensors, {}).restore()
    assert torch.equal(torch.rand(3, generator=generator), expected)


def problems(saved: Any, state: Any) -> str:
    return "; ".join(Fitting(state, *through_json(saved)).problems)


def test_everything_that_does_not_fit_is_named_before_anything_is_changed() -> None:
    model = Tiny(6)
    before = there_and_back(model.state_dict())
    found = problems({"m": Tiny(), "t": torch.zeros(3), "n": 1}, {"m": model, "t": torch.zeros(3).int(), "extra": 2})
    assert "m/linear.weight is float32[6, 4], but was saved as float32[5, 4]" in found
    assert "t is int32[3], but was saved as float32[3]" in found
    assert "state: the checkpoint lacks 'extra'" in found and "state: only the checkpoint has 'n'" in found
    assert same(before, model.state_dict())


@pytest.mark.parametrize("saved, state, words", [
    ({"m": nn.Linear(2, 2)}, {"m": nn.Linear(2, 2, bias=False)}, "m: only the checkpoint has 'bias'"),
    ({"m": 1}, {"m": nn.Linear(2, 2)}, "m is a Linear, but was saved as int"),
    ({"m": nn.Linear(2, 2)}, {"m": None}, "m is a NoneType, but was saved as Linear"),
    ({"g": 3}, {"g": torch.Generator()}, "g is a torch.Generator on cpu, but was saved as int"),
    ({"p": 1}, {"p": PerRank(1)}, "p is PerRank, but was saved as common"),
    ({"p": PerRank(1)}, {"p": 1}, "p was saved as PerRank"),
    ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)], "the state has 2 items, but was saved with 1"),
    ({"o": torch.optim.SGD(nn.Linear(2, 2).parameters())}, {"o": torch.optim.SGD([torch.zeros(1)])},
     "o has groups of [1] parameters, but was saved with [2]"),
])
def test_a_state_of_another_shape_is_refused(saved: Any, state: Any, words: str) -> None:
    assert words in problems(saved, state)


def test_a_part_of_each_rank_is_refused_under_another_number_of_ranks() -> None:
    tree, tensors, own = through_json({"p": PerRank({"seen": 3})})
    assert Fitting({"p": PerRank({"seen": 0})}, tree, tensors, own).restore()["p"].value == {"seen": 3}
    assert "another number of ranks" in Fitting({"p": PerRank({})}, tree, tensors, None).problems[0]


def draws() -> list[float]:
    return [random.random(), float(torch.rand(1)), float(numpy.random.rand())]


def seeded(seed: int) -> dict[str, Any]:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    states: dict[str, Any] = there_and_back(random_states())
    return states


def test_random_generators_go_on_as_they_were() -> None:
    states = seeded(1)
    expected = draws()
    assert restore_random_states(states) == []
    assert draws() == expected


def test_generators_that_were_alike_on_all_ranks_stay_alike_when_the_number_of_ranks_changes() -> None:
    states = seeded(1)
    expected = draws()
    for rank in range(3):
        assert derive_random_states([states, states], rank, 3) == []
        assert draws() == expected


def test_generators_that_differed_get_a_state_of_their_own_on_each_rank_and_the_same_at_every_resume() -> None:
    saved = [seeded(1), seeded(2)]
    drawn = []
    for rank in (0, 1, 2, 0):
        assert set(derive_random_states(saved, rank, 3)) == {"python", "torch", "numpy"}
        drawn.append(tuple(draws()))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


# Views, numpy arrays and values of the standard library ---------------------------------------------------------------

def restored(saved: Any, state: Any) -> Any:
    fitting = Fitting(state, *through_json(saved))
    assert fitting.problems == []
    return fitting.restore()


Z = torch.tensor([1 + 2j, 3 - 4j])
BASE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("views", [
    [Z, Z.conj()], [Z.conj(), Z], [Z.imag, Z.conj().imag], [torch._neg_view(BASE), BASE], [BASE, BASE.mT, BASE.t()],
    [BASE[:2], BASE[1:], BASE], [BASE[:, ::2], BASE[0, 1]], [torch.tensor([1.0]).expand(5), BASE[:1].expand(3, 4)],
    [torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(7)], [BASE.unfold(1, 2, 1)],
], ids=["conj", "conj first", "imag of conj", "negative", "transposed", "overlapping", "strided", "expanded", "empty",
        "unfolded"])
def test_views_of_one_tensor_are_saved_each_with_its_own_values(views: list[torch.Tensor]) -> None:
    state = [torch.zeros_like(view) for view in views]
    back = there_and_back(views)
    restored(views, state)
    for view, one, other in zip(views, back, state, strict=True):
        assert one.dtype == view.dtype and torch.equal(one, view) and torch.equal(other, view)


def test_an_expanded_tensor_is_restored_in_place_if_its_elements_are_alike() -> None:
    target = torch.zeros(2, 1).expand(2, 3)
    restored([torch.tensor([[1.0] * 3, [2.0] * 3])], [target])
    assert target.tolist() == [[1.0] * 3, [2.0] * 3]
    assert "0 is an expanded tensor" in problems([torch.rand(2, 3)], [target])


def test_weights_tied_here_that_were_not_tied_there_are_refused() -> None:
    weight = torch.zeros(2)
    assert "b shares its memory with a" in problems({"a": weight + 0, "b": weight + 1}, {"a": weight, "b": weight})


def test_a_tensor_named_like_the_header_of_safetensors_is_kept() -> None:
    assert "__metadata__" not in pack({"__metadata__": torch.ones(2)}).main


@pytest.mark.parametrize("value", [
    torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8), torch.eye(2).to_sparse_csr(),
    torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), nn.parameter.UninitializedParameter(),
    torch.eye(2).to_mkldnn(),
], ids=["quantised", "csr", "nested", "lazy", "mkldnn"])
def test_other_tensors_are_refused_by_place(value: torch.Tensor) -> None:
    with pytest.raises(Unfit, match="^x/0 is "):
        pack({"x": [value]})


ARRAYS = [
    numpy.array([True, False]), *(numpy.arange(6).astype(kind) for kind in "bBhHiIlLefdgFD"),
    numpy.arange(3, dtype=">i4"), numpy.array(["2024-01-01", "NaT"], dtype="M8[us]"), numpy.array([3], dtype="m8[s]"),
    numpy.array(["a", "\N{GREEK SMALL LETTER MU}b"]), numpy.array([b"ab\0", b"c"]), numpy.array("scalar"),
    numpy.array(5.0), numpy.zeros((0, 3)), numpy.zeros(3, dtype="U0"),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), numpy.arange(10)[::-2],
    numpy.broadcast_to(numpy.arange(3), (2, 3)), numpy.array([b"xy"], dtype="V2"),
    numpy.array([(1, (2.5, [1, 2]))], dtype=[("a", "<i2"), ("b", [("c", ">f8"), ("d", "u1", (2,))])]),
    numpy.zeros(2, dtype=numpy.dtype([("a", "i1"), ("b", "f8")], align=True)),
    numpy.zeros(2, dtype=numpy.dtype({"names": ["a"], "formats": ["i4"], "titles": ["A"]})),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_are_tensors_of_the_file_and_come_back(array: Any) -> None:
    tree, tensors, _ = through_json({"x": array})
    assert len(tensors) == 1 and "base64" not in json.dumps(tree)
    back = unpack(tree, tensors)["x"]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes() and back.flags.writeable
    assert array.dtype.kind == "V" or back.flags.fnc == array.flags.fnc


def test_a_numpy_array_is_not_copied_to_be_saved_and_not_shared_when_it_is_back() -> None:
    array = numpy.arange(100_000)
    array.flags.writeable = False
    tree, tensors, _ = through_json({"x": array})
    assert tensors["x"].data_ptr() == array.ctypes.data and len(json.dumps(tree)) < 300
    assert unpack(tree, tensors)["x"].ctypes.data != array.ctypes.data


@pytest.mark.parametrize("scalar", [
    numpy.float16(1.5), numpy.str_("ab"), numpy.bytes_(b"ab"), numpy.datetime64("2024-01-01"), numpy.datetime64("NaT"),
    numpy.timedelta64(3, "h"), numpy.bool_(True), numpy.longdouble(0.1), numpy.array([(1, 2.5)], dtype="i4,f8")[0],
    numpy.str_("")], ids=repr)
def test_numpy_scalars_come_back(scalar: Any) -> None:
    back = there_and_back([scalar])[0]
    assert type(back) is type(scalar) and back.dtype == scalar.dtype and repr(back) == repr(scalar)


@pytest.mark.parametrize("mask", [[True, False, True], False])
def test_masked_arrays_keep_mask_fill_value_and_hardness(mask: Any) -> None:
    array = numpy.ma.array([1.0, 2.0, 3.0], mask=mask, fill_value=-1.0, hard_mask=True)
    back = there_and_back({"x": array})["x"]
    assert type(back) is numpy.ma.MaskedArray and back.tolist() == array.tolist() and back.fill_value == -1.0
    assert back.data.tolist() == [1.0, 2.0, 3.0] and back.hardmask and (back.mask == array.mask).all()
    assert (back.mask is numpy.ma.nomask) == (array.mask is numpy.ma.nomask)


@pytest.mark.parametrize("value", [
    numpy.array([object()]), numpy.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), numpy.matrix([[1]]),
    numpy.rec.array([(1, 2)]), numpy.ma.masked,
    numpy.zeros(1, dtype=numpy.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})),
], ids=["object", "object field", "matrix", "record", "masked", "overlapping fields"])
def test_other_numpy_arrays_are_refused_by_place(value: Any) -> None:
    with pytest.raises(Unfit, match="^x/0 is "):
        pack({"x": [value]})


@pytest.mark.parametrize("value", [
    2**64, -(2**200), 10**5000, "x" * 70_000, b"\x01" * 70_000, bytearray(b"ab"), bytearray(70_000), "\ud800",
    "\ud800" * 70_000, Path("a/b"), PurePosixPath("/x"), datetime(2024, 5, 1, 12, fold=1), date(2024, 5, 1),
    datetime(2024, 5, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-3))), timedelta(days=-1, microseconds=5),
    Decimal("1.10"), Decimal("-0E+5"), Fraction(-3, 10**30), range(3, 10**30, 7), torch.device("cuda:1"),
    deque([1, 2], maxlen=3), deque(), defaultdict(list, {1: [2]}), defaultdict(None, a=1), defaultdict(int, a=1),
    complex(math.inf, -0.0), {10**30: 1}, {Path("a"): 1, datetime(2024, 1, 1): 2}, Counter(), OrderedDict(), {},
], ids=lambda value: f"{type(value).__name__}-{str(value)[:20] if type(value) is not int else value.bit_length()}")
def test_values_of_the_standard_library_come_back(value: Any) -> None:
    tree, tensors, _ = through_json([value])
    back = unpack(tree, tensors)[0]
    assert same(back, value) and len(json.dumps(tree)) < 20_000
    if isinstance(value, deque | defaultdict):
        names = ("maxlen", "default_factory")
        assert [getattr(back, name, 0) for name in names] == [getattr(value, name, 0) for name in names]
    if isinstance(value, datetime):
        assert back.fold == value.fold and back.tzinfo == value.tzinfo


def test_a_time_zone_that_would_be_lost_is_refused() -> None:
    with pytest.raises(Unfit, match="^t has the time zone"):
        pack({"t": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET"))})


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def test_deep_nesting_is_refused_by_place_and_up_to_100_levels_saved() -> None:
    assert there_and_back(nested(100)) == nested(100)
    itself: dict[str, Any] = {}
    itself["again"] = itself
    for state in (nested(101), nested(5000), itself, {"x": {"y": nested(5000)}}):
        with pytest.raises(Unfit, match="is nested more than 100 levels deep"):
            pack(state)
        with pytest.raises(Unfit, match="is nested more than 100 levels deep"):
            Fitting(state, [], {}, {})


def test_a_key_that_is_compared_by_identity_is_refused() -> None:
    with pytest.raises(Unfit, match="^x has a key of type torch.Tensor"):
        pack({"x": {torch.ones(1): 1}})


# Classes of the user --------------------------------------------------------------------------------------------------

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


def test_a_dataclass_is_restored_in_place_with_all_that_it_holds() -> None:
    saved = Config(0.5, Mode.COLD, [Point(1, 2), Point(3, (4,))], nn.Linear(2, 2))
    state = Config(model=nn.Linear(2, 2), points=[Point(0, 0)])
    assert "points has 1 items, but was saved with 2" not in problems({"c": saved}, {"c": state})
    back = restored({"c": saved}, {"c": state})
    assert back["c"] is state and (state.rate, state.mode, state.points) == (0.5, Mode.COLD, saved.points)
    assert torch.equal(state.model.weight, saved.model.weight)


def test_classes_are_taken_from_anywhere_in_the_state() -> None:
    saved = {"a": Mode.COLD, "b": Flags.A | Flags.B, "c": [Frozen(3), Frozen(4)], "d": {Mode.WARM: Point(1, 2)}}
    state = {"a": Mode.WARM, "b": Flags.A, "c": [Frozen(0)], "d": {}, "e": Point(0, 0)}
    assert restored(saved, state) == saved
    target = torch.zeros(1)
    back = restored([Frozen(3, torch.ones(1)), Point(1, torch.ones(2))], [Frozen(0, target), Point(0, torch.zeros(2))])
    assert back[0].size == 3 and back[0].tensor is target and target.tolist() == [1.0] and back[1].x == 1


@pytest.mark.parametrize("saved, state, words", [
    ({"m": Mode.COLD}, {"m": None}, "m was saved as the enum Mode; expected an instance of it in the state"),
    ({"p": Point(1, 2)}, {"p": None}, "p was saved as the namedtuple Point"),
    ({"c": Config()}, {"c": None, "m": Mode.WARM}, "c was saved as the dataclass Config"),
    ({"d": defaultdict(lambda: 1)}, {"d": None}, "d was saved as a defaultdict whose factory is "),
])
def test_no_class_is_imported_for_a_file(saved: Any, state: Any, words: str) -> None:
    with pytest.raises(Unfit) as error:
        Fitting(state, *through_json(saved))
    assert words in str(error.value)


def test_a_class_with_other_fields_is_refused() -> None:
    other = dataclasses.make_dataclass("Frozen", ["size", "width"])
    assert "c is a Frozen with the fields size, width, but was saved as Frozen with size, tensor" in problems(
        {"c": Frozen(1)}, {"c": other(1, 2)})
    with_more = Config()
    with_more.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(Unfit, match="^c is a Config that has the attribute 'extra'"):
        pack({"c": with_more})


def test_a_defaultdict_takes_its_factory_from_the_state() -> None:
    state = {"d": defaultdict(lambda: 7)}
    back = restored({"d": defaultdict(state["d"].default_factory, {1: 2})}, state)["d"]
    assert back == {1: 2} and back[5] == 7
    assert "d is a defaultdict with the factory 'list'" in problems(state, {"d": defaultdict(list)})


@pytest.mark.parametrize("make", [
    lambda seed: random.Random(seed), lambda seed: numpy.random.RandomState(seed),
    lambda seed: numpy.random.default_rng(seed), lambda seed: numpy.random.Generator(numpy.random.MT19937(seed)),
    lambda seed: numpy.random.Generator(numpy.random.Philox(seed)),
    lambda seed: numpy.random.Generator(numpy.random.SFC64(seed)),
    lambda seed: numpy.random.Generator(numpy.random.PCG64DXSM(seed)),
], ids=["python", "RandomState", "PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_generators_of_python_and_numpy_go_on_where_they_were(make: Any) -> None:
    generator, other = make(1), make(2)
    generator.normalvariate(0, 1) if isinstance(generator, random.Random) else generator.normal(size=3)
    tree = through_json({"g": generator})
    expected = [generator.random() for _ in range(700)]
    fitting = Fitting({"g": other}, *tree)
    assert fitting.problems == [] and fitting.restore()["g"] is other
    assert [other.random() for _ in range(700)] == expected
    assert "g is a torch.Generator on cpu, but was saved as" in problems({"g": generator}, {"g": torch.Generator()})


def test_a_generator_of_a_gpu_is_not_restored_into_one_of_the_cpu() -> None:
    tree, tensors, own = through_json([torch.Generator()])
    tree[0]["generator"] = "torch.Generator on cuda"
    assert Fitting([torch.Generator()], tree, tensors, own).problems == [
        "0 is a torch.Generator on cpu, but was saved as torch.Generator on cuda"]
