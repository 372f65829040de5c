"""The tree of exceptions in errors.py is that of the code."""

from __future__ import annotations

import ast
import builtins

from tests.unit.programs import ROOT
from utils import errors


def exceptions_in_code() -> dict[str, tuple[str, str]]:
    """Return the base and the module of each exception, except for private ones and ends of a program."""
    classes = {}
    for path in (ROOT / "utils").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "utils").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.bases and not node.name.startswith("_"):
                classes[node.name] = ast.unparse(node.bases[0]).rpartition(".")[2], module
    found: dict[str, tuple[str, str]] = {}
    bases = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    while added := {name: place for name, place in classes.items() if place[0] in bases and name not in found}:
        found |= added
        bases |= set(added)
    return found


def exceptions_in_tree() -> dict[str, tuple[str, str]]:
    tree = (errors.__doc__ or "").partition("\n\nRuntimeError")[2].partition("\n\n")[0]
    bases, found = ["RuntimeError"], {}
    for line in ("RuntimeError" + tree).splitlines():
        depth = (len(line) - len(line.lstrip())) // 4
        name, _, text = line.strip().replace(" *", "").partition(" ")
        bases[depth:] = [name]
        if depth:
            found[name] = bases[depth - 1], text.strip().partition(":")[0]
    return found


def test_tree_of_exceptions_is_that_of_the_code() -> None:
    assert exceptions_in_tree() == exceptions_in_code()
