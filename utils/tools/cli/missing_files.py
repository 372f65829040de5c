"""Say in the same words, for every command, that a file, a program or PyYAML is missing."""

from __future__ import annotations

import glob
import importlib.util
import os
import shlex

_LIKENESS = 0.7  # least similarity of a suggested name: 0 nothing in common, 1 the same


def no_such_file(path: str, remedy: str = "", folder: str = "") -> str:
    """Return a message that a file does not exist, with a similar name beside it.

    remedy: what to do if no name is similar; "" to check the path. folder: where a relative path
    starts; "" for the current folder.
    """
    base, (above, name) = folder or os.getcwd(), os.path.split(path.rstrip(os.sep))
    end = os.path.splitext(name)[1]
    others = glob.glob(os.path.join(glob.escape(os.path.join(base, above)), f"*{end}"))
    near = closest(name, [os.path.basename(other) for other in others])
    remedy = f"Did you mean {os.path.join(above, near)}?" if near else remedy or "Check the path"
    where = "" if os.path.isabs(path) else f" (in {base})"
    return f"no such file: {path or repr(path)}{where}. {remedy}"


def no_such_program(name: str, folder: str = "") -> str:
    """Return why a program cannot be started, and what was meant.

    name: as it was typed. folder: where a relative path starts; "" for the current folder.
    """
    if os.path.isdir(name):
        return f"{name} is a folder. Expected a script or a program. Check the path"
    if os.sep in name and os.path.isfile(name):
        return (
            f"{name} is not executable. Expected a program, or a script whose name ends in .py. "
            f"Run chmod +x {shlex.quote(name)}, or check the path"
        )
    parent = os.path.dirname(name)
    found = glob.glob(os.path.join(glob.escape(os.path.join(folder, parent)), "*.py"))
    scripts = [os.path.join(parent, os.path.basename(path)) for path in found]
    near = f"{name}.py" if f"{name}.py" in scripts else closest(f"{name}.py", scripts)
    if near:
        return f"no such program: {name}. Did you mean {near}?"
    if os.path.isfile(name):
        return (
            f"no such program: {name}: the file of this name is not looked for on PATH. Did you "
            f"mean ./{name}?"
        )
    if os.sep not in name:
        return f"no such program: {name}. It is not on PATH. Check its name, or load its module"
    where = "" if os.path.isabs(name) else f" (in {os.getcwd()})"
    return f"no such program: {name}{where}. Check the path"


def closest(name: str, names: list[str]) -> str:
    """Return the most similar one of these names; "" if none is similar."""
    import difflib  # loading it would slow down every launch

    return next(iter(difflib.get_close_matches(name, names, 1, _LIKENESS)), "")


def why_no_yaml(error: ImportError, needed_for: str) -> str:
    """Return why `import yaml` has failed. needed_for: "site profiles are YAML files"."""
    found = importlib.util.find_spec("yaml")
    if found is None:
        return (
            f"PyYAML is not installed, and {needed_for}. Install it with "
            "`python -m pip install pyyaml`, or run scripts/setup_env.sh."
        )
    origin = str(found.origin)
    remedy = "Reinstall it with `python -m pip install --force-reinstall pyyaml`"
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if origin.startswith(os.path.join(os.path.abspath(folder), "")):
            remedy = f"Take {folder} out of PYTHONPATH: it may belong to another Python"
    return (
        f"yaml of {origin} was found and does not load: {error}. Expected a PyYAML of this Python, "
        f"since {needed_for}. {remedy}."
    )
