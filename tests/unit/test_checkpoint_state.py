"""utils/checkpoint: what a state may hold is restored to the last bit, and all else is refused by name."""
from __future__ import annotations

import functools
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map

from tests.unit.checkpoint_states import bits, read_safetensors
from utils.checkpoint import Checkpointer, CheckpointError, PerRank
from utils.checkpoint.entries import DTYPES, StateError
from utils.checkpoint.format import rank_file_name
from utils.checkpoint.pack import unpack
from utils.checkpoint.rng import read_random_states
from utils.checkpoint.snapshot import replicated_parameters

Resume = Callable[[Any, Any], Any]


@pytest.fixture
def resume(tmp_path_factory: pytest.TempPathFactory) -> Resume:
    """Save a state, load it into another one, and return what this one then is."""
    def save_and_load(source: Any, state: Any) -> Any:
        with Checkpointer(tmp_path_factory.mktemp("resume")) as checkpoints:
            checkpoints.save(1, source)
            return checkpoints.load_step(1, state).state
    return save_and_load


class Saved:
    """Has any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# What can be saved ---------------------------------------------------------------------------------------------------

DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100), 1)

PLAIN = [
    None, True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, "", "a/b \N{GREEK SMALL LETTER MU}\n", "\ud800",
    b"\x00\xff", b"\x01" * 70_000, 1 + 2j, complex(math.inf, -0.0), 2**64, -(2**200), 10**5000,
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


def test_values_are_restored_in_type_and_every_bit(resume: Resume) -> None:
    values = [*PLAIN, *ARRAYS, *TENSORS]
    back = resume([Saved(value) for value in values], [Saved(None) for _ in values])
    for value, one in zip(values, (one.state for one in back), strict=True):
        assert bits(one) == bits(value)
        if isinstance(value, torch.Tensor):
            assert one.stride() == value.stride()
        if type(value) is numpy.ndarray:
            assert one.flags.writeable


Z = torch.tensor([1 + 2j, 3 - 4j])
BASE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("source", [
    [Z, Z.conj()], [Z.conj(), Z], [Z.imag, Z.conj().imag], [torch._neg_view(BASE), BASE],
    [BASE, BASE.mT, BASE.t()], [BASE[:2], BASE[1:], BASE], [BASE[:, ::2], BASE[0, 1]],
    [torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(7)], [BASE.unfold(1, 2, 1)],
    {"a": {"b": Z + 1}, "a/b": Z + 2, "__metadata__": Z + 3, "c": {1: Z + 4, "1": Z + 5}},
])
def test_tensors_of_one_memory_or_one_name_keep_their_own_values(source: Any, resume: Resume) -> None:
    assert bits(resume(source, tree_map(torch.zeros_like, source))) == bits(source)
    assert bits(resume([Saved(source)], [Saved(None)])[0].state) == bits(source)


def test_containers_tensors_and_arrays_are_restored_in_place(resume: Resume) -> None:
    def fresh(fill: int) -> dict[str, Any]:
        return {"best": fill, "history": [fill], "mean": torch.ones(2) * fill, "array": numpy.full(3, fill),
                "grows": numpy.full(fill + 1, fill), "inner": {"count": fill, "list": [numpy.full(2, fill)]},
                "own": PerRank({"steps": fill}), "longer": [fill] * fill, "kind": torch.ones(1) if fill else None}

    state, source = fresh(0), fresh(7)
    before = {**state, "nested array": state["inner"]["list"][0]}
    assert resume(source, state) is state and bits(state) == bits(source)
    assert all(state[name] is before[name] for name in ("history", "mean", "array", "inner"))
    assert state["inner"]["list"][0] is before["nested array"]


# optimizers, and a schedule of each
TRAININGS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda p: torch.optim.Adam(p, amsgrad=True), lambda o: lr_scheduler.LambdaLR(o, lambda number: 0.9**number)),
    (lambda p: torch.optim.AdamW(p, fused=True), lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30)),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, mode="exp_range")),
    (lambda p: torch.optim.LBFGS(p, history_size=3), lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1)),
    (torch.optim.Adafactor, lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5])),
    (torch.optim.ASGD,
     lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2])),
]


def train(training: list[Any], steps: int) -> Any:
    """Train a model with its optimizer and its schedule, and return the bits of their states."""
    model, optimizer, schedule = training

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(5)
    for number in range(steps):
        optimizer.step(closure)
        schedule.step(*[1.0 + number] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else [])
    return bits([one.state_dict() for one in training])


@pytest.mark.parametrize("make_optimizer, make_schedule", TRAININGS)
def test_optimizers_and_schedules_continue_with_the_same_bits(
        make_optimizer: Any, make_schedule: Any, resume: Resume) -> None:
    def new() -> list[Any]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = make_optimizer(model.parameters())
        return [model, optimizer, make_schedule(optimizer)]

    one, other = new(), new()
    train(other, 1)
    before = train(one, 4)
    resume(one, other)
    assert train(one, 0) == before, "saving changes nothing"
    assert train(other, 3) == train(one, 3)


class Extra(nn.Module):
    """Has more than tensors in its state, as the metrics of torchmetrics."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


