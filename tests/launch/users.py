"""Two users of one machine: the victim is the one that runs the tests, root; the attacker is not."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.launch.launchers import ROOT

VICTIM, ATTACKER, GROUP = os.getuid(), 61234, 61236  # GROUP: of the attacker, too
KIT = [sys.executable, str(ROOT / "utils")]


class Machine:
    """A folder that all may write into, as /tmp is, with a home folder of the victim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = self.make("home", VICTIM, 0o700)

    def make(self, name: str, user: int, mode: int = 0o755, *, group: int | None = None) -> Path:
        """Make a folder that a user owns."""
        path = self.folder / name
        path.mkdir()
        os.chown(path, user, user if group is None else group)
        path.chmod(mode)
        return path

    def write(self, path: Path, text: str, user: int, mode: int = 0o644) -> Path:
        """Write a file that a user owns."""
        path.write_text(text)
        os.chown(path, user, user)
        path.chmod(mode)
        return path

    def kit(self, *words: str, cwd: Path | None = None, umask: int = 0o022,
            **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the kit as the victim."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home), **variables}
        return subprocess.run([*KIT, *words], text=True, cwd=cwd or self.folder, env=environ, capture_output=True,
                              timeout=90, umask=umask)

    def attack(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as the attacker; it need not succeed."""
        return subprocess.run(words, user=ATTACKER, group=ATTACKER, extra_groups=[GROUP], text=True, cwd=self.folder,
                              env={"PATH": os.environ["PATH"]}, capture_output=True, timeout=60)


@pytest.fixture
def machine() -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="two users "))
    folder.chmod(0o1777)
    try:
        yield Machine(folder)
    finally:
        shutil.rmtree(folder)
