"""What trainings hold, in checkpoints: each comes back to the last bit, or is refused with what to do."""
from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from utils.checkpoint_fitting import Fitting
from utils.checkpoint_state import PerRank, pack
from utils.checkpoint_values import Unfit


def saved(state: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """What a file holds: the tensors as plain contiguous copies."""
    packed = pack(state)
    tree, own = json.loads(json.dumps([packed.tree, packed.own]))
    tensors = {**packed.common, **packed.main, **packed.local, **packed.mine}
    return tree, {name: one.resolve_conj().contiguous().clone() for name, one in tensors.items()}, own


def bits(value: Any) -> Any:
    """A state as text, with every bit of every tensor."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return ["tensor", str(value.dtype), list(value.shape), raw]
    if isinstance(value, dict):
        return [[repr(key), bits(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    return repr(value)


def problems(state: Any, other: Any) -> str:
    return "; ".join(Fitting(other, *saved(state)).problems)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.rand(8, 4)).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)  # type: ignore[arg-type]


# Optimizers -----------------------------------------------------------------------------------------------------------

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.Adam(p, amsgrad=True), lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.LBFGS(p, history_size=3),
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Adafactor,
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: type(make(nn.Linear(1, 1).parameters())).__name__)
def test_optimizers_come_back_to_the_last_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    pairs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = make(model.parameters())
        step(model, optimizer)
        pairs.append((model, optimizer))
    fitting = Fitting(pairs[1], *saved(pairs[0]))
    assert fitting.problems == []
    fitting.restore()
    for model, optimizer in pairs:
        torch.manual_seed(5)
        step(model, optimizer)
    assert bits(pairs[0][0].state_dict()) == bits(pairs[1][0].state_dict())
    assert bits(pairs[0][1].state_dict()) == bits(pairs[1][1].state_dict())


def test_float32_averages_of_bfloat16_parameters_are_not_rounded() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for parameter in model.parameters():
            optimizer.state[parameter]["average"] = torch.rand(parameter.shape)
        return model, optimizer
    one, other = make(), make()
    Fitting(other, *saved(one)).restore()
    assert bits(other[1].state_dict()) == bits(one[1].state_dict())


def test_an_optimizer_over_the_parameters_in_another_order_is_refused() -> None:
    def make(*order: int) -> dict[str, Any]:
        model = nn.ParameterList([torch.rand(2), torch.rand(2), torch.rand(3)])
        optimizer = torch.optim.Adam([{"params": [model[0]]}, {"params": [model[one] for one in order]}])
        return {"model": model, "optimizer": optimizer}
    assert problems(make(1, 2), make(1, 2)) == ""
    assert problems(make(1, 2), make(2, 1)) == (
        "optimizer has model/2 of shape [3] as parameter 0 of group 1, but was saved with model/1 of shape [2] there. "
        "Give the optimizer the same parameters in the same order")
    one, two = make(1, 2), make(1, 2)
    two["optimizer"] = torch.optim.Adam([{"params": [two["model"][1]]}, {"params": [two["model"][0], two["model"][2]]}])
    assert "optimizer has model/1 of shape [2] as parameter 0 of group 0" in problems(one, two)


def test_parameters_are_compared_by_shape_or_own_names_where_the_state_holds_no_model() -> None:
    a, b = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(3))
    assert "has a parameter of shape [3] as parameter 0 of group 0" in problems(
        [torch.optim.SGD([a, b])], [torch.optim.SGD([b, a])])
    named = [torch.optim.SGD(list(zip(names, [a, a.detach().clone()], strict=True))) for names in ("xy", "yx")]
    assert "has y of shape [2] as parameter 0 of group 0, but was saved with x" in problems(named[:1], named[1:])


def test_the_state_of_another_optimizer_or_schedule_is_refused() -> None:
    model = nn.Linear(2, 2)
    adam, adamw = torch.optim.Adam(model.parameters()), torch.optim.AdamW(model.parameters())
    assert problems({"o": adam}, {"o": adamw}) == "o is a AdamW, but was saved as Adam"
    schedules = lr_scheduler.StepLR(adam, 3), lr_scheduler.ExponentialLR(adam, 0.9)
    assert problems(schedules[:1], schedules[1:]) == "0 is a ExponentialLR, but was saved as StepLR"


# Schedules, scalers ---------------------------------------------------------------------------------------------------

class Warmup:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int) -> float:
        self.calls += 1
        return 1 / (1 + number) + self.calls


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda number: 0.9**number),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda number: 0.9),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, mode="exp_range", cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 3)]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_where_they_were(name: str) -> None:
    def advance(training: tuple[Any, ...], count: int) -> list[float]:
        rates = []
        for number in range(count):
            training[1].step()
            training[2].step(*[1.0 + number] if name == "plateau" else [])
            rates.append(training[1].param_groups[0]["lr"])
        return rates
    pairs = []
    for steps in (4, 1):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pairs.append((model, optimizer, SCHEDULES[name](optimizer)))
        advance(pairs[-1], steps)
    fitting = Fitting(pairs[1], *saved(pairs[0]))
    assert fitting.problems == []
    fitting.restore()
    assert bits(pairs[0][2].state_dict()) == bits(pairs[1][2].state_dict()) or name in ("lambda", "multiplicative")
    assert advance(pairs[0], 6) == advance(pairs[1], 6)


def test_a_gradient_scaler_comes_back() -> None:
    one, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 2.0))
    one.scale(torch.ones(1))
    Fitting([other], *saved([one])).restore()
    assert other.state_dict() == one.state_dict() and other.get_scale() == 512.0


# Modules --------------------------------------------------------------------------------------------------------------

class Metric(nn.Module):
    """Keeps lists of tensors in its state, as the metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.preds: list[torch.Tensor] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "preds"] = [one.detach() for one in self.preds]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.preds = state.pop(prefix + "preds")
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def weight_norm_of_old() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), "old weight norm": weight_norm_of_old,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "average": lambda: AveragedModel(nn.Linear(2, 2), multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True),
    "nested": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(2)]), "b": nn.LSTM(2, 2)}),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2), "empty": nn.Identity,
    "instance norm": lambda: nn.InstanceNorm1d(2, track_running_stats=True), "complex": lambda: nn.Linear(
        2, 2, dtype=torch.complex64), "bfloat16": lambda: nn.Linear(2, 2).bfloat16(),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_come_back_to_the_last_bit(name: str) -> None:
    one, other = MODULES[name](), MODULES[name]()
    with torch.no_grad():
        for tensor in one.state_dict().values():
            tensor.copy_(torch.randint(1, 9, tensor.shape))
    fitting = Fitting({"m": other}, *saved({"m": one}))
    assert fitting.problems == []
    fitting.restore()
    assert bits(other.state_dict()) == bits(one.state_dict())


