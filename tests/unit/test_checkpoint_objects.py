"""utils/checkpoint: modules, optimizers and schedules are restored to the last bit, or refused by name."""
from __future__ import annotations

import dataclasses
import random
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.checkpoint_states import bits, refusal, restored
from utils.checkpoint import Checkpointer, CheckpointError, PerRank
from utils.checkpoint.entries import StateError
from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer

# optimizers, and a schedule of each
TRAININGS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda p: torch.optim.Adam(p, amsgrad=True), lambda o: lr_scheduler.LambdaLR(o, lambda number: 0.9**number)),
    (lambda p: torch.optim.AdamW(p, fused=True), lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30)),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
     lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2)),
    (lambda p: torch.optim.LBFGS(p, history_size=3), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    (torch.optim.Adafactor, lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5])),
    (torch.optim.ASGD,
     lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2])),
    (torch.optim.RMSprop, lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, mode="exp_range", cycle_momentum=False)),
    (torch.optim.Rprop, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1)),
    (torch.optim.NAdam,
     lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 3)])),
]


def train(training: list[Any], steps: int) -> Any:
    """Train a model with its optimizer and its schedule, and return the bits of their states."""
    model, optimizer, schedule = training

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        return loss

    for number in range(steps):
        optimizer.step(closure)
        schedule.step(*[1.0 + number] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else [])
    return bits([one.state_dict() for one in training])


@pytest.mark.parametrize("make_optimizer, make_schedule", TRAININGS)
def test_optimizers_and_schedules_continue_with_the_same_bits(make_optimizer: Any, make_schedule: Any) -> None:
    def after(steps: int) -> list[Any]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = make_optimizer(model.parameters())
        training = [model, optimizer, make_schedule(optimizer)]
        train(training, steps)
        return training

    one, other = after(4), after(1)
    before = train(one, 0)
    restored(one, other)
    assert train(one, 0) == before, "saving changes nothing"
    torch.manual_seed(5)
    expected = train(one, 3)
    torch.manual_seed(5)
    assert train(other, 3) == expected


def test_float32_averages_of_bfloat16_parameters_are_not_rounded() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for parameter in model.parameters():
            optimizer.state[parameter]["average"] = torch.rand(parameter.shape)
        return model, optimizer

    one, other = make(), make()
    restored(one, other)
    assert bits(other[1].state_dict()) == bits(one[1].state_dict())


