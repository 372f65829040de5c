"""utils/checkpoint_state.py and checkpoint_random.py: a state comes back exactly as it was, or is refused by name."""
from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from utils.checkpoint_random import derive_random_states, random_states, restore_random_states
from utils.checkpoint_state import Fitting, PerRank, Replicas, Unfit, pack, unpack


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
    (torch.zeros(2, device="meta"), "on meta"), (range(3), "builtins.range"), (PerRank(PerRank(1)), "PerRank"),
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
    assert pattern["epoch"] == 0


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
    ({"g": 3}, {"g": torch.Generator()}, "g is a torch.Generator, but was saved as int"),
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
