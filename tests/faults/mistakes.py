"""Two ranks that make mistakes, and others that train in unusual ways; each scenario is a function.

launch.py -n 2 tests/faults/mistakes.py    prints what the kit says about each, as JSON
"""
from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import Distributed, setup_distributed
from utils.consistency import training_watch
from utils.data import ResumableDataLoader, ResumableDistributedSampler
from utils.metrics import Metrics
from utils.training_hooks import TrainingHooks

MISTAKES: dict[str, tuple[Callable[[Distributed], object], str]] = {}
UNNOTICED: dict[str, tuple[Callable[[Distributed], object], str]] = {}
HEALTHY: dict[str, Callable[[Distributed], object]] = {}
KEPT: list[object] = []  # what a scenario trains, until its messages are written: they name modules
INPUTS = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


def mistake(text: str) -> Callable[[Callable[[Distributed], object]], None]:
    """text: what the kit says about it."""
    def note(scenario: Callable[[Distributed], object]) -> None:
        MISTAKES[scenario.__name__] = scenario, text
    return note


def unnoticed(text: str) -> Callable[[Callable[[Distributed], object]], None]:
    """text: what the pages say about it."""
    def note(scenario: Callable[[Distributed], object]) -> None:
        UNNOTICED[scenario.__name__] = scenario, text
    return note


def healthy(scenario: Callable[[Distributed], object]) -> None:
    HEALTHY[scenario.__name__] = scenario


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def sampler(job: Distributed, data: Any = DATA, **changed: Any) -> DistributedSampler[Any]:
    return DistributedSampler(data, **{"num_replicas": job.world_size, "rank": job.rank, **changed})


