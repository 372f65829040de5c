"""Say why PyYAML cannot be imported."""

from __future__ import annotations

import importlib.util
import os


def why_no_yaml(error: ImportError, needed_for: str) -> str:
    """Return a message about `import yaml`, which has failed. needed_for: what is YAML."""
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
