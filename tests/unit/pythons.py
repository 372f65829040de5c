"""Python environments for tests: with a module torch that is a stand-in, without torch, or of an older version."""
from __future__ import annotations

import os
import sys
from pathlib import Path

TORCH = "__version__ = '0'\n"


def make_environment(folder: Path, *, torch: bool, version: tuple[int, int] | None = None) -> Path:
    """Make an environment in `folder`; return its Python. version: what it says it is."""
    base = Path(os.path.realpath(sys.executable))  # what venv makes, in a hundredth of the time
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    if torch:
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text(TORCH)
    if version is not None:
        # Not sitecustomize: the Python of Debian has one of its own, which is found first.
        (packages / "version.pth").write_text(f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0)\n")
    return folder / "bin" / "python"
