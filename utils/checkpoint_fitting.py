"""Compares a checkpoint with the state that it is to restore, and then restores it."""
from __future__ import annotations

import collections
import enum
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint_state import (
    CLASSES,
    MAPPINGS,
    Path,
    PerRank,
    Unpacker,
    check_module,
    check_optimizer,
    check_tensor,
    describe_parameters,
    factory_name,
    field_names,
    holds_objects,
    is_dataclass,
    is_namedtuple,
    kind_of,
    new_dataclass,
    overlaps_itself,
    parameter_names,
    plain_key,
    show,
    state_of,
    tag_of,
    tags,
    unwrap,
    walk,
)
from .checkpoint_values import Tree, Unfit, check_generator_state, generator_kind, set_generator_state


class Fitting:
    """Compares a checkpoint with the state that it shall restore, without changing anything; then restore() does.

    own: the trees of this rank's PerRank parts; None when they were saved under another number of ranks.
    Raises Unfit for a checkpoint that no state matches; `problems` lists what does not match this one.
    """

    def __init__(self, state: Any, tree: Tree, tensors: Mapping[str, Tensor], own: dict[str, Tree] | None) -> None:
        self.problems: list[str] = []
        self._own = own
        self._actions: list[tuple[Path, Callable[[], object]]] = []
        self._targets: dict[tuple[object, ...], tuple[Path, Tensor]] = {}
        self._views = Unpacker(tensors)  # for what is copied into tensors of the state
        self._copies = Unpacker(tensors, copies=True)  # an object that keeps one tensor shall not keep the whole file
        self._names = parameter_names(state)
        self._register_classes(state)
        self._state = state
        self._result = self._fit(state, tree, ())

    def restore(self) -> Any:
        """Restore the state in place and return it: see put()."""
        for path, action in self._actions:
            try:
                action()
            except Exception as error:
                raise Unfit(f"{show(path)}: it could not be restored, and what comes before it is restored already: "
                            f"{type(error).__name__}: {error}") from error
        return put(self._state, self._result)

    def _register_classes(self, state: Any) -> None:
        for _, value in walk(state):
            tag = "namedtuple" if is_namedtuple(value) else "dataclass" if is_dataclass(value) else "enum"
            if tag != "enum" or isinstance(value, enum.Enum):
                self._copies.classes.setdefault((tag, type(value).__qualname__), type(value))

    def _fit(self, state: Any, tree: Tree, path: Path) -> Any:
        tag, inner = tag_of(tree), unwrap(state)
        if isinstance(state, PerRank):
            if tag != "per rank":
                return self._problem(path, "is PerRank, but was saved as common to all ranks")
            if self._own is None:
                return self._problem(path, "is PerRank and was saved under another number of ranks. Resume with that "
                                           "number, or leave it out of the state")
            if type(tree[tag]) is not str or tree[tag] not in self._own:
                return self._problem(path, "is PerRank, but the checkpoint lacks this rank's part")
            return PerRank(self._fit(state.value, self._own[tree[tag]], path))
        if tag == "per rank":
            return self._problem(path, "was saved as PerRank; expected the same here")
        if generator := generator_kind(state):
            return self._fit_generator(state, generator, tree, path)
        if isinstance(state, Tensor):
            return self._fit_tensor(state, tree, path)
        if not isinstance(inner, type) and hasattr(inner, "load_state_dict"):
            if tag != "object":
                return self._problem(path, f"is a {type(inner).__name__}, but was saved as {kind_of(tree)}")
            self._fit_object(inner, tree, path)
            return state
        strict = _holds_objects(state) or holds_objects(tree)
        if strict or _holds_classes(state):
            return self._fit_container(state, tree, path, strict)
        return self._copies.value(tree, path)

    def _fit_container(self, state: Any, tree: Tree, path: Path, strict: bool) -> Any:
        """strict: whether it holds objects, so that all of it has to match; else the state is only a pattern."""
        tag = tag_of(tree)
        content = tree if type(tree) is list else tree.get(tag) if tag else None
        if is_dataclass(state) and tag == "dataclass":
            return self._fit_dataclass(state, tree, path)
        if isinstance(state, dict) and tag in (*MAPPINGS, "defaultdict"):
            return self._fit_mapping(state, tree, path, strict)
        if is_namedtuple(state) and tag == "namedtuple":
            fields = self._fields(type(state).__qualname__, list(type(state)._fields), tree, path)
            return type(state)._make(self._fit(getattr(state, name), value, (*path, name))
                                     for name, value in fields.items()) if fields else state
        if type(state) in (list, tuple, collections.deque) and type(content) is list and (
                tag in ("", "tuple", "deque") and len(content) == len(state)):
            items = [self._fit(value, item, (*path, index))
                     for index, (value, item) in enumerate(zip(state, content, strict=True))]
            return collections.deque(items, state.maxlen) if type(state) is collections.deque else type(state)(items)
        if not strict:
            return self._copies.value(tree, path)
        if isinstance(state, list | tuple) and tag in ("", "tuple") and type(content) is list:
            return self._problem(path, f"has {len(state)} items, but was saved with {len(content)}")
        return self._problem(path, f"is a {type(state).__name__}, but was saved as {kind_of(tree)}")

    def _fit_mapping(self, state: dict[Any, Any], tree: dict[str, Tree], path: Path, strict: bool) -> Any:
        if type(state) not in (dict, collections.defaultdict, *MAPPINGS.values()):
            return self._problem(path, f"is a {type(state).__name__}; expected a dict or another one of Python's own")
        saved = self._copies.mapping(tree, path)
        if strict:
            self._differences(path, state, {key: value for key, value in saved.items()
                                            if key in state or tag_of(value) != "per rank"})  # those may be left out
        found = {key: self._fit(state[key], value, (*path, key)) if key in state else self._copies.value(
                     value, (*path, key)) for key, value in saved.items() if key in state or not strict}
        found = {key: found[key] for key in ([key for key in state if key in found] if strict else found)}
        if type(state) is not collections.defaultdict:
            return type(state)(found)
        if tree.get("factory") != factory_name(state):
            self._problem(path, f"is a defaultdict with the factory {factory_name(state)!r}, but was saved as a "
                                f"{tag_of(tree)} with {tree.get('factory')!r}")
        return collections.defaultdict(state.default_factory, found)

    def _fit_dataclass(self, state: Any, tree: dict[str, Tree], path: Path) -> Any:
        fields = self._fields(type(state).__qualname__, field_names(state), tree, path)
        values = {name: self._fit(getattr(state, name, None), value, (*path, name)) for name, value in fields.items()}
        if type(state).__dataclass_params__.frozen:
            return new_dataclass(type(state), values) if fields else state

        def assign() -> None:
            for name, value in values.items():
                setattr(state, name, value)
        self._actions.append((path, assign))
        return state

    def _fields(self, name: str, names: list[str], tree: dict[str, Tree], path: Path) -> dict[str, Tree]:
        """The trees of the fields of a class; none, and a problem, where the class or its fields differ."""
        saved, fields = tree[tag_of(tree)], tree.get("fields")
        if type(fields) is dict and saved == name and list(fields) == names:
            return fields
        shown = ", ".join(map(str, fields))[:200] if type(fields) is dict else "none"
        self._problem(path, f"is a {name} with the fields {', '.join(names)}, but was saved as {str(saved)[:100]} "
                            f"with {shown}")
        return {}

    def _fit_generator(self, state: Any, kind: str, tree: Tree, path: Path) -> Any:
        if tag_of(tree) != "generator" or tree["generator"] != kind:
            return self._problem(path, f"is a {kind}, but was saved as {kind_of(tree)}")
        saved = self._copies.value(tree.get("state"), path)
        try:
            check_generator_state(state, saved)
        except Exception as error:
            return self._problem(path, f"is a {kind}, and the checkpoint holds no state for one: "
                                       f"{type(error).__name__}: {str(error)[:200]}")
        self._actions.append((path, lambda: set_generator_state(state, saved)))
        return state

    def _fit_tensor(self, state: Tensor, tree: Tree, path: Path) -> Tensor:
        if tag_of(tree) != "tensor":
            self._problem(path, f"is a tensor, but was saved as {kind_of(tree)}")
            return state
        saved = self._views.value(tree, path)
        if self._matches(state, saved, path):
            def copy() -> None:
                with torch.no_grad():
                    _narrow(state, state).copy_(_narrow(state, saved))
            self._actions.append((path, copy))
        return state

    def _matches(self, state: Tensor, saved: Tensor, path: Path) -> bool:
        """Whether the saved values can be copied into a tensor, and will stay there."""
        check_tensor(state, path)
        if _shape(state) != _shape(saved):
            self._problem(path, f"is {_shape(state)}, but was saved as {_shape(saved)}")
            return False
        if overlaps_itself(state) and not _same_bits(_narrow(state, saved).expand_as(saved), saved):
            self._problem(path, "is an expanded tensor, but was saved with different values. Give it a clone()")
            return False
        if state.numel():
            memory = (state.data_ptr(), state.device, state.stride(), state.is_conj(), state.is_neg(), _shape(state))
            other, first = self._targets.setdefault(memory, (path, saved))
            if first is not saved and not _same_bits(first, saved):
                self._problem(path, f"shares its memory with {show(other)}, but was saved with different values. Are "
                                    "weights tied here that were not tied there?")
                return False
        return True

    def _fit_object(self, state: Any, tree: dict[str, Tree], path: Path) -> None:
        name = type(state).__name__
        check_optimizer(state, path)
        if isinstance(state, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler) and tree["object"] != name:
            self._problem(path, f"is a {name}, but was saved as {kind_of(tree)}")
            return
        if isinstance(state, torch.nn.Module):
            saved = self._fit_module(state, tree, path)
        else:
            if not tags(tree).isdisjoint(CLASSES):
                self._register_classes(state_of(state, path))
            saved = self._copies.value(tree.get("state"), path)
        if isinstance(state, torch.optim.Optimizer):
            if self._fit_optimizer(state, tree, saved, path):
                self._actions.append((path, lambda: _load_optimizer(state, saved)))
            return
        self._actions.append((path, lambda: state.load_state_dict(saved)))

    def _fit_module(self, module: torch.nn.Module, tree: dict[str, Tree], path: Path) -> Any:
        check_module(module, path)
        own: dict[str, Any] = state_of(module, path)
        inner: Tree = tree.get("state")
        if tag_of(inner) not in MAPPINGS:
            self._problem(path, f"is a {type(module).__name__}, but the checkpoint holds no entries for one")
            return {}
        keys = {plain_key(key): key for key in own}
        saved: Any = type(own)()
        pairs = self._copies.mapping(inner, path)
        self._differences(path, keys, pairs)
        for plain, key in keys.items():
            if plain in pairs:
                value, place = own[key], (*path, plain)
                copied = isinstance(value, Tensor) and not key.endswith("_extra_state")  # which is kept as it is
                saved[key] = (self._views if copied else self._copies).value(pairs[plain], place)
                if copied and isinstance(saved[key], Tensor):
                    if overlaps_itself(value):
                        self._problem(place, "is an expanded tensor, into which load_state_dict() cannot copy. "
                                             "Register a contiguous() one")
                    self._matches(value, saved[key], place)
                elif copied:
                    self._problem(place, f"is a tensor, but was saved as {kind_of(pairs[plain])}")
        if "metadata" in inner:
            metadata = self._copies.value(inner["metadata"], path)
            if type(metadata) is not dict or not all(type(one) is dict for one in metadata.values()):
                raise Unfit(f"{show(path)}: the checkpoint holds no versions of the modules. Was the file changed?")
            names = {plain_key(name): name for name in getattr(own, "_metadata", {})}
            saved._metadata = {names.get(name, name): one for name, one in metadata.items()}
        return saved

    def _fit_optimizer(self, state: torch.optim.Optimizer, tree: dict[str, Tree], saved: Any, path: Path) -> bool:
        try:
            if type(saved) is not dict or type(saved["param_groups"]) is not list or type(saved["state"]) is not dict:
                raise TypeError("its state or its groups are missing")
            counts = [len(group["params"]) for group in saved["param_groups"]]
            before = [[(name, list(shape)) for name, shape in group] for group in tree["parameters"]]
            if counts != [len(group) for group in before]:
                raise ValueError("its groups do not match its parameters")
        except Exception as error:
            raise Unfit(f"{show(path)}: the checkpoint holds no state of an optimizer: {error}. Was the file "
                        "changed?") from error
        now = describe_parameters(state, self._names)
        if counts != [len(group) for group in now]:
            self._problem(path, f"has groups of {[len(group) for group in now]} parameters, but was saved with "
                                f"{counts}")
            return False
        for number, groups in enumerate(zip(now, before, strict=True)):
            for index, ((name, shape), (other, saved_shape)) in enumerate(zip(*groups, strict=True)):
                if name is not None and other is not None and name != other or shape != saved_shape:
                    self._problem(path, f"has {name or 'a parameter'} of shape {shape} as parameter {index} of group "
                                        f"{number}, but was saved with {other or 'one'} of shape {saved_shape} there. "
                                        "Give the optimizer the same parameters in the same order")
                    return False
        return True

    def _differences(self, path: Path, own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
        for words, names in (("the checkpoint lacks", [key for key in own if key not in saved]),
                             ("only the checkpoint has", [key for key in saved if key not in own])):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                shown = ", ".join(repr(key) if type(key) is str else show((key,)) for key in names[:5])
                self.problems.append(f"{show(path, 'state')}: {words} {shown}{more}")

    def _problem(self, path: Path, text: str) -> None:
        self.problems.append(f"{show(path)} {text}")


def put(state: Any, restored: Any) -> Any:
    """Put restored data into the containers and numpy arrays of the state; returns what now stands in its place.

    Dicts, lists, deques and arrays of the same shape and type keep their identity. What cannot change,
    such as numbers, strings and arrays of another shape, is replaced in the container that holds it.
    """
    if restored is state or type(restored) is not type(state):
        return restored
    if isinstance(state, dict):
        items = {key: put(state[key], value) if key in state else value for key, value in restored.items()}
        state.clear()
        state.update(items)
        return state
    if type(state) in (list, collections.deque):
        same = len(state) == len(restored)
        values = [put(*pair) for pair in zip(state, restored, strict=True)] if same else list(restored)
        state.clear()
        state.extend(values)
        return state
    if isinstance(state, PerRank):
        return PerRank(put(state.value, restored.value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(state) is numpy.ndarray:
        if state.shape == restored.shape and state.dtype == restored.dtype and state.flags.writeable:
            state[...] = restored
            return state
    return restored


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    # It casts to the type of the parameters, which would round float32 averages of bfloat16 parameters.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


def _narrow(like: Tensor, tensor: Tensor) -> Tensor:
    """The part of `tensor` for which an expanded tensor `like` has memory."""
    for dim, (length, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _same_bits(a: Tensor, b: Tensor) -> bool:
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*raw)


def _holds_objects(state: Any) -> bool:
    """Whether anything in it, at any depth, is restored in place."""
    return any(isinstance(value, Tensor | PerRank) or generator_kind(value) is not None or (
        not isinstance(value, type) and hasattr(unwrap(value), "load_state_dict")) for _, value in walk(state))


def _holds_classes(state: Any) -> bool:
    """Whether it holds what only an instance in the state can be restored into."""
    return any(is_dataclass(value) or isinstance(value, collections.defaultdict) for _, value in walk(state))


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
