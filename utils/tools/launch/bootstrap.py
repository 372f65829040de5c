"""Build the command that runs a module of this package with any Python, from any location."""

from __future__ import annotations

from collections.abc import Sequence

from ..cli.interpreter import import_path


def module_command(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs main() of a module of utils.tools.launch, without site-packages.

    main() gets the arguments as a list and returns the exit status.
    """
    code = import_code(f"{module} import main; sys.exit(main(sys.argv[1:]))")
    return [python, "-I", "-S", "-c", code, *arguments]


def import_code(what: str) -> str:
    """Return code that imports from a module of tools.launch, whatever the package is called."""
    root, name = import_path(__name__, __file__)
    package = name.rpartition(".")[0]
    return f"import sys; sys.path.insert(0, {root!r}); from {package}.{what}"
