"""Compare a checkpoint with the state that it is to restore, then restore it in place."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .entries import (
    MAPPINGS,
    Path,
    PerRank,
    check_module,
    check_optimizer,
    factory_name,
    field_names,
    is_dataclass,
    is_namedtuple,
    overlaps_itself,
    plain_key,
    show_path,
    state_of,
    unwrap,
    walk,
)
from .in_place import TensorTargets, copy_into, put
from .optimizers import find_mismatch, load_optimizer, parameter_names
from .unpack import CLASS_TAGS, Unpacker, holds_objects, kind_of, new_dataclass, tag_of, tags
from .values import StateError, Tree, check_generator_state, generator_kind, set_generator_state

_SHOWN_KEYS = 5


class Restorer:
    """Compares a checkpoint with a state without changing it; then restore() changes it.

    own: the trees of this rank's PerRank parts; None if another number of ranks saved them.
    Raises StateError for a checkpoint that no state matches. `mismatches` lists what this state
    has and the checkpoint does not have, or the other way round.
    """

    def __init__(
        self, state: Any, tree: Tree, tensors: Mapping[str, Tensor], own: dict[str, Tree] | None
    ) -> None:
        self.mismatches: list[str] = []
        self._own = own
        self._actions: list[tuple[Path, Callable[[], object]]] = []
        self._targets = TensorTargets()
        self._views = Unpacker(tensors)  # for what is copied into tensors of the state
        self._copies = Unpacker(tensors, copies=True)
        self._names = parameter_names(state)
        self._register_classes(state)
        self._state = state
        self._result = self._match(state, tree, ())

    def restore(self) -> Any:
        """Restore the state in place, and return it as put() does."""
        for path, action in self._actions:
            try:
                action()
            except Exception as error:
                raise StateError(
                    f"{show_path(path)}: it could not be restored, and the entries before it are "
                    f"restored already: {type(error).__name__}: {error}"
                ) from error
        return put(self._state, self._result)

    def _register_classes(self, state: Any) -> None:
        for _, value in walk(state):
            if is_namedtuple(value):
                tag = "namedtuple"
            elif is_dataclass(value):
                tag = "dataclass"
            elif isinstance(value, enum.Enum):
                tag = "enum"
            else:
                continue
            cls = type(value)
            self._copies.classes.setdefault((tag, cls.__qualname__), cls)

    def _match(self, state: Any, tree: Tree, path: Path) -> Any:
        """Compare an entry, note how to restore it, and return what then stands in its place."""
        tag, inner = tag_of(tree), unwrap(state)
        if isinstance(state, PerRank):
            return self._match_per_rank(state, tree, path)
        if tag == "per rank":
            return self._mismatch(path, "was saved as PerRank; expected PerRank in the state")
        if generator := generator_kind(state):
            return self._match_generator(state, generator, tree, path)
        if isinstance(state, Tensor):
            return self._match_tensor(state, tree, path)
        if not isinstance(inner, type) and hasattr(inner, "load_state_dict"):
            if tag != "object":
                what = f"is a {type(inner).__name__}, but was saved as {kind_of(tree)}"
                return self._mismatch(path, what)
            self._match_object(inner, tree, path)
            return state

        strict = _holds_objects(state) or holds_objects(tree)
        if strict or _holds_classes(state):
            return self._match_container(state, tree, path, strict)
        return self._copies.value(tree, path)

    def _match_per_rank(self, state: PerRank, tree: Tree, path: Path) -> Any:
        if tag_of(tree) != "per rank":
            return self._mismatch(path, "is PerRank, but was saved as common to all ranks")
        if self._own is None:
            return self._mismatch(
                path,
                "is PerRank and was saved under another number of ranks. Resume with that number, "
                "or leave it out of the state",
            )
        place = tree["per rank"]
        if type(place) is not str or place not in self._own:
            return self._mismatch(path, "is PerRank, but the checkpoint lacks this rank's part")
        return PerRank(self._match(state.value, self._own[place], path))

    # --- containers and classes of the user

    def _match_container(self, state: Any, tree: Tree, path: Path, strict: bool) -> Any:
        """Compare a container or a dataclass.

        strict: it holds objects, so all of it has to match; else the state is only a pattern.
        """
        tag = tag_of(tree)
        content: Any = tree if type(tree) is list else tree.get(tag) if tag else None
        if is_dataclass(state) and tag == "dataclass":
            return self._match_dataclass(state, tree, path)
        if isinstance(state, dict) and tag in (*MAPPINGS, "defaultdict"):
            return self._match_mapping(state, tree, path, strict)
        if is_namedtuple(state) and tag == "namedtuple":
            return self._match_namedtuple(state, tree, path)

        is_sequence = type(state) in (list, tuple, collections.deque) and type(content) is list
        if is_sequence and tag in ("", "tuple", "deque") and len(content) == len(state):
            items = [
                self._match(value, item, (*path, index))
                for index, (value, item) in enumerate(zip(state, content, strict=True))
            ]
            if type(state) is collections.deque:
                return collections.deque(items, state.maxlen)
            return type(state)(items)

        if not strict:
            return self._copies.value(tree, path)
        if isinstance(state, list | tuple) and tag in ("", "tuple") and type(content) is list:
            what = f"has {len(state)} items, but was saved with {len(content)}"
        else:
            what = f"is a {type(state).__name__}, but was saved as {kind_of(tree)}"
        return self._mismatch(path, what)

    def _match_mapping(
        self, state: dict[Any, Any], tree: dict[str, Tree], path: Path, strict: bool
    ) -> Any:
        if type(state) not in (dict, collections.defaultdict, *MAPPINGS.values()):
            what = f"is a {type(state).__name__}; expected a dict or another one of Python's own"
            return self._mismatch(path, what)

        saved = self._copies.mapping(tree, path)
        if strict:  # PerRank parts may be left out of the state
            needed = {
                key: value
                for key, value in saved.items()
                if key in state or tag_of(value) != "per rank"
            }
            self._compare_keys(path, state, needed)
            keys = [key for key in state if key in saved]
        else:
            keys = list(saved)

        # in the order of the file, which is the order of messages and actions
        found = {
            key: self._match(state[key], value, (*path, key))
            if key in state
            else self._copies.value(value, (*path, key))
            for key, value in saved.items()
            if key in state or not strict
        }
        found = {key: found[key] for key in keys}
        if type(state) is not collections.defaultdict:
            return type(state)(found)

        if tree.get("factory") != factory_name(state):
            self._mismatch(
                path,
                f"is a defaultdict with the factory {factory_name(state)!r}, but was saved as a "
                f"{tag_of(tree)} with {tree.get('factory')!r}",
            )
        return collections.defaultdict(state.default_factory, found)

    def _match_namedtuple(self, state: Any, tree: dict[str, Tree], path: Path) -> Any:
        cls = type(state)
        fields = self._match_fields(cls.__qualname__, list(cls._fields), tree, path)
        if not fields:
            return state
        return cls._make(
            self._match(getattr(state, name), value, (*path, name))
            for name, value in fields.items()
        )

    def _match_dataclass(self, state: Any, tree: dict[str, Tree], path: Path) -> Any:
        cls = type(state)
        fields = self._match_fields(cls.__qualname__, field_names(state), tree, path)
        values = {
            name: self._match(getattr(state, name, None), value, (*path, name))
            for name, value in fields.items()
        }
        if cls.__dataclass_params__.frozen:
            return new_dataclass(cls, values) if fields else state

        def assign() -> None:
            for name, value in values.items():
                setattr(state, name, value)

        self._actions.append((path, assign))
        return state

    def _match_fields(
        self, name: str, names: list[str], tree: dict[str, Tree], path: Path
    ) -> dict[str, Tree]:
        """Return the trees of the fields of a class; none where the class or its fields differ."""
        saved, fields = tree[tag_of(tree)], tree.get("fields")
        if type(fields) is dict and saved == name and list(fields) == names:
            return fields
        shown = ", ".join(map(str, fields))[:200] if type(fields) is dict else "none"
        self._mismatch(
            path,
            f"is a {name} with the fields {', '.join(names)}, but was saved as {str(saved)[:100]} "
            f"with {shown}",
        )
        return {}

    # --- generators and tensors

    def _match_generator(self, state: Any, kind: str, tree: Tree, path: Path) -> Any:
        if tag_of(tree) != "generator" or tree["generator"] != kind:
            return self._mismatch(path, f"is a {kind}, but was saved as {kind_of(tree)}")
        saved = self._copies.value(tree.get("state"), path)
        try:
            check_generator_state(state, saved)
        except Exception as error:
            return self._mismatch(
                path,
                f"is a {kind}, and the checkpoint holds no state for one: "
                f"{type(error).__name__}: {str(error)[:200]}",
            )
        self._actions.append((path, lambda: set_generator_state(state, saved)))
        return state

    def _match_tensor(self, state: Tensor, tree: Tree, path: Path) -> Tensor:
        if tag_of(tree) != "tensor":
            self._mismatch(path, f"is a tensor, but was saved as {kind_of(tree)}")
            return state
        saved = self._views.value(tree, path)
        mismatch = self._targets.find_mismatch(state, saved, path)
        if mismatch:
            self._mismatch(path, mismatch)
        else:
            self._actions.append((path, lambda: copy_into(state, saved)))
        return state

    # --- objects

    def _match_object(self, state: Any, tree: dict[str, Tree], path: Path) -> None:
        check_optimizer(state, path)
        is_optimizer = isinstance(state, torch.optim.Optimizer)
        if is_optimizer or isinstance(state, torch.optim.lr_scheduler.LRScheduler):
            name = type(state).__name__
            if tree["object"] != name:
                self._mismatch(path, f"is a {name}, but was saved as {kind_of(tree)}")
                return

        if isinstance(state, torch.nn.Module):
            saved = self._match_module(state, tree, path)
        else:
            if not tags(tree).isdisjoint(CLASS_TAGS):
                self._register_classes(state_of(state, path))
            saved = self._copies.value(tree.get("state"), path)

        if not is_optimizer:
            self._actions.append((path, lambda: state.load_state_dict(saved)))
            return
        mismatch = find_mismatch(state, self._names, tree.get("parameters"), saved, path)
        if mismatch:
            self._mismatch(path, mismatch)
        else:
            self._actions.append((path, lambda: load_optimizer(state, saved)))

    def _match_module(self, module: torch.nn.Module, tree: dict[str, Tree], path: Path) -> Any:
        """Compare a module; return the state_dict() that it is to load."""
        check_module(module, path)
        own: dict[str, Any] = state_of(module, path)
        inner: Tree = tree.get("state")
        if tag_of(inner) not in MAPPINGS:
            what = f"is a {type(module).__name__}, but the checkpoint holds no entries for one"
            self._mismatch(path, what)
            return {}

        keys = {plain_key(key): key for key in own}
        trees = self._copies.mapping(inner, path)
        self._compare_keys(path, keys, trees)
        saved: Any = type(own)()
        for plain, key in keys.items():
            if plain in trees:
                saved[key] = self._match_module_entry(key, own[key], trees[plain], (*path, plain))
        if "metadata" in inner:
            saved._metadata = self._module_versions(own, inner["metadata"], path)
        return saved

    def _match_module_entry(self, key: str, value: Any, tree: Tree, path: Path) -> Any:
        """Compare an entry of a module's state_dict(); return what the module is to load."""
        # load_state_dict() copies tensors, but keeps an extra state as it is.
        is_copied = isinstance(value, Tensor) and not key.endswith("_extra_state")
        if not is_copied:
            return self._copies.value(tree, path)

        saved = self._views.value(tree, path)
        if not isinstance(saved, Tensor):
            self._mismatch(path, f"is a tensor, but was saved as {kind_of(tree)}")
            return saved
        if overlaps_itself(value):
            self._mismatch(
                path,
                "is an expanded tensor, into which load_state_dict() cannot copy. Register a "
                "contiguous() one",
            )
        if mismatch := self._targets.find_mismatch(value, saved, path):
            self._mismatch(path, mismatch)
        return saved

    def _module_versions(self, own: Any, tree: Tree, path: Path) -> dict[Any, dict[Any, Any]]:
        """Return the versions of the modules, which load_state_dict() reads from _metadata."""
        metadata: Any = self._copies.value(tree, path)
        if type(metadata) is not dict or not all(type(one) is dict for one in metadata.values()):
            raise StateError(
                f"{show_path(path)}: the checkpoint holds no versions of the modules. "
                "Was the file changed?"
            )
        names = {plain_key(name): name for name in getattr(own, "_metadata", {})}
        return {names.get(name, name): versions for name, versions in metadata.items()}

    # --- mismatches

    def _compare_keys(self, path: Path, state: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
        lacking = [key for key in state if key not in saved]
        surplus = [key for key in saved if key not in state]
        for what, keys in (
            ("the checkpoint lacks", lacking),
            ("only the checkpoint has", surplus),
        ):
            if keys:
                shown = ", ".join(
                    repr(key) if type(key) is str else show_path((key,))
                    for key in keys[:_SHOWN_KEYS]
                )
                more = len(keys) - _SHOWN_KEYS
                suffix = f" and {more} more" if more > 0 else ""
                self.mismatches.append(f"{show_path(path, 'state')}: {what} {shown}{suffix}")

    def _mismatch(self, path: Path, text: str) -> None:
        self.mismatches.append(f"{show_path(path)} {text}")


def _holds_objects(state: Any) -> bool:
    """Return whether anything in a state, at any depth, is restored in place."""
    return any(
        isinstance(value, Tensor | PerRank)
        or generator_kind(value) is not None
        or (not isinstance(value, type) and hasattr(unwrap(value), "load_state_dict"))
        for _, value in walk(state)
    )


def _holds_classes(state: Any) -> bool:
    """Return whether a state holds what can only be restored into an instance in it."""
    return any(
        is_dataclass(value) or isinstance(value, collections.defaultdict)
        for _, value in walk(state)
    )
