"""Build the command that runs a module of this package with any Python, from any location."""

from __future__ import annotations

import os
from collections.abc import Sequence


def module_command(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs main() of a module of utils.tools.launch, without site-packages.

    main() gets the arguments as a list and returns the exit status.
    """
    code = import_code(f"{module} import main; sys.exit(main(sys.argv[1:]))")
    return [python, "-I", "-S", "-c", code, *arguments]


def import_code(what: str) -> str:
    """Return code that imports from a module of tools.launch.

    The package has the name of its folder there: an editable installation may give it another one.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    names: list[str] = []
    for _ in range(__name__.count(".")):
        folder, last = os.path.split(folder)
        names.insert(0, last)
    return f"import sys; sys.path.insert(0, {folder!r}); from {'.'.join(names)}.{what}"