MODULES: dict[str, Callable[[], nn.Module]] = {
    "empty": nn.Identity, "tied": lambda: nn.ModuleList([nn.Linear(2, 2)] * 2),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "average": lambda: AveragedModel(nn.Linear(2, 2), multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True),
    "extra state": lambda: Extra([torch.rand(3), {"seen": 1}]),
    "nested": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(2)]), "b": nn.LSTM(2, 2)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_restored_to_the_last_bit(name: str, resume: Resume) -> None:
    one, other = MODULES[name](), MODULES[name]()
    parameters = list(other.parameters())
    with torch.no_grad():
        for tensor in [*one.parameters(), *one.buffers()]:
            tensor.copy_(torch.randint(1, 9, tensor.shape))
    resume([one], [other])
    assert bits(other.state_dict()) == bits(one.state_dict())
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True)), "in place"


def test_float32_averages_of_bfloat16_parameters_are_not_rounded(resume: Resume) -> None:
    parameter = nn.Parameter(torch.rand(3).bfloat16())
    one, other = (torch.optim.SGD([parameter]) for _ in range(2))
    one.state[parameter]["average"] = torch.rand(3)
    resume([one], [other])
    assert bits(other.state_dict()) == bits(one.state_dict())


def test_files_have_plain_names_and_each_tensor_once(tmp_path: Path) -> None:
    weight = torch.rand(4, 4)
    state = {"long": b"x" * 70_000, "a": weight, "b": weight, "turned": weight.t(),
             "tied": nn.ModuleList([nn.Linear(2, 2)] * 2), "compiled": nn.Sequential(torch.compile(nn.Linear(2, 2)))}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    _, arrays = read_safetensors(tmp_path / "step-000000001" / rank_file_name(0))
    assert set(arrays) == {"long", "a", "turned", "tied/0.weight", "tied/0.bias", "compiled/0.weight",
                           "compiled/0.bias"}