class Extra(nn.Module):
    """Has more than tensors in its state, as the metrics of torchmetrics."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "empty": nn.Identity, "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "average": lambda: AveragedModel(nn.Linear(2, 2), multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True),
    "extra tensor": lambda: Extra(torch.rand(2)), "extra list": lambda: Extra([torch.rand(3), {"seen": 1}]),
    "nested": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(2)]), "b": nn.LSTM(2, 2)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_restored_to_the_last_bit(name: str) -> None:
    one, other = MODULES[name](), MODULES[name]()
    parameters = list(other.parameters())
    with torch.no_grad():
        for tensor in [*one.parameters(), *one.buffers()]:
            tensor.copy_(torch.randint(1, 9, tensor.shape))
    restored({"m": one}, {"m": other})
    assert bits(other.state_dict()) == bits(one.state_dict())
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True)), "in place"


def test_tied_weights_are_written_once() -> None:
    weight = torch.rand(4, 4)
    assert len(pack([Tied()]).main) == 1
    assert len(pack({"a": weight, "b": weight, "turned": weight.t()}).main) == 2


def test_compiled_parts_have_their_plain_names() -> None:
    assert set(pack({"model": torch.compile(nn.Linear(2, 2))}).main) == {"model/weight", "model/bias"}
    one = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert set(pack([one]).main) == {"0/0.weight", "0/0.bias", "0/1.weight", "0/1.bias"}
    for source, target in ((one, other), (other, one), (AveragedModel(one), AveragedModel(other))):
        restored([source], [target])
        assert bits(list(target.state_dict().values())) == bits(list(source.state_dict().values()))


def test_what_ddp_does_not_keep_equal_is_no_common_part() -> None:
    """A learning rate before the first step, and buffers by their size."""
    model = with_buffer(torch.zeros(1 << 18))
    model.register_buffer("larger", torch.zeros((1 << 18) + 1))
    packed = pack([model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))])  # type: ignore[arg-type]
    assert not packed.common and set(packed.local) == {"0/mask"}


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def with_buffer(mask: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask)
    return model


def changed(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


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


class Saved:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Settings:
    x: int


ITSELF: dict[str, Any] = {}
ITSELF["again"] = ITSELF
SHARDED = "sharded over.*torch.distributed.checkpoint"


@pytest.mark.parametrize("value, words", [
    (lambda: 0, " is of type builtins.function"), (object, " is of type builtins.type"),
    (Broken(), r": state_dict\(\) of this Broken failed: KeyError: 'x'"),
    (PerRank(PerRank(1)), ".* PerRank inside of PerRank"), (nested(5000), ".* nested more than 100 levels deep"),
    (ITSELF, ".* nested more than 100 levels deep"), ({torch.ones(1): 1}, " has a key of type Tensor"),
    (torch.zeros(1).expand(3), ".* is an expanded tensor"), (torch.zeros(2).to_sparse(), ".* layout torch.sparse_coo"),
    (torch.zeros(2, device="meta"), " is on the meta device"),
    (nn.Linear(2, 2, device="meta"), r"/weight is on the meta device.*to_empty\(device=\.\.\.\)"),
    (with_buffer(torch.zeros(2, device="meta")), "/mask is on the meta device"),
    (nn.parameter.UninitializedParameter(), ".*lazy module"),
    (nn.LazyLinear(2), "/weight belongs to a lazy module.*Run one batch through the model"),
    (nn.LazyBatchNorm1d(affine=False), "/running_mean belongs to a lazy module"),
    (with_buffer(torch.zeros(1).expand(3)), "/mask is an expanded tensor"),
    (torch.rand(2).as_subclass(DTensor), f".*{SHARDED}"), (nn.Sequential(FullyShardedDataParallel()), f".*{SHARDED}"),
    (changed(nn.Linear(2, 2), weight=nn.Parameter(torch.rand(2, 2).as_subclass(DTensor))), f"/weight.*{SHARDED}"),
    (type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters()), f".*{SHARDED}"),
    *((one, " is of type .*; expected None, numbers.* leave it out") for one in (
        {1}, deque([1]), defaultdict(list), Path("a"), torch.float32, torch.Size([1]), Point(1), Settings(1),
        bytearray(2),
        torch.Generator(), random.Random(), numpy.random.default_rng(), numpy.rec.array([(1, 2)]), numpy.ma.masked)),
    *((one, " is a numpy value of type .*; expected") for one in (
        numpy.array([object()]), numpy.array("a"), numpy.str_("a"), numpy.datetime64("NaT"), numpy.longdouble(1),
        numpy.arange(3, dtype=">i4"), numpy.zeros(1, dtype="i4,f8"))),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_saved_is_refused_by_place(value: Any, words: str) -> None:
    with pytest.raises(StateError, match=f"^x/0{words}"):
        pack({"x": [value]})


@pytest.mark.parametrize("value", [torch.Generator(), {1}, numpy.array("a"), nn.Sequential(FullyShardedDataParallel())],
                         ids=lambda value: type(value).__name__)
def test_it_is_refused_when_the_training_starts(value: Any, tmp_path: Path) -> None:
    """Not at the first save: that is too late."""
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="into this state: x/0.* expected"):
        checkpoints.load_latest({"x": [value]})


def optimized(first: int, *order: int) -> dict[str, Any]:
    """A model, and an optimizer with its parameters in this order."""
    model = nn.ParameterList([torch.rand(2), torch.rand(2), torch.rand(3)])
    groups = [{"params": [model[first]]}, {"params": [model[index] for index in order]}]
    return {"model": model, "optimizer": torch.optim.Adam(groups)}


A, B = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(3))
SGD, LINEAR = torch.optim.SGD([A]), nn.Linear(2, 2)
NAMED = [torch.optim.SGD(list(zip(names, [A, A.detach().clone()], strict=True))) for names in ("xy", "yx")]


@pytest.mark.parametrize("source, state, words", [
    (LINEAR, nn.Linear(2, 2, bias=False), "x: only the checkpoint has 'bias'"),
    (1, LINEAR, "x is a Linear, but was saved as int"), (LINEAR, None, "x is a NoneType, but was saved as Linear"),
    (Saved(1), LINEAR, "saved as Saved without entries"),
    (1, PerRank(1), "x is PerRank, but was saved as common"), (PerRank(1), 1, "x was saved as PerRank"),
    ([A.data], [A.data, A.data + 0], "x has 2 items, but was saved with 1"),
    ({"a": A.data + 0, "b": A.data + 1}, {"a": A.data, "b": A.data}, "x/b shares its memory with x/a"),
    (torch.optim.Adam([A]), torch.optim.AdamW([A]), "x is a AdamW, but was saved as Adam"),
    (lr_scheduler.StepLR(SGD, 3), lr_scheduler.ExponentialLR(SGD, 1), "x is a ExponentialLR, but was saved as StepLR"),
    (torch.optim.SGD(LINEAR.parameters()), SGD, "x has groups of [1] parameters, but was saved with [2]"),
    (torch.optim.SGD([A, B]), torch.optim.SGD([B, A]), "has a parameter of shape [3] as parameter 0 of group 0"),
    (*NAMED, "has y of shape [2] as parameter 0 of group 0, but was saved with x"),
    (optimized(0, 1, 2), optimized(0, 2, 1),
     "x/optimizer has x/model/2 of shape [3] as parameter 0 of group 1, but was saved with x/model/1 "
     "of shape [2] there. Give the optimizer the same parameters in the same order"),
    (optimized(0, 1, 2), optimized(1, 0, 2), "x/optimizer has x/model/1 of shape [2] as parameter 0 of group 0"),
    (LINEAR, nn.Linear(2, 2, device="meta"), "x/weight is on the meta device"),
    (LINEAR, nn.LazyLinear(2), "x/weight belongs to a lazy module"),
    ([], nested(5000), "is nested more than 100 levels deep"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_another_state_is_refused(source: Any, state: Any, words: str) -> None:
    assert words in refusal({"x": source}, {"x": state})


def test_an_error_of_load_state_dict_names_the_object() -> None:
    tree = {"dict": {"a": {"object": "Broken", "state": {"dict": {}}}}}
    with pytest.raises(StateError, match="a: it could not be restored.*IndexError: y"):
        Restorer({"a": Broken()}, tree, {}, {}).restore()