def train(job: Distributed, *, model: nn.Module | None = None, call: Callable[[Tensor], Tensor] | None = None,
          wrap: bool = True, loader: DataLoader[Any] | None = None, optimizer: Any = None, epochs: int = 3,
          set_epoch: Callable[[Any, int], object] = lambda one, epoch: one.set_epoch(epoch),
          before_step: Callable[[nn.Module], object] = lambda model: None,
          after_step: Callable[[nn.Module], object] = lambda model: None, steps: bool = True, **settings: Any) -> None:
    """Train a small model; each argument replaces a part of a right training."""
    model = new_model() if model is None else model
    called = call or (DDP(model) if wrap else model)
    KEPT.extend((model, called))
    loader = DataLoader(DATA, batch_size=16, sampler=sampler(job)) if loader is None else loader
    optimizer = optimizer or torch.optim.SGD(model.parameters(), **{"lr": 0.01, "momentum": 0.9, **settings})
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            set_epoch(loader.sampler, epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(called(inputs), targets).backward()
            before_step(model)
            if steps:
                optimizer.step()
            after_step(model)


def loader_with(job: Distributed, data: Any = DATA, batch_size: int = 16, **changed: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=batch_size, sampler=sampler(job, data, **changed))


# Mistakes ------------------------------------------------------------------------------------------------------------

@mistake("No DistributedDataParallel contains it")
def ddp_forgotten(job: Distributed) -> None:
    train(job, wrap=False)


@mistake("No DistributedDataParallel contains it")
def other_seed_without_ddp(job: Distributed) -> None:
    torch.manual_seed(job.rank)
    train(job, model=nn.Linear(8, 1), wrap=False, loader=DataLoader(DATA, 16))


@mistake("The model was called directly")
def model_called_instead_of_ddp(job: Distributed) -> object:
    model = new_model()
    ddp = DDP(model)
    train(job, model=model, call=lambda inputs: ddp.module(inputs))
    return ddp


@mistake("The model was called directly")
def module_of_ddp_called(job: Distributed) -> object:
    ddp = DDP(new_model())
    train(job, model=ddp, call=ddp.module.forward)
    return ddp


@mistake("the DataLoader does not divide the data")
def no_sampler_shuffled(job: Distributed) -> None:
    torch.manual_seed(0)
    train(job, loader=DataLoader(DATA, 16, shuffle=True))


@mistake("the DataLoader does not divide the data")
def no_sampler_in_order(job: Distributed) -> None:
    train(job, loader=DataLoader(DATA, 16))


@mistake("the DataLoader does not divide the data. No sampler divides an IterableDataset: split it by rank and worker")
def stream_is_not_divided(job: Distributed) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([DATA[index] for index in range(64)])
    train(job, loader=DataLoader(Stream(), 16))


@mistake("ranks 0-1 train on the same part of the data, 0 of 2")
def sampler_has_rank_0(job: Distributed) -> None:
    train(job, loader=loader_with(job, rank=0))


@mistake("ranks 0-1 train on the same part of the data, 0 of 1")
def sampler_has_one_replica(job: Distributed) -> None:
    train(job, loader=loader_with(job, rank=0, num_replicas=1))


@mistake("seed of the data is 1 on rank 1")
def sampler_seed_differs(job: Distributed) -> None:
    train(job, loader=loader_with(job, seed=job.rank))


@mistake("shuffle of the data is False on rank 1")
def sampler_shuffles_on_one_rank(job: Distributed) -> None:
    train(job, loader=loader_with(job, shuffle=job.rank == 0))


@mistake("drop_last of the data is False on rank 1")
def sampler_drops_last_on_one_rank(job: Distributed) -> None:
    train(job, loader=loader_with(job, drop_last=job.rank == 0))


@mistake("the second epoch repeats the order of the first: sampler.set_epoch() was not called")
def set_epoch_forgotten(job: Distributed) -> None:
    train(job, set_epoch=lambda one, epoch: None)


@mistake("epoch of the data is 1 on rank 1")
def set_epoch_with_the_rank(job: Distributed) -> None:
    train(job, set_epoch=lambda one, epoch: one.set_epoch(epoch + job.rank))


@mistake("length of the data is 254 on rank 1")
def data_set_is_shorter_on_one_rank(job: Distributed) -> None:
    data = TensorDataset(*(one[: 256 - 2 * job.rank] for one in DATA.tensors))
    train(job, loader=loader_with(job, data, batch_size=128, drop_last=True))


@mistake("batch_size of the data is 33 on rank 1")
def batch_size_differs(job: Distributed) -> None:
    data = TensorDataset(*(one[:64] for one in DATA.tensors))
    train(job, loader=loader_with(job, data, batch_size=32 + job.rank), epochs=1)


@mistake("lr of parameter group 0 is 0.02 on rank 1")
def learning_rate_differs(job: Distributed) -> None:
    train(job, lr=0.01 * (1 + job.rank))


@mistake("weight_decay of parameter group 0 is 0.1 on rank 1")
def weight_decay_differs(job: Distributed) -> None:
    train(job, weight_decay=0.1 * job.rank)


@mistake("momentum of parameter group 0 is 0.8 on rank 1")
def momentum_differs(job: Distributed) -> None:
    train(job, momentum=0.9 - 0.1 * job.rank)


@mistake("step their schedulers alike")
def scheduler_steps_on_rank_0_alone(job: Distributed) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(job, model=model, optimizer=optimizer, after_step=lambda _: schedule.step() if job.is_main else None)


@mistake("Its gradients are not averaged")
def gradients_are_clipped_on_rank_0_alone(job: Distributed) -> None:
    train(job, before_step=lambda model: job.is_main and nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


@mistake("Its gradients are not averaged")
def gradients_are_changed_on_one_rank(job: Distributed) -> None:
    train(job, before_step=lambda model: [one.grad.add_(job.rank) for one in model.parameters()])


@mistake("Its gradients are not averaged")
def unfrozen_after_wrapping(job: Distributed) -> None:
    model = new_model()
    model[0].weight.requires_grad_(False)
    ddp = DDP(model)
    model[0].weight.requires_grad_(True)
    train(job, model=model, call=ddp)


@mistake("Its gradients are not averaged")
def layer_added_after_wrapping(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    model.append(nn.Linear(1, 1))
    train(job, model=model, call=ddp)


@mistake("Its gradients are not averaged")
def weights_loaded_on_rank_0_after_wrapping(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    if job.is_main:
        model.load_state_dict({name: one + 0.1 for name, one in model.state_dict().items()})
    train(job, model=model, call=ddp)


@mistake("Its gradients are not averaged")
def optimizer_state_loaded_on_rank_0_alone(job: Distributed) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if job.is_main:
        state = {number: {"momentum_buffer": torch.ones_like(one)} for number, one in enumerate(model.parameters())}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    train(job, model=model, optimizer=optimizer)


@mistake("Its gradients are not averaged")
def averages_are_copied_back_on_rank_0_alone(job: Distributed) -> None:
    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.5 if job.is_main else 1)
    train(job, after_step=halve)


@mistake("Its gradients are not averaged, or one rank changes them or the parameter afterwards. Leave no_sync() before")
def no_sync_is_never_left(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    with ddp.no_sync():
        train(job, model=model, call=ddp)


@mistake("the optimizer of rank 1 has other parameters")
def layer_frozen_on_one_rank(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    chosen = [one for number, one in enumerate(model.parameters()) if job.is_main or number]
    train(job, model=model, call=ddp, optimizer=torch.optim.SGD(chosen, lr=0.01))


@mistake("1.weight differs on rank 1 from rank 0. No Dist")
def second_model_is_not_wrapped(job: Distributed) -> None:
    head = nn.Linear(1, 1)
    body = new_model()
    ddp = DDP(body)
    train(job, model=nn.Sequential(body, head), call=lambda inputs: head(ddp(inputs)))


@mistake("the optimizer SGD holds none of the parameters of Sequential, the model in DistributedDataParallel")
def optimizer_of_another_copy(job: Distributed) -> None:
    before = new_model()
    train(job, model=copy.deepcopy(before), optimizer=torch.optim.SGD(before.parameters(), lr=0.01))


@mistake("the optimizer has made 16 steps on other ranks, and none on rank 1")
def rank_0_alone_steps(job: Distributed) -> None:
    train(job, steps=job.is_main)


@mistake("the optimizer has made 16 steps on other ranks, and none on rank 0")
def rank_1_alone_steps(job: Distributed) -> None:
    train(job, steps=not job.is_main)


@mistake("has become NaN or infinite on ranks 0-1, in steps 3-4 of the optimizer. loss of step 3 is not ")
def loss_becomes_nan_on_one_rank(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Metrics(job) as metrics:
        for step in range(1, 5):
            loss = ddp(INPUTS).square().mean() * (float("nan") if step == 3 and job.rank else 1)
            loss.backward()
            metrics.log(step, loss=loss)
            metrics.flush()
            optimizer.step()


@mistake("has become NaN or infinite on ranks 0-1, in step 2 of the optimizer. Averaged gradients carry it to")
def loss_becomes_nan(job: Distributed) -> None:
    train(job, lr=1e12)


@mistake("lr of parameter group 0")
def loss_becomes_nan_on_one_rank_without_ddp(job: Distributed) -> None:
    train(job, wrap=False, loader=DataLoader(DATA, 16), lr=1e12 if job.rank else 0.01)


# Mistakes that change the result alike on all ranks, or where ranks may differ ----------------------------------------

@unnoticed("a rank that never steps its optimizer, in a model without DDP")
def rank_1_never_steps_without_ddp(job: Distributed) -> None:
    train(job, wrap=False, steps=job.is_main)


@unnoticed("gradients of micro-batches that are summed, not averaged")
def micro_batches_are_summed(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for first in range(job.rank, 256, 32):
        for row in range(first, first + 32, 8):
            nn.functional.mse_loss(ddp(INPUTS[row:row + 4]), INPUTS[row:row + 4].sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


@unnoticed("One seed for all ranks")
def all_ranks_drop_the_same_units(job: Distributed) -> None:
    torch.manual_seed(1)
    train(job, model=nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1)))


# Right trainings -----------------------------------------------------------------------------------------------------

@healthy
def plain(job: Distributed) -> None:
    train(job)


@healthy
def two_optimizers_as_of_a_gan(job: Distributed) -> None:
    first, second = (DDP(nn.Linear(8, 8)) for _ in range(2))
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (first, second)]
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
            second(first(torch.randn(4, 8))).square().mean().backward()
            optimizer.step()


@healthy
def moving_average(job: Distributed) -> None:
    model = new_model()
    average = copy.deepcopy(model)
    train(job, model=model, after_step=lambda one: torch._foreach_lerp_(
        [two.data for two in average.parameters()], [two.data for two in one.parameters()], 0.1))


@healthy
def swa(job: Distributed) -> None:
    model = new_model()
    average = AveragedModel(model)
    train(job, model=model, after_step=average.update_parameters)


@healthy
def frozen_layers(job: Distributed) -> None:
    model = new_model()
    model[0].requires_grad_(False)
    train(job, model=model)


@healthy
def low_rank_adapters(job: Distributed) -> None:
    model = new_model().requires_grad_(False)
    down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
    both = nn.ModuleList([model, down, up])
    ddp = DDP(nn.Sequential(down, up))
    train(job, model=both, call=lambda inputs: model(inputs) + ddp(inputs),
          optimizer=torch.optim.Adam([*down.parameters(), *up.parameters()]))


@healthy
def own_data_on_each_rank(job: Distributed) -> None:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(job.rank))
    train(job, loader=DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True))


@healthy
def stream_of_each_rank(job: Distributed) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([DATA[index] for index in range(job.rank, 64, job.world_size)])
    train(job, loader=DataLoader(Stream(), 16))


@healthy
def one_training_after_the_other(job: Distributed) -> None:
    """The optimizer of the first has ended on one rank, and on the other one not yet."""
    kept = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + seed))
        if job.is_main:
            kept.append(optimizer)
        train(job, model=model, optimizer=optimizer, epochs=1)


@healthy
def uneven_batches(job: Distributed) -> None:
    data = TensorDataset(*(one[job.rank : 256 - 64 * job.rank : 2] for one in DATA.tensors))
    model = new_model()
    ddp = DDP(model)
    with Join([ddp]):
        train(job, model=model, call=ddp, loader=DataLoader(data, 16), epochs=1)


@healthy
def no_batches_on_one_rank(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    with Join([ddp]):
        train(job, model=model, call=ddp, loader=DataLoader(DATA, 8), epochs=1 - job.rank)


@healthy
def gradient_accumulation(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(loader_with(job)):
        last = number % 4 == 3
        with contextlib.nullcontext() if last else ddp.no_sync():
            nn.functional.mse_loss(ddp(inputs), targets).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def evaluation_on_one_rank(job: Distributed) -> None:
    def evaluate(model: nn.Module) -> None:
        if job.is_main:
            for inputs, _ in DataLoader(DATA, 64):
                model(inputs)
    train(job, after_step=evaluate, epochs=2)


@healthy
def evaluation_on_all_data_on_all_ranks(job: Distributed) -> None:
    everything = DataLoader(DATA, 64)
    train(job, after_step=lambda model: [model(inputs) for inputs, _ in everything], epochs=2)


@healthy
def sharded_optimizer(job: Distributed) -> None:
    model = new_model()
    ddp = DDP(model)
    train(job, model=model, call=ddp, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3))


@healthy
def schedule_of_every_step(job: Distributed) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    train(job, model=model, optimizer=optimizer, after_step=lambda _: schedule.step())


@healthy
def constant_data(job: Distributed) -> None:
    train(job, loader=loader_with(job, TensorDataset(torch.ones(64, 8), torch.ones(64, 1))))


@healthy
def without_shuffling(job: Distributed) -> None:
    train(job, loader=loader_with(job, shuffle=False), set_epoch=lambda one, epoch: None)


@healthy
def sampler_of_the_kit(job: Distributed) -> None:
    divided = ResumableDistributedSampler(DATA, job.world_size, job.rank)
    train(job, loader=ResumableDataLoader(DATA, batch_size=16, sampler=divided))


@healthy
def fully_sharded(job: Distributed) -> None:
    from torch.distributed.fsdp import fully_shard
    model = new_model()
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (job.world_size,)))
    train(job, model=model, wrap=False)


