"""A small shared environment, and launches with --stage of a program that prints from where it imports."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launch.launchers import LAUNCH

PROGRAM = """\
import json, os, subprocess, sys
import editable, heavy, torch
out = subprocess.run([sys.argv[1], "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout
sys.stdout.write("rank " + json.dumps({"rank": os.environ["RANK"], "prefix": sys.prefix, "heavy": heavy.__file__,
    "version": heavy.VERSION, "editable": editable.__file__, "other": out.strip(), "hooked": os.environ.get("HOOKED"),
    "cache": os.environ.get("TRITON_CACHE_DIR"), "mpl": os.environ.get("MPLCONFIGDIR")}) + "\\n")
sys.stdout.flush()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@dataclass
class Shared:
    """A shared environment with small packages, and the local disk of a node."""

    folder: Path
    python: Path
    disk: Path

    @property
    def packages(self) -> Path:
        return next((self.folder / "env" / "lib").glob("python*")) / "site-packages"

    @property
    def root(self) -> Path:
        return self.disk / f"ddpkit-stage-{os.geteuid()}"

    @property
    def copies(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir()]

    def words(self, *options: str, program: tuple[str, ...] = ()) -> list[str]:
        program = program or (str(self.folder / "program.py"), sys.executable)
        return [*LAUNCH, "--python", str(self.python), "--stage-dir", str(self.disk), *options, *program]

    def launch(self, *options: str, status: int = 0, program: tuple[str, ...] = (),
               **env: str) -> tuple[list[dict[str, str]], str]:
        """What each rank printed, by rank, and all output."""
        done = subprocess.run(self.words("-n", "2", "--independent", *options, program=program), text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env})
        assert done.returncode == status, done.stdout
        return self.ranks(done.stdout), done.stdout

    @staticmethod
    def ranks(output: str) -> list[dict[str, str]]:
        found = [json.loads(text) for text in re.findall(r"rank (\{.*?\})", output)]
        return sorted(found, key=lambda rank: rank["rank"])

    def uses_copy(self, ranks: list[dict[str, str]]) -> bool:
        return [Path(rank["heavy"]).is_relative_to(self.root) for rank in ranks] == [True] * 2

    def uses_shared(self, ranks: list[dict[str, str]]) -> bool:
        return [Path(rank["heavy"]).is_relative_to(self.packages) for rank in ranks] == [True] * 2


def make_shared(folder: Path) -> Shared:
    """Make the environment in a folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    made = Shared(folder, folder / "env" / "bin" / "python", folder / "disk")
    made.disk.mkdir()
    for name in ("heavy", "torch"):
        (made.packages / name).mkdir()
        (made.packages / name / "__init__.py").write_text("VERSION = 1\n")
    (made.packages / "link").symlink_to("heavy")
    (folder / "source").mkdir()
    (folder / "source" / "editable.py").write_text("")
    (made.packages / "editable.pth").write_text(f"{folder}/source\nimport os; os.environ['HOOKED'] = 'yes'\n")
    (folder / "program.py").write_text(PROGRAM)
    return made


def assert_one_warning(output: str, reason: str) -> None:
    warnings = [line for line in output.splitlines() if "warning" in line]
    assert len(warnings) == 1 and reason in warnings[0], output
