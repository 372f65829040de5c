"""utils/checkpoint: modules, optimizers and schedules are restored to the last bit, or refused."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.checkpoint_states import bits, mismatches, restored, saved
from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.values import StateError

Make = Callable[[Any], Any]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.rand(8, 4)).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)  # type: ignore[arg-type]


# Optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: list[Make] = [
    lambda p: torch.optim.Adam(p, amsgrad=True), lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.LBFGS(p, history_size=3), torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.Adafactor,
]


def trained(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = make(model.parameters())
    steps(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: type(
    make(nn.Linear(1, 1).parameters())).__name__)
def test_optimizers_are_restored_to_the_last_bit(make: Make) -> None:
    pairs = [trained(make), trained(make)]
    before = bits([one.state_dict() for one in pairs[0]])
    tree, tensors, own = saved(pairs[0])
    assert bits([one.state_dict() for one in pairs[0]]) == before, "saving changes nothing"

    restorer = Restorer(pairs[1], tree, tensors, own)
    assert restorer.mismatches == []
    restorer.restore()
    for tensor in tensors.values():
        tensor.zero_()  # what was restored must not share the memory that was read
    for model, optimizer in pairs:
        torch.manual_seed(5)
        steps(model, optimizer)
    assert bits([one.state_dict() for one in pairs[0]]) == bits(
        [one.state_dict() for one in pairs[1]])


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


def test_another_order_of_parameters_is_refused() -> None:
    def make(first: int, *order: int) -> dict[str, Any]:
        model = nn.ParameterList([torch.rand(2), torch.rand(2), torch.rand(3)])
        groups = [{"params": [model[first]]}, {"params": [model[index] for index in order]}]
        return {"model": model, "optimizer": torch.optim.Adam(groups)}

    assert mismatches(make(0, 1, 2), make(0, 1, 2)) == ""
    assert mismatches(make(0, 1, 2), make(0, 2, 1)) == (
        "optimizer has model/2 of shape [3] as parameter 0 of group 1, but was saved with model/1 "
        "of shape [2] there. Give the optimizer the same parameters in the same order")
    assert "optimizer has model/1 of shape [2] as parameter 0 of group 0" in mismatches(
        make(0, 1, 2), make(1, 0, 2))


def test_parameters_without_a_model_are_compared_by_shape_or_name() -> None:
    a, b = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(3))
    assert "has a parameter of shape [3] as parameter 0 of group 0" in mismatches(
        [torch.optim.SGD([a, b])], [torch.optim.SGD([b, a])])
    named = [[torch.optim.SGD(list(zip(names, [a, a.detach().clone()], strict=True)))]
             for names in ("xy", "yx")]
    assert "has y of shape [2] as parameter 0 of group 0, but was saved with x" in mismatches(*named)


def test_another_optimizer_or_schedule_is_refused() -> None:
    model = nn.Linear(2, 2)
    adam, adamw = torch.optim.Adam(model.parameters()), torch.optim.AdamW(model.parameters())
    assert mismatches({"o": adam}, {"o": adamw}) == "o is a AdamW, but was saved as Adam"
    schedules = lr_scheduler.StepLR(adam, 3), lr_scheduler.ExponentialLR(adam, 0.9)
    assert mismatches(schedules[:1], schedules[1:]) == "0 is a ExponentialLR, but was saved as StepLR"


# Schedules, scalers ---------------------------------------------------------------------------

class Warmup:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int) -> float:
        self.calls += 1
        return 1 / (1 + number) + self.calls


SCHEDULES: dict[str, Make] = {
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
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 3)]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_continue_where_they_were(name: str) -> None:
    def advance(training: tuple[Any, ...], count: int) -> list[float]:
        rates = []
        for number in range(count):
            training[1].step()
            training[2].step(*[1.0 + number] if name == "plateau" else [])
            rates.append(training[1].param_groups[0]["lr"])
        return rates

    trainings = []
    for count in (4, 1):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainings.append((model, optimizer, SCHEDULES[name](optimizer)))
        advance(trainings[-1], count)
    restored(*trainings)
    if name not in ("lambda", "multiplicative"):  # whose state names the function
        assert bits(trainings[0][2].state_dict()) == bits(trainings[1][2].state_dict())
    assert advance(trainings[0], 6) == advance(trainings[1], 6)


def test_a_gradient_scaler_is_restored() -> None:
    one, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 2.0))
    one.scale(torch.ones(1))
    restored([one], [other])
    assert other.state_dict() == one.state_dict() and other.get_scale() == 512.0


# Modules --------------------------------------------------------------------------------------

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
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def deprecated_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "deprecated weight norm": deprecated_weight_norm,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "average": lambda: AveragedModel(nn.Linear(2, 2), multi_avg_fn=get_ema_multi_avg_fn(),
                                     use_buffers=True),
    "nested": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(2)]), "b": nn.LSTM(2, 2)}),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2), "empty": nn.Identity,
    "instance norm": lambda: nn.InstanceNorm1d(2, track_running_stats=True),
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "bfloat16": lambda: nn.Linear(2, 2).bfloat16(),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_restored_to_the_last_bit(name: str) -> None:
    one, other = MODULES[name](), MODULES[name]()
    parameters = list(other.parameters())
    with torch.no_grad():
        for tensor in one.state_dict().values():
            tensor.copy_(torch.randint(1, 9, tensor.shape))
    restored({"m": one}, {"m": other})
    assert bits(other.state_dict()) == bits(one.state_dict())
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True)), "in place"


def test_tied_weights_stay_tied_and_are_written_once() -> None:
    one, other = Tied(), Tied()
    assert len(pack([one]).main) == 1
    restored([one], [other])
    assert other.output.weight is other.embedding.weight
    assert torch.equal(other.output.weight, one.output.weight)


def test_lists_and_extra_states_share_no_memory_with_the_file() -> None:
    one, other = (nn.ModuleList([Metric(), Extra(2, 2)]) for _ in range(2))
    one[0].preds, one[1].extra = [torch.ones(3), torch.zeros(1)], {"seen": torch.ones(2)}
    other[1].extra = {"seen": torch.zeros(2)}
    tree, tensors, own = saved([one])
    Restorer([other], tree, tensors, own).restore()
    for tensor in tensors.values():
        tensor.zero_()
    assert bits([other[0].preds, other[1].extra]) == bits([one[0].preds, one[1].extra])


def test_compiled_parts_have_their_plain_names() -> None:
    assert set(pack({"model": torch.compile(nn.Linear(2, 2))}).main) == {"model/weight", "model/bias"}
    one = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert set(pack([one]).main) == {"0/0.weight", "0/0.bias", "0/1.weight", "0/1.bias"}
    for source, target in ((one, other), (other, one), (AveragedModel(one), AveragedModel(other))):
        restored([source], [target])
        assert bits(list(target.state_dict().values())) == bits(list(source.state_dict().values()))


# What is refused ------------------------------------------------------------------------------

def with_buffer(mask: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask)
    return model


@pytest.mark.parametrize("model, words, whole", [
    (nn.Linear(2, 2, device="meta"), r"m/weight is on the meta device.*to_empty\(device=\.\.\.\)",
     nn.Linear(2, 2)),
    (with_buffer(torch.zeros(2, device="meta")), "m/mask is on the meta device",
     with_buffer(torch.zeros(2))),
    (nn.LazyLinear(2), "m/weight is a parameter of a lazy module.*Run one batch through the model",
     nn.Linear(2, 2)),
    (torch.zeros(2, device="meta"), "m is on the meta device", torch.zeros(2)),
], ids=["meta", "meta buffer", "lazy", "tensor"])
def test_models_without_values_are_refused(model: Any, words: str, whole: Any) -> None:
    with pytest.raises(StateError, match=words):
        pack({"m": model})
    with pytest.raises(StateError, match=words):
        Restorer({"m": model}, *saved({"m": whole}))


def test_an_expanded_buffer_is_refused_when_it_is_saved() -> None:
    with pytest.raises(StateError, match="m/mask is an expanded tensor"):
        pack({"m": with_buffer(torch.zeros(1).expand(3))})


class DTensor(torch.Tensor):
    __module__ = "torch.distributed.tensor"


class FullyShardedDataParallel(nn.Module):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this would gather on all ranks")


def test_sharded_states_are_refused_with_what_to_use() -> None:
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(torch.rand(2, 2).as_subclass(DTensor))
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters())
    for part in (sharded, nn.Sequential(FullyShardedDataParallel()), zero):
        with pytest.raises(StateError, match="^m.* sharded over.*torch.distributed.checkpoint"):
            pack({"m": part})


def test_errors_of_an_objects_own_methods_name_the_object() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise KeyError("x")

        def load_state_dict(self, state: Any) -> None:
            raise IndexError("y")

    with pytest.raises(StateError, match=r"a/0: state_dict\(\) of this Broken failed: KeyError: 'x'"):
        pack({"a": [Broken()]})
    tree = {"dict": {"a": {"object": "Broken", "state": {"dict": {}}}}}
    with pytest.raises(StateError, match="a: it could not be restored.*IndexError: y"):
        Restorer({"a": Broken()}, tree, {}, {}).restore()
