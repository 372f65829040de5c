"""Where the ranks' secret comes from, and what other users can do about it: nothing."""
from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.programs import ROOT
from utils.launchers import LaunchError, Placement
from utils.launchers.detect import LAUNCHERS
from utils.launchers.launcher import Launcher
from utils.launchers.rank_variables import REQUIRE_SECRET
from utils.startup import agree, secret
from utils.startup.reports import make_report
from utils.startup.secret import FILE, find_secret, forget_secret

HERE, TWO_HOSTS = Placement("srun", 0, 2, 0, 2), Placement("srun", 0, 2, 0, 1)
TORCHRUN = HERE.replace(launcher="torchrun", local_world_size=1)
REPORT = {"DDPKIT_REPORT": "10.0.0.1/4711/ab12"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of secrets, in place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o1777)
    monkeypatch.setattr(secret, "SHARED_FOLDER", tmp_path / "shm")
    return tmp_path / "shm"


@pytest.mark.parametrize(("environ", "placement", "expected"), [
    ({}, TWO_HOSTS, False),
    (REPORT, TWO_HOSTS, False),  # of a launch that this one is only below
    ({**REPORT, "DDPKIT_LAUNCH_RANK": "0/4"}, TWO_HOSTS, False),
    ({**REPORT, "DDPKIT_LAUNCH_RANK": "0/4", "DDPKIT_INDEPENDENT": "1"}, TWO_HOSTS, False),
    ({**REPORT, "DDPKIT_LAUNCH_RANK": "0/2"}, TWO_HOSTS, True),
    (REPORT, TORCHRUN, True)])
def test_launch_py_gives_its_ranks_a_secret(environ: dict[str, str], placement: Placement, expected: bool) -> None:
    assert find_secret(environ, placement, "srun:7:0") == ("ab12" if expected else "")


def test_ranks_of_one_host_share_a_private_file(folder: Path) -> None:
    first = find_secret({}, HERE, "srun:7:0")
    assert len(first) == 64 and find_secret({}, HERE, "srun:7:0") == first != find_secret({}, HERE, "srun:7:1")
    assert len(list(folder.iterdir())) == 2
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    forget_secret("srun:7:0")
    forget_secret("srun:7:1")
    assert not list(folder.iterdir()) and find_secret({}, HERE, "srun:7:0") != first
    assert find_secret({}, HERE, "") == ""


def test_a_link_to_another_file_of_the_user_is_no_secret(folder: Path, tmp_path: Path) -> None:
    """Another user may have made it, and may know what the file holds."""
    find_secret({}, HERE, "srun:7:0")
    name, = os.listdir(folder)
    forget_secret("srun:7:0")
    (private := tmp_path / "private").write_text("known to others")
    private.chmod(0o600)
    os.link(private, folder / name)
    assert find_secret({}, HERE, "srun:7:0") != find_secret({FILE: str(private)}, HERE, "srun:7:0")


def test_ranks_that_start_at_once_share_one_secret(folder: Path) -> None:
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
            "from utils.launchers import Placement; from utils.startup import secret\n"
            "secret.SHARED_FOLDER = Path(sys.argv[2]); print('ready', flush=True); sys.stdin.readline()\n"
            "print(secret.find_secret({}, Placement('srun', 1, 2, 1, 2), 'srun:7:0'))")
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(folder)], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) for _ in range(4)]
    for rank in ranks:
        assert rank.stdout and rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("go\n")
        rank.stdin.flush()
    found = {rank.communicate(timeout=30)[0].strip() for rank in ranks}
    assert len(found) == 1 and len(found.pop()) == 64 and len(list(folder.iterdir())) == 1


def test_a_folder_without_space_gives_no_secret(folder: Path, caplog: pytest.LogCaptureFixture,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "rename", full)
    assert find_secret({}, HERE, "srun:7:0") == "" and not list(folder.iterdir())
    assert f"cannot share a secret in {folder}: No space left" in caplog.text


@pytest.mark.parametrize(("mode", "content", "problem"), [
    (0o600, "s3cret\n", ""), (0o640, "s3cret\n", "its mode 0640"), (0o604, "s3cret\n", "its mode 0604"),
    (0o600, " \n", "it is empty"), (None, "", "No such file"), (0o700, None, "it is of another kind")])
def test_a_file_of_the_user(tmp_path: Path, mode: int | None, content: str | None, problem: str) -> None:
    path = tmp_path / "my secret"
    if content is None:
        path.mkdir()
    elif mode is not None:
        path.write_text(content)
        path.chmod(mode)
    environ = {FILE: str(path), **REPORT, "DDPKIT_LAUNCH_RANK": "0/2"}
    if not problem:
        assert len(find_secret(environ, TWO_HOSTS, "")) == 64
        return
    with pytest.raises(LaunchError, match=f"{FILE}={path} cannot be used: .*{problem}.*umask 077"):
        find_secret(environ, TWO_HOSTS, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_without_the_required_secret_fails_before_it_listens(rank: int) -> None:
    launcher: Launcher = next(one for one in LAUNCHERS if one.name == "env")
    placement = Placement("env", rank, 2, rank, 1)
    environ = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", REQUIRE_SECRET: "1"}
    with pytest.raises(LaunchError, match=f"{REQUIRE_SECRET} is set, and ranks numbered by RANK and WORLD_SIZE share"):
        agree(placement, make_report(placement), launcher=launcher, timeout=5, environ=environ)