def test_tied_weights_stay_tied_and_are_written_once() -> None:
    one, other = Tied(), Tied()
    assert len(saved([one])[1]) == 1
    Fitting([other], *saved([one])).restore()
    assert other.head.weight is other.embedding.weight and torch.equal(other.head.weight, one.head.weight)


def test_lists_of_tensors_and_extra_states_hold_none_of_the_memory_that_was_read() -> None:
    one, other = (nn.ModuleList([Metric(), Extra(2, 2)]) for _ in range(2))
    one[0].preds, one[1].extra = [torch.ones(3), torch.zeros(1)], {"seen": torch.ones(2)}
    other[1].extra = {"seen": torch.zeros(2)}
    tree, tensors, own = saved([one])
    Fitting([other], tree, tensors, own).restore()
    for tensor in tensors.values():
        tensor.zero_()
    assert bits(other[0].preds) == bits(one[0].preds) and bits(other[1].extra) == bits(one[1].extra)


def test_compiled_parts_have_their_plain_names() -> None:
    one = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert set(saved([one])[1]) == {"0/0.weight", "0/0.bias", "0/1.weight", "0/1.bias"}
    for source, target in ((one, other), (other, one), (AveragedModel(one), AveragedModel(other))):
        fitting = Fitting([target], *saved([source]))
        assert fitting.problems == []
        fitting.restore()
        assert bits(list(target.state_dict().values())) == bits(list(source.state_dict().values()))