@healthy
def fully_sharded_by_fsdp_1(job: Distributed) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(new_model(), use_orig_params=True, device_id=torch.device("cpu"))
    train(job, model=model, wrap=False)


@healthy
def tensor_parallelism_by_hand(job: Distributed) -> None:
    group = dist.new_group([0, 1])
    torch.manual_seed(job.rank)
    train(job, model=nn.Linear(8, 1), wrap=False, loader=DataLoader(DATA, 16), lr=0.01 * (1 + job.rank))
    dist.barrier(group)  # the other rank may still be connecting
    dist.destroy_process_group(group)


@healthy
def autocast(job: Distributed) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train(job)


@healthy
def batch_norm(job: Distributed) -> None:
    train(job, model=nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))


@healthy
def averaging_every_few_steps(job: Distributed) -> None:
    steps = itertools.count(1)

    def average(model: nn.Module) -> None:
        if next(steps) % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= job.world_size
    train(job, wrap=False, after_step=average)


@healthy
def local_sgd_of_torch(job: Distributed) -> None:
    ddp = DDP(new_model())
    inner = torch.optim.SGD(ddp.parameters(), lr=0.01)
    averager = PeriodicModelAverager(period=3, warmup_steps=0)
    with ddp.no_sync():
        train(job, model=ddp, call=ddp, optimizer=PostLocalSGDOptimizer(inner, averager))