def test_only_parameters_that_an_optimizer_trains_are_equal_on_all_ranks() -> None:
    """The copy of a DDP model in an average of weights is one, too, but nothing keeps it equal."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp, other = (nn.parallel.DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        average, optimizer = AveragedModel(ddp), torch.optim.SGD(ddp.parameters(), 0.1)
        trained = {id(parameter) for parameter in ddp.parameters()}
        for state, expected in (([ddp, optimizer], trained), ([ddp, average, other, optimizer], trained),
                                ([average, optimizer], set()), ([ddp], set()), ([ddp, PerRank(optimizer)], set())):
            assert replicated_parameters(state) == expected
    finally:
        torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "compiled": torch.compile, "activation checkpointing": checkpoint_wrapper, "DDP inside": nn.DataParallel,
    "several": lambda part: nn.DataParallel(torch.compile(checkpoint_wrapper(part)))}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("named", [True, False])
def test_wrapped_parts_are_restored_into_plain_ones_and_back(name: str, named: bool, resume: Resume) -> None:
    """With their optimizer, whose parameters may have names of its own."""
    def training(wrap: Callable[[Any], nn.Module]) -> list[Any]:
        model = nn.ModuleDict({"module": wrap(nn.Linear(2, 2)), "norm": wrap(nn.BatchNorm1d(2)), "x": nn.Linear(2, 2)})
        optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(number))
        optimizer.step()
        return [optimizer] if named else [model, AveragedModel(model), optimizer]

    plain, wrapped = training(lambda part: part), training(WRAPPERS[name])
    for source, target in ((plain, wrapped), (wrapped, plain)):
        for tensor in (tensor for module in source[:-1] for tensor in module.parameters()):
            tensor.data.normal_()
        resume(source, target)
        for before, after in zip(source[:-1], target[:-1], strict=True):
            assert bits(list(after.state_dict().values())) == bits(list(before.state_dict().values()))


@pytest.mark.parametrize("order", ["01", "10"])
def test_a_part_of_a_model_that_is_called_module_keeps_its_name(order: str, resume: Resume) -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(2, 2)}), "a": nn.Linear(2, 2)})
    parts = [model["a"], model["module"]]
    optimizer = torch.optim.SGD(parameter for index in order for parameter in parts[int(index)].parameters())
    source = [model, torch.optim.SGD(parameter for part in parts for parameter in part.parameters())]
    if order == "10":
        with pytest.raises(CheckpointError, match="in the same order"):
            resume(source, [model, optimizer])
    else:
        resume(source, [model, optimizer])


# What cannot be saved, or not be loaded ------------------------------------------------------------------------------

def with_buffer(mask: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask)
    return model


class DTensor(torch.Tensor):
    __module__ = "torch.distributed.tensor"


class FullyShardedDataParallel(nn.Module):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this would gather on all ranks")


class Broken:
    def state_dict(self) -> Any:
        raise KeyError("x")

    def load_state_dict(self, state: Any) -> None:
        raise IndexError("y")


ITSELF: dict[str, Any] = {}
ITSELF["again"] = ITSELF
SHARDED = r"expected .* whole on every rank.*(fully_shard\(\)|PerRank\(zero.optim\))"
REFUSED: list[tuple[Any, str]] = [
    (lambda: 0, " is of type builtins.function"), (object, " is of type builtins.type"),
    (ITSELF, ".* nested more than 100 levels deep"),
    (torch.zeros(1).expand(3), " is an expanded tensor"), (torch.zeros(2).to_sparse(), ".* layout torch.sparse_coo"),
    (torch.zeros(2, device="meta"), " is on the meta device"),
    (nn.LazyLinear(2), "/weight belongs to a lazy module.*Run one batch through the model"),
    (nn.LazyBatchNorm1d(affine=False), "/running_mean belongs to a lazy module"),
    (torch.rand(2).as_subclass(DTensor), f".*{SHARDED}"), (nn.Sequential(FullyShardedDataParallel()), f".*{SHARDED}"),
    (nn.ParameterDict({"weight": nn.Parameter(torch.rand(2, 2).as_subclass(DTensor))}), f"/weight.*{SHARDED}"),
    (type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters()), f".*{SHARDED}"),
    *((one, " is of type .*; expected None, numbers.* leave it out") for one in (
        {1}, defaultdict(list), Path("a"), torch.Size([1]), namedtuple("Point", "x")(1), torch.Generator(),
        numpy.random.default_rng(), numpy.rec.array([(1, 2)]), numpy.ma.masked)),
    *((one, " is a numpy value of type .*; expected") for one in (
        numpy.array([object()]), numpy.str_("a"), numpy.longdouble(1), numpy.arange(3, dtype=">i4"))),
]
REFUSED_BY_SAVE: list[tuple[Any, str]] = [
    (Broken(), r": state_dict\(\) of this Broken failed: KeyError: 'x'"),
    (PerRank(PerRank(1)), ".* PerRank inside of PerRank"), ({torch.ones(1): 1}, " has a key of type Tensor"),
    (nn.Linear(2, 2, device="meta"), r"/weight is on the meta device.*to_empty\(device=\.\.\.\)"),
    (with_buffer(torch.zeros(1).expand(3)), "/mask is an expanded tensor"),
]


@pytest.mark.parametrize("value, words, by_load", [
    *((*row, True) for row in REFUSED), *((*row, False) for row in REFUSED_BY_SAVE)])
def test_what_cannot_be_saved_is_refused_by_place(value: Any, words: str, by_load: bool, tmp_path: Path) -> None:
    """Most of it by load_latest(), when the training starts: the first save is too late."""
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=f"^x/0{words}"):
            checkpoints.save(1, {"x": [value]})
        if by_load:
            with pytest.raises(CheckpointError, match=f"into this state: x/0{words}"):
                checkpoints.load_latest({"x": [value]})


def optimized(*order: int) -> dict[str, Any]:
    """A model, and an optimizer with its parameters in this order."""
    model = nn.ParameterList([torch.rand(2), torch.rand(2), torch.rand(2)])
    return {"model": model, "optimizer": torch.optim.Adam([{"params": [model[index]]} for index in order])}


A, B, C, D = (nn.Parameter(torch.rand(*shape)) for shape in ((2,), (3,), (2,), (2, 2)))
SGD, LINEAR = torch.optim.SGD([A]), nn.Linear(2, 2)


@pytest.mark.parametrize("source, state, words", [
    (1, LINEAR, "x is a Linear, but was saved as int"), (LINEAR, None, "x is a NoneType, but was saved as Linear"),
    (Saved(1), LINEAR, "saved as Saved without entries"),
    (1, PerRank(1), "x is PerRank, but was saved as common"), (PerRank(1), 1, "x was saved as PerRank"),
    ([A.data], [A.data, A.data + 0], "x has 2 items, but was saved with 1"),
    ({"a": A.data + 0, "b": A.data + 1}, {"a": A.data, "b": A.data}, "x/b shares its memory with x/a"),
    (torch.optim.Adam([A]), torch.optim.AdamW([A]), "x is a AdamW, but was saved as Adam"),
    (lr_scheduler.StepLR(SGD, 3), lr_scheduler.ExponentialLR(SGD, 1), "x is a ExponentialLR, but was saved as StepLR"),
    (torch.optim.SGD(LINEAR.parameters()), SGD, "x has groups of [1] parameters, but was saved with [2]"),
    (torch.optim.SGD([A, B]), torch.optim.SGD([B, A]), "has a parameter of shape [3] as parameter 0 of group 0"),
    (torch.optim.SGD([("x", A)]), torch.optim.SGD([("y", A)]), "has y of shape [2] as parameter 0 of group 0"),
    (optimized(0, 1, 2), optimized(0, 2, 1),
     "x/optimizer has x/model/2 of shape [2] as parameter 0 of group 1, but was saved with x/model/1 "
     "of shape [2] there. Give the optimizer the same parameters in the same order"),
    ([A, C, torch.optim.SGD([A, C])], [A, C, torch.optim.SGD([C, A])], "x/2 has x/1 of shape [2] as parameter 0 of"),
    ([LINEAR.state_dict(), torch.optim.SGD([LINEAR.weight, D])],
     [LINEAR.state_dict(), torch.optim.SGD([D, LINEAR.weight])], "was saved with x/0/weight of shape [2, 2] there"),
    ([D, torch.optim.SGD([LINEAR.weight, D])],
     [D, torch.optim.SGD([D, LINEAR.weight])], "saved with one of shape [2, 2]"),
    (LINEAR, nn.Linear(2, 2, device="meta"), "x/weight is on the meta device"),
    (Saved(1), Broken(), "x: it could not be restored, and the entries before it are restored already: IndexError: y"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_another_state_is_refused(source: Any, state: Any, words: str, resume: Resume) -> None:
    with pytest.raises(CheckpointError) as error:
        resume({"x": source}, {"x": state})
    assert words in str(error.value)


@pytest.mark.parametrize("state, unchecked", [
    ({"opt": torch.optim.SGD([A, C])}, "opt (SGD)"), ({"a": A, "opt": torch.optim.SGD([A, C, D])}, ""),
    ({"opt": torch.optim.SGD([("a", A), ("c", C)])}, ""), ({"opt": torch.optim.SGD([A, B])}, ""),
    ({"a": nn.ParameterList([A]), "own": PerRank([torch.optim.Adam([A, D, C, nn.Parameter(torch.rand(2))])])},
     "own/own/0 (Adam)")])
def test_parameters_whose_order_cannot_be_checked_are_said_once(
        state: Any, unchecked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    said = [record.getMessage() for record in caplog.records if "in the same order" in record.getMessage()]
    assert len(said) == bool(unchecked) and all(f"of {unchecked}:" in text for text in said)


class Average(nn.Module):
    """A module of a user, which counts and remembers outside of its state_dict()."""

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        self.average, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.num_updates, self.decay, self.eps, self.is_warm = 0, 0.9, 1e-6, False
        self.max_seq_len_cached, self._calls = 16, 0
        self.extra = extra

    def get_extra_state(self) -> dict[str, int]:
        return {"step": self.num_updates} if self.extra else {}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_updates = state.get("step", 0)

    def update(self) -> None:
        self.num_updates, self._calls, self.is_warm = self.num_updates + 1, self._calls + 1, True
        self.max_seq_len_cached *= 2
        self.norm(self.average(torch.ones(2, 2)))


def counters_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if "attribute)" in record.getMessage()]
    return [text.partition(": ")[0].removeprefix("the saved state lacks ") for text in texts]


def train_and_save(folder: Path, state: dict[str, Any], average: Average, *, saves: int, loads: bool,
                   **entries: Callable[[Average], Any]) -> None:
    with Checkpointer(folder) as checkpoints:
        for name, entry in entries.items():
            state[name] = entry(average)
        if loads:
            checkpoints.load_latest(state)
        for step in range(1, saves + 1):
            average.update()
            for name, entry in entries.items():
                state[name] = entry(average)
            checkpoints.save(step, state)


@pytest.mark.parametrize(("loads", "saves", "expected"), [
    (True, 3, ["ema.num_updates (an int attribute)"]), (True, 1, ["ema.num_updates (an int attribute)"]),
    (False, 3, ["ema.num_updates (an int attribute)"]), (False, 1, [])])
def test_a_counter_that_no_state_has_is_said_once(
        loads: bool, saves: int, expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = Average()
    optimizer = torch.optim.Adam(average.parameters())
    optimizer.step()
    state = {"ema": average, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 5)}
    train_and_save(tmp_path, state, average, saves=saves, loads=loads, step=lambda average: average.num_updates)
    assert counters_said(caplog) == expected


def test_counters_inside_wrapped_models_are_named_by_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = Average()
    state = {"models": [torch.compile(nn.Sequential(nn.Linear(2, 2), average))]}
    with Checkpointer(tmp_path) as checkpoints:
        for step in range(2):
            average.decay /= 2
            checkpoints.save(step, state)
    assert counters_said(caplog) == ["models/0.1.decay (a float attribute)"]


@pytest.mark.parametrize("entries", [
    {"num_updates": lambda average: average.num_updates}, {"averaged": lambda average: [0, average.num_updates]},
    {"ema_step": lambda average: torch.tensor(average.num_updates)},
    {"rank": lambda average: PerRank({"count": average.num_updates})},
    {"other": lambda average: Saved({"n": average.num_updates})}])
def test_counters_that_the_state_has_elsewhere_are_not_said(
        entries: dict[str, Callable[[Average], Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = Average()
    train_and_save(tmp_path, {"ema": average, "step": 0}, average, saves=3, loads=True, **entries)
    assert counters_said(caplog) == []


def test_counters_of_an_extra_state_are_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = Average(extra=True)
    train_and_save(tmp_path, {"ema": average}, average, saves=2, loads=True)
    resumed = Average(extra=True)
    train_and_save(tmp_path / "2", {"ema": resumed, "step": 0}, resumed, saves=2, loads=True)
    assert counters_said(caplog) == []


# Files that somebody has changed --------------------------------------------------------------------------------------

TOO_DEEP: Any = functools.reduce(lambda tree, _: {"tuple": [tree]}, range(120), [])


@pytest.mark.parametrize("tree", [
    {"eval": "1"}, {}, {"object": "x"}, {"bytes": "?"}, {"array": {"dtype": "O", "shape": [1]}}, TOO_DEEP,
    {"tensor": "t", "dtype": "load", "shape": [4]}, {"tensor": "t", "dtype": "float32", "shape": [5]},
    {"tensor": "t", "dtype": "int64", "shape": [2]},
    {"tensor": "t", "dtype": "float32", "shape": [2, 2], "stride": [1, 10**12]},
], ids=lambda tree: json.dumps(tree)[:60])
def test_trees_that_are_never_written_are_refused_by_place(tree: Any) -> None:
    with pytest.raises(StateError, match="^x/0"):
        unpack({"dict": {"x": [tree]}}, {"t": torch.zeros(4)})
    # A generator's position outside its state
    with pytest.raises(StateError, match="outside the generator's state"):
        read_random_states({"dict": {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]}})