def test_models_without_values_are_refused() -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(2, 2))
    lazy = nn.Sequential(nn.LazyLinear(2))
    buffer = nn.Linear(2, 2)
    buffer.register_buffer("mask", torch.zeros(2, device="meta"))
    for model, words in ((meta, r"m/0.weight is on the meta device.*to_empty\(device=\.\.\.\)"),
                         (buffer, "m/mask is on the meta device"),
                         (lazy, "m/0.weight is a parameter of a lazy module.*Run one batch through the model")):
        with pytest.raises(Unfit, match=words):
            pack({"m": model})
        whole = nn.Sequential(nn.Linear(2, 2)) if model is not buffer else nn.Linear(2, 2)
        if model is buffer:
            whole.register_buffer("mask", torch.zeros(2))
        with pytest.raises(Unfit, match=words):
            Fitting({"m": model}, *saved({"m": whole}))
    with pytest.raises(Unfit, match="t is on the meta device"):
        Fitting({"t": torch.zeros(2, device="meta")}, *saved({"t": torch.zeros(2)}))


def test_an_expanded_buffer_is_refused_when_it_is_saved() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1).expand(3))
    with pytest.raises(Unfit, match="m/mask is an expanded tensor"):
        pack({"m": model})


class DTensor(torch.Tensor):
    __module__ = "torch.distributed.tensor"


class FullyShardedDataParallel(nn.Module):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this would gather on all ranks")


def test_sharded_states_are_refused_with_what_to_use() -> None:
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(torch.rand(2, 2).as_subclass(DTensor))
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters())
    for part in (sharded, nn.Sequential(FullyShardedDataParallel()), torch.rand(2).as_subclass(DTensor), zero):
        with pytest.raises(Unfit, match="^m.* sharded over the ranks.*torch.distributed.checkpoint"):
            pack({"m": part})


def test_errors_of_an_objects_own_methods_name_the_object() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise KeyError("x")

        def load_state_dict(self, state: Any) -> None:
            raise IndexError("y")
    with pytest.raises(Unfit, match=r"a/0: state_dict\(\) of this Broken failed: KeyError: 'x'"):
        pack({"a": [Broken()]})
    tree = {"dict": {"a": {"object": "Broken", "state": {"dict": {}}}}}
    with pytest.raises(Unfit, match="a: it could not be restored.*IndexError: y"):
        Fitting({"a": Broken()}, tree, {}, {}).restore()


def test_a_state_is_not_changed_by_being_saved() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    before = copy.deepcopy(bits([model.state_dict(), optimizer.state_dict()]))
    saved({"m": model, "o": optimizer})
    assert bits([model.state_dict(), optimizer.state_dict()]) == before




def test_plain_data_and_numpy_arrays_are_restored_in_the_state_that_was_given() -> None:
    import numpy

    def fresh(fill: float) -> dict[str, Any]:
        return {"model": nn.Linear(2, 1), "best": fill, "history": [fill], "array": numpy.full(3, fill),
                "grows": numpy.full(int(fill) + 1, fill), "inner": {"count": int(fill), "list": [numpy.full(2, fill)]},
                "own": PerRank({"steps": int(fill)})}

    tree, tensors, own = saved(fresh(7))
    state = fresh(0)
    array, history, inner, nested = state["array"], state["history"], state["inner"], state["inner"]["list"][0]
    restored = Fitting(state, tree, tensors, own).restore()
    assert restored is state and state["best"] == 7 and state["own"].value == {"steps": 7}
    assert array is state["array"] and array.tolist() == [7, 7, 7] and state["grows"].shape == (8,)
    assert history is state["history"] and history == [7]
    assert inner is state["inner"] and inner["count"] == 7 and nested.tolist() == [7, 7]
