"""Every module runs under Python 3.10, the oldest that pyproject.toml names."""
from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.programs import ROOT

FOLDERS = ("utils", "examples", "scripts")
OLDEST = (3, int(re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]))

# What the standard library has only since a later Python: "" for a module as a whole.
ADDED_LATER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tomllib", "wsgiref.types", "importlib.resources.abc", "annotationlib", "compression",
                     "concurrent.interpreters", "string.templatelib", "pathlib.types"), ("",)),
    "builtins": ("ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"),
    "typing": ("NotRequired", "Required", "Self", "LiteralString", "Never", "Unpack", "TypeVarTuple", "assert_never",
               "assert_type", "reveal_type", "dataclass_transform", "get_overloads", "clear_overloads", "override",
               "TypeAliasType", "NoDefault", "ReadOnly", "TypeIs", "is_protocol", "get_protocol_members",
               "evaluate_forward_ref"),
    "enum": ("StrEnum", "ReprEnum", "EnumType", "EnumCheck", "verify", "member", "nonmember", "global_enum", "property",
             "CONTINUOUS", "NAMED_FLAGS", "UNIQUE", "STRICT", "CONFORM", "EJECT", "KEEP", "EnumDict"),
    "datetime": ("UTC",), "contextlib": ("chdir",), "hashlib": ("file_digest",),
    "asyncio": ("TaskGroup", "Runner", "timeout", "timeout_at", "Timeout", "Barrier", "eager_task_factory"),
    "math": ("cbrt", "exp2", "sumprod", "fma"), "itertools": ("batched",), "functools": ("Placeholder",),
    "operator": ("call", "is_none", "is_not_none"), "inspect": ("getmembers_static", "markcoroutinefunction"),
    "sys": ("exception", "monitoring", "activate_stack_trampoline", "remote_exec"),
    "logging": ("getLevelNamesMapping", "getHandlerByName", "getHandlerNames"),
    "os": ("process_cpu_count", "unshare", "setns", "PIDFD_NONBLOCK", "timerfd_create", "login_tty", "posix_openpt",
           "grantpt", "reload_environ"),
    "threading": ("setprofile_all_threads", "settrace_all_threads"), "sqlite3": ("Blob",),
    "random": ("binomialvariate",), "calendar": ("Month", "Day"), "re": ("NOFLAG", "PatternError"),
    "types": ("get_original_bases", "CapsuleType"), "copy": ("replace",), "warnings": ("deprecated",),
    "queue": ("ShutDown",), "pathlib": ("UnsupportedOperation",), "collections.abc": ("Buffer",),
}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_module_uses_what_a_later_python_added() -> None:
    """By a table, so that it does not depend on which Pythons the machine has."""
    used = [f"{path.relative_to(ROOT)}:{line}: {module}.{name}".rstrip(".") for path in sources()
            for line, module, name in standard_names(path.read_text(), set(sys.stdlib_module_names))
            if name in ADDED_LATER.get(module, ()) or "" in ADDED_LATER.get(module, ())]
    assert not used


@pytest.mark.parametrize("text, expected", [
    ("from typing import NotRequired", ["typing.NotRequired"]), ("import tomllib", ["tomllib."]),
    ("import enum as e\nclass A(e.StrEnum): pass", ["enum.", "enum.StrEnum"]),
    ("def f():\n    raise ExceptionGroup('', [])", ["builtins.ExceptionGroup"]),
    ("import os.path\nos.cpu_count", ["os.path.", "os.cpu_count"]),
    ("try:\n    import tomllib\nexcept ImportError:\n    tomllib = None", []),
    ("import sys\nif sys.version_info >= (3, 11):\n    from typing import Self", ["sys.", "sys.version_info"]),
    ("if TYPE_CHECKING:\n    from typing import Self", []), ("import torch\ntorch.Event", []),
    ("def f(time):\n    time.anything", []),
    ("import enum\ndef f() -> enum.StrEnum: ...", ["enum."])])
def test_names_of_the_standard_library_are_found(text: str, expected: list[str]) -> None:
    names = [f"{module}.{name}" for _, module, name in standard_names(text, set(sys.stdlib_module_names))]
    assert [name for name in names if name not in ("builtins.sys", "builtins.TYPE_CHECKING")] == expected


