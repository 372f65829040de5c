"""Import a training script's modules, even if its `utils` has the name of this package."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_NAME = __name__.partition(".")[0]
_KIT = sys.modules[_NAME]
_ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def script_modules(folder: str) -> Iterator[None]:
    """Import modules as a script in this folder does when it runs by itself.

    If its sys.path leads to another package of this name, the script gets that one. Otherwise it
    gets the modules of this package that are loaded already. Meanwhile, code of this package must
    not import any more of its modules.
    """
    path, kept = list(sys.path), _remove_modules()
    for place in (str(_ROOT), ""):  # entries that started this command
        if sys.path[0] == place:
            del sys.path[0]
    sys.path.insert(0, folder)
    finder = _Finder(kept)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        if sys.modules.get(_NAME) is not _KIT:
            _remove_modules()
            sys.modules.update(kept)


def name_conflict(error: BaseException | None) -> str:
    """Return a hint if a script has imported its own package, but may have meant this one."""
    if not isinstance(error, ImportError) or sys.modules.get(_NAME) is _KIT:
        return ""
    if (error.name or "").partition(".")[0] != _NAME:
        return ""
    return (
        f". The script's own {_NAME} and the kit's package have the same name. If the script means "
        "the kit, install the kit with pip, where it is ddpkit"
    )


class _Finder(MetaPathFinder, Loader):
    """When a script imports a package of this name, decide by sys.path whether it is this one."""

    def __init__(self, kept: dict[str, ModuleType]) -> None:
        self._kept, self._spec = kept, _KIT.__spec__

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        found = next(filter(None, specs), None)
        if found is not None and not _is_kit(found):
            return found
        sys.modules.update(self._kept)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _KIT

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # import has replaced the spec


def _is_kit(spec: ModuleSpec) -> bool:
    return os.path.realpath(spec.origin or "") == os.path.realpath(_KIT.__file__ or "")


def _remove_modules() -> dict[str, ModuleType]:
    """Remove packages of this name and their modules from sys.modules, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == _NAME]
    return {name: sys.modules.pop(name) for name in names}
