"""Identify the parameters of an optimizer, and load its state without rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .entries import match_names, plain_key, show_path, unwrap, walk


def parameter_names(state: Any) -> dict[int, str]:
    """Return the names of all parameters of the modules in a state, by id() of the parameter."""
    names: dict[int, str] = {}
    for path, value in walk(state):
        module = unwrap(value)
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), show_path((*path, plain_key(name))))
    return names


def describe_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[list[list[Any]]]:
    """Return name and shape of each parameter, by group, in the optimizer's own order.

    names: from parameter_names().
    """
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        group_names = group.get("param_names") or [None] * len(parameters)
        groups.append(
            [
                [names.get(id(parameter), name), list(parameter.shape)]
                for parameter, name in zip(parameters, group_names, strict=True)
            ]
        )
    return groups


def find_mismatch(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: list[list[list[Any]]]
) -> str:
    """Compare an optimizer's parameters with those of a checkpoint; return "" if they match.

    saved: what describe_parameters() returned when it was saved.
    """
    now = describe_parameters(optimizer, names)
    sizes, saved_sizes = [len(group) for group in now], [len(group) for group in saved]
    if sizes != saved_sizes:
        return f"has groups of {sizes} parameters, but was saved with {saved_sizes}"

    same = match_names(_names_in(now), _names_in(saved))
    for number, (group, saved_group) in enumerate(zip(now, saved, strict=True)):
        pairs = zip(group, saved_group, strict=True)
        for index, ((name, shape), (saved_name, saved_shape)) in enumerate(pairs):
            is_known = name is not None and saved_name is not None
            renamed = is_known and same.get(name, name) != saved_name
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
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], where: str
) -> list[str]:
    """Return the settings that differ from the saved ones: "optimizer: lr 0.01, here 0.1".

    Where a scheduler changes the learning rate, the one that it began with is compared.
    """
    found = []
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    for number, (group, saved_group) in enumerate(groups):
        place = f"{where} group {number}" if len(optimizer.param_groups) > 1 else where
        for name, value in saved_group.items():
            is_plain = isinstance(value, (bool, int, float, str, tuple))
            is_scheduled = name == "lr" and "initial_lr" in saved_group
            if is_plain and not is_scheduled and name in group and group[name] != value:
                found.append(f"{place}: {name} {value}, here {group[name]}")
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state_dict() and keep the types of its tensors."""
    optimizer.load_state_dict(saved)

    # load_state_dict() casts to the parameters' type: it rounds float32 averages of bfloat16 ones.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)