def standard_names(text: str, standard: set[str]) -> list[tuple[int, str, str]]:
    """Line, module and name of what a source takes from the standard library, but for annotations and what is guarded.

    Guarded: by `except ImportError`, by a comparison of sys.version_info, or by TYPE_CHECKING.
    """
    found: list[tuple[int, str, str]] = []
    modules: dict[str, str] = {}  # by the name that the source gives them
    assigned: set[str] = set()
    guarded: set[int] = set()  # id() of nodes
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names: list[ast.stmt] = []
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(handler) for handler in node.handlers):
            names = node.body
        elif isinstance(node, ast.If) and re.search("version_info|TYPE_CHECKING", ast.unparse(node.test)):
            names = node.body
        annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)  # never computed
        guarded.update(id(inner) for part in [*names, *filter(None, [annotation])] for inner in ast.walk(part))
        if isinstance(node, ast.arg):
            assigned.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.add(node.id)
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in standard:
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in standard:
                    found.append((node.lineno, alias.name, ""))
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    modules[alias.asname or name] = name
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module and node.value.id not in assigned:
                found.append((node.lineno, module, node.attr))
        elif isinstance(node, ast.Name) and node.id in ADDED_LATER["builtins"]:
            found.append((node.lineno, "builtins", node.id))
    return found


# Imports each module of the kit with a stand-in for torch, and looks for the names of the standard library.
IMPORT_ALL = """
import importlib, importlib.abc, importlib.machinery, json, sys, types
root, (names, modules) = sys.argv[1], json.load(sys.stdin)

class Any(type):  # a class, a number and a function, each of whose attributes is another one
    def __getattr__(cls, name):
        if name.startswith("__") and name not in ("__iter__", "__next__"):
            raise AttributeError(name)
        return Any(name, (), {})
    def __index__(cls):
        return 4
    __int__ = __index__
    def __call__(cls, *arguments, **options):
        if len(arguments) == 1 and not options and isinstance(arguments[0], types.FunctionType):
            return arguments[0]  # a decorator
        return type.__call__(cls)
    def __mul__(cls, other):
        return 4 * other
    def __getitem__(cls, key):
        return cls
    __rmul__ = __mul__

class Stub(types.ModuleType):
    __version__ = "2.8.0"
    __file__ = "/torch/__init__.py"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any(name, (), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "yaml", "numpy", "matplotlib", "shtab", "submitit"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.path.insert(0, root)
problems = []
for path, line, module, name in names:
    try:
        found = importlib.import_module(module)
        if name not in ("", "*") and not hasattr(found, name):
            importlib.import_module(module + "." + name)
    except ImportError as error:
        problems.append(f"{path}:{line}: {module} {name}: {error}")
for module in modules:
    try:
        importlib.import_module(module)
    except Exception as error:
        problems.append(f"{module}: {type(error).__name__}: {error}")
print(json.dumps(problems))
"""


def oldest_python() -> str:
    """The oldest Python of this machine that pyproject.toml allows."""
    programs = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], sys.version_info[1])]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = {sys.version_info[:2]: sys.executable}
    for program in [*filter(None, programs), *map(str, pyenv.glob("3.*/bin/python"))]:
        question = [program, "-c", "import sys; print(*sys.version_info[:2])"]
        asked = subprocess.run(question, capture_output=True, text=True)
        if asked.returncode == 0 and (version := tuple(map(int, asked.stdout.split()))) >= OLDEST:
            found.setdefault(version, program)
    return found[min(found)]


def test_the_oldest_python_here_has_every_name_and_imports_every_module() -> None:
    names = [(str(path.relative_to(ROOT)), *row) for path in sources()
             for row in standard_names(path.read_text(), set(sys.stdlib_module_names))]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
               for path in sources() if path.is_relative_to(ROOT / "utils") and path.name != "__main__.py"]
    assert len(names) > 1000 and len(modules) > 200
    program = oldest_python()
    done = subprocess.run([program, "-B", "-c", IMPORT_ALL, str(ROOT)], input=json.dumps([names, modules]),
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], program