@healthy
def reduction_is_not_finished(job: Distributed) -> None:
    """DistributedDataParallel itself raises an error in the next step."""
    model = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    model.forward = model[0].forward  # type: ignore[method-assign]
    ddp = DDP(model)
    ddp(INPUTS[job.rank::2]).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


@healthy
def second_optimizer_holds_the_model(job: Distributed) -> None:
    """The first one has made several steps before."""
    head, ddp = nn.Parameter(torch.zeros(1)), DDP(new_model())
    optimizers = [torch.optim.SGD([head], lr=0.01), torch.optim.SGD(ddp.parameters(), lr=0.01)]
    for _ in range(6):
        (ddp(INPUTS[:4]).mean() + head).sum().backward()
        dist.all_reduce(head.grad)
        optimizers[0].step()
    optimizers[1].step()


@healthy
def l_bfgs(job: Distributed) -> None:
    model = DDP(new_model())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(INPUTS[job.rank::2]).square().mean()
        loss.backward()
        return loss
    for _ in range(5):
        optimizer.step(closure)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def main() -> None:
    said: dict[str, list[str]] = {}
    scenarios = {name: scenario for name, (scenario, _) in (MISTAKES | UNNOTICED).items()} | HEALTHY
    with setup_distributed("gloo", check_training=False) as job:
        for number, name in enumerate(scenarios):
            messages = Messages()
            training_watch._log.addHandler(messages)
            hooks = TrainingHooks(job.rank, job.world_size, dist.PrefixStore(f"scenario {number}", job.store))
            KEPT.append(scenarios[name](job))
            hooks.close()
            KEPT.clear()
            training_watch._log.removeHandler(messages)
            gathered: list[Any] = [None] * job.world_size
            dist.all_gather_object(gathered, messages.found)
            said[name] = sum(gathered, [])
        if job.is_main:
            print(json.dumps(said))


if __name__ == "__main__":
    main()
