"""Save and restore the global random number generators of a rank.

These are Python's, torch's, the GPU's and numpy's. Put a generator that the script creates itself
into the state that it saves.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .entries import StateError, Tree
from .pack import unpack


def _devices() -> Iterator[tuple[str, Any]]:
    """Yield the name and torch module of each accelerator that this process uses."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name)
        if module.is_available() and module.is_initialized():
            yield name, module


def random_states() -> dict[str, Any]:
    """Return the generators' states as plain data; numpy's only if numpy is imported."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _to_bytes(torch.get_rng_state()),
    }
    for name, module in _devices():
        states[name] = _to_bytes(module.get_rng_state())
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def read_random_states(tree: Tree) -> dict[str, Any]:
    """Return the result of random_states() from its tree in a file.

    Raises StateError for states that cannot be set.
    """
    states = unpack(tree, {})
    if type(states) is not dict:
        raise StateError(
            f"the checkpoint holds a {type(states).__name__} as states of the generators; "
            "expected a dict"
        )
    for name, state in states.items():
        try:
            if name == "python":
                random.Random().setstate(state)
            elif name == "torch":
                torch.Generator().set_state(_from_bytes(state))
            elif name == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
                if not 0 <= state[2] <= 624:  # otherwise numpy would read beyond its array
                    raise ValueError("its position is outside the generator's state")
                numpy.random.RandomState().set_state(tuple(state))
            elif type(state) not in (bytes, list):
                raise ValueError(f"it is a {type(state).__name__}")
        except Exception as error:
            raise StateError(
                f"the checkpoint holds an invalid state of the generator {str(name)[:100]!r}: "
                f"{type(error).__name__}: {str(error)[:200]}. Was the file changed?"
            ) from error
    return states


def restore_random_states(states: Mapping[str, Any]) -> list[str]:
    """Set the generators. Return the names of generators that this process does not have."""
    devices, missing = dict(_devices()), []
    for name, state in states.items():
        if name == "python":
            random.setstate(state)
        elif name == "torch":
            torch.set_rng_state(_from_bytes(state))
        elif name == "numpy":
            import numpy

            numpy.random.set_state(tuple(state))
        elif name in devices:
            devices[name].set_rng_state(_from_bytes(state))
        else:
            missing.append(name)
    return missing


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _from_bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
