"""The random number generators of a rank, saved with a checkpoint and set when training goes on.

Not here: generators that the script made itself, which belong into its state (checkpoint_state.py).
"""
from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .checkpoint_state import unpack
from .checkpoint_values import Tree, Unfit, check_generator_state, from_bytes, to_bytes


def _devices() -> Iterator[tuple[str, Any]]:
    for name in ("cuda", "xpu"):
        module = getattr(torch, name)
        if module.is_available() and module.is_initialized():
            yield name, module


def random_states() -> dict[str, Any]:
    """The states of this rank's generators as plain data: Python, torch, its GPU, numpy where it is imported."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": to_bytes(torch.get_rng_state())}
    for name, module in _devices():
        states[name] = to_bytes(module.get_rng_state())
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def read_random_states(tree: Tree) -> dict[str, Any]:
    """What random_states() returned, from its tree in a file. Raises Unfit for states that cannot be set."""
    states = unpack(tree, {})
    if type(states) is not dict:
        raise Unfit(f"the checkpoint holds a {type(states).__name__} as states of the generators; expected a dict")
    for name, state in states.items():
        try:
            if name == "python":
                check_generator_state(random.Random(), state)
            elif name == "torch":
                check_generator_state(torch.default_generator, state)
            elif name == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
                kind, keys, position, has_gauss, gauss = state
                check_generator_state(numpy.random.RandomState(), {
                    "bit_generator": kind, "state": {"key": keys, "pos": position}, "has_gauss": has_gauss,
                    "gauss": gauss})
            elif type(state) not in (bytes, list):
                raise ValueError(f"it is a {type(state).__name__}")
        except Exception as error:
            raise Unfit(f"the checkpoint holds an invalid state of the generator {str(name)[:100]!r}: "
                        f"{type(error).__name__}: {str(error)[:200]}. Was the file changed?") from error
    return states


def restore_random_states(states: Mapping[str, Any]) -> list[str]:
    """Set the generators; returns the names of those that this process does not have."""
    devices, missing = dict(_devices()), []
    for name, state in states.items():
        if name == "python":
            random.setstate(state)
        elif name == "torch":
            torch.set_rng_state(from_bytes(state))
        elif name == "numpy":
            import numpy
            numpy.random.set_state(tuple(state))
        elif name in devices:
            devices[name].set_rng_state(from_bytes(state))
        else:
            missing.append(name)
    return missing


def derive_random_states(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> list[str]:
    """Set the generators when the number of ranks changed; returns the names of those that got new states.

    Generators that were alike on all ranks go on as they are, alike on all ranks. The others, whose streams belonged to
    ranks that are no more, get a seed from the saved states, the number of ranks and the rank: each rank another, and
    the same at every resume.
    """
    alike = {name: state for name, state in saved[0].items() if all(one.get(name) == state for one in saved)}
    restore_random_states(alike)
    devices, derived = dict(_devices()), [name for name in saved[0] if name not in alike]
    for name in derived:
        key = repr((name, world_size, rank, [one.get(name) for one in saved])).encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
        if name == "python":
            random.seed(seed)
        elif name == "torch":
            torch.default_generator.manual_seed(seed)
        elif name == "numpy":
            import numpy
            numpy.random.seed(seed)
        elif name in devices:
            devices[name].manual_seed(seed)
    return derived
