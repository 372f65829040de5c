"""Identify the parameters of an optimizer, and load its state without rounding."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .entries import is_sharded, match_names, plain_key, show_path, unwrap, walk

_NOT_SETTINGS = ("params", "param_names")
# Attributes of torch's schedulers whose name differs from the constructor's argument.
_SETTINGS = frozenset(
    (
        "max_lrs",
        "min_lrs",
        "base_momentums",
        "max_momentums",
        "total_size",
        "step_ratio",
        "_milestones",
    )
)


class ParameterNames:
    """The names of parameters in a state, from its modules and from its tensors.

    A tensor of the state also names the parameter whose memory it shares, as in a state_dict().
    """

    def __init__(self, state: Any) -> None:
        self._by_id: dict[int, str] = {}
        self._by_memory: dict[tuple[object, ...], str] = {}
        entries = list(walk(state))
        for path, value in entries:
            module = unwrap(value)
            if isinstance(module, torch.nn.Module):
                for name, parameter in module.named_parameters():
                    self._by_id.setdefault(id(parameter), show_path((*path, plain_key(name))))
        for path, value in entries:  # after the modules, whose names take precedence
            if isinstance(value, Tensor):
                self._by_id.setdefault(id(value), show_path(path))
                if memory := _memory_of(value):
                    self._by_memory.setdefault(memory, show_path(path))

    def get(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter, or None."""
        name = self._by_id.get(id(parameter))
        return name or self._by_memory.get(_memory_of(parameter))


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key for the memory of a tensor; () if it has no memory of its own."""
    if is_sharded(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return ()
    if torch.nn.parameter.is_lazy(tensor) or not tensor.numel():
        return ()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def describe_parameters(
    optimizer: torch.optim.Optimizer, names: ParameterNames
) -> list[list[list[Any]]]:
    """Return the name and shape of each parameter, by group, in the optimizer's order."""
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        group_names = group.get("param_names") or [None] * len(parameters)
        groups.append(
            [
                [names.get(parameter) or name, list(parameter.shape)]
                for parameter, name in zip(parameters, group_names, strict=True)
            ]
        )
    return groups


def unchecked_optimizers(state: Any) -> list[str]:
    """Return the optimizers in a state that have unnamed parameters of the same shape.

    A checkpoint cannot tell such parameters apart if their order changes.
    """
    names, found = ParameterNames(state), []
    for path, optimizer in walk(state):
        if isinstance(optimizer, torch.optim.Optimizer):
            groups = describe_parameters(optimizer, names)
            shapes = [tuple(shape) for group in groups for name, shape in group if name is None]
            if len(set(shapes)) < len(shapes):
                found.append(f"{show_path(path)} ({type(optimizer).__name__})")
    return found


def find_mismatch(
    optimizer: torch.optim.Optimizer, names: ParameterNames, saved: list[list[list[Any]]]
) -> str:
    """Return how an optimizer's parameters differ from a checkpoint's; "" if they match.

    saved: the result of describe_parameters() at the save.
    """
    now = describe_parameters(optimizer, names)
    sizes, saved_sizes = [len(group) for group in now], [len(group) for group in saved]
    if sizes != saved_sizes:
        return f"has groups of {sizes} parameters, but was saved with {saved_sizes}"

    same = match_names(_names_in(now), _names_in(saved))
    in_both = {*same.values()}
    for number, (group, saved_group) in enumerate(zip(now, saved, strict=True)):
        pairs = zip(group, saved_group, strict=True)
        for index, ((name, shape), (saved_name, saved_shape)) in enumerate(pairs):
            here = same.get(name or "", name)  # its saved name
            renamed = here != saved_name and (
                None not in (here, saved_name) or here in in_both or saved_name in in_both
            )
            if renamed or shape != saved_shape:
                return (
                    f"has {name or 'a parameter'} of shape {shape} as parameter {index} of group "
                    f"{number}, but was saved with {saved_name or 'one'} of shape {saved_shape} "
                    "there. Give the optimizer the same parameters in the same order"
                )
    return ""


def _names_in(groups: list[list[list[Any]]]) -> set[str]:
    return {name for group in groups for name, _ in group if name is not None}


def changed_settings(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    where: str,
    schedulers: Iterable[LRScheduler],
) -> list[str]:
    """Return the settings that differ from the saved ones: "optimizer: lr 0.01, here 0.1".

    If a scheduler changes the learning rate, its initial learning rate is compared.

    schedulers: all schedulers in the state. A momentum that one of them changes is not compared.
    """
    is_cycled = any(
        scheduler.optimizer is optimizer and _cycles_momentum(scheduler) for scheduler in schedulers
    )
    cycled = {"momentum", "betas"} if is_cycled else set[str]()
    found = []
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    for number, (group, saved_group) in enumerate(groups):
        place = f"{where} group {number}" if len(optimizer.param_groups) > 1 else where
        scheduled = {*cycled, "lr"} if "initial_lr" in saved_group else cycled
        names = [name for name in saved_group if name not in (*_NOT_SETTINGS, *scheduled)]
        found += _differences(place, group, saved_group, names)
    return found


def changed_schedule(scheduler: LRScheduler, saved: Mapping[str, Any], where: str) -> list[str]:
    """Return the settings of a scheduler that differ from the saved ones: "T_max 10, here 100".

    Settings are the scheduler's arguments; its progress is not a setting.
    """
    parameters = {name for cls in type(scheduler).__mro__ for name in _parameters_of(cls)}
    names = [name for name in saved if name in parameters | _SETTINGS and name != "last_epoch"]
    found = _differences(where, vars(scheduler), saved, names)
    parts = getattr(scheduler, "_schedulers", ())  # parts of a SequentialLR or ChainedScheduler
    saved_parts = zip(parts, saved.get("_schedulers", ()), strict=False)
    for number, (part, saved_part) in enumerate(saved_parts):
        found += changed_schedule(part, saved_part, f"{where} scheduler {number}")
    return found


def _differences(
    place: str, now: Mapping[str, Any], saved: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    return [
        f"{place}: {name} {_shown(saved[name])}, here {_shown(now[name])}"
        for name in names
        if name in now
        and _is_plain(saved[name])
        and _is_plain(now[name])
        and now[name] != saved[name]
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | Counter):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _shown(value: Any) -> Any:
    return sorted(value.elements()) if isinstance(value, Counter) else value


def _cycles_momentum(scheduler: LRScheduler) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "cycle_momentum", False) or any(map(_cycles_momentum, parts))


def _parameters_of(cls: type) -> Collection[str]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return ()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state_dict() and keep the types of its tensors."""
    optimizer.load_state_dict(saved)

    # load_state_dict() casts to the parameters' type: it would round float32 averages to bfloat16.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)
