"""Where the ranks' secret comes from, and what other users can do about it: nothing."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.launchers import LaunchError, Placement
from utils.launchers.detect import LAUNCHERS
from utils.launchers.launcher import Launcher
from utils.startup import agree, secret
from utils.startup.reports import make_report
from utils.startup.secret import FILE, REQUIRED, find_secret, forget_secret

HERE, TWO_HOSTS = Placement("srun", 0, 2, 0, 2), Placement("srun", 0, 2, 0, 1)
TORCHRUN = HERE.replace(launcher="torchrun", local_world_size=1)
REPORT = {"DDPKIT_REPORT": "10.0.0.1/4711/ab12"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's secrets, in place of that in /dev/shm."""
    monkeypatch.setattr(secret, "_folder", lambda: tmp_path / "ddpkit-1000")
    return tmp_path / "ddpkit-1000"


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
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    forget_secret("srun:7:0")
    forget_secret("srun:7:1")
    assert not list(folder.iterdir()) and find_secret({}, HERE, "srun:7:0") != first
    assert find_secret({}, HERE, "") == ""


@pytest.mark.parametrize("prepare", [
    lambda folder: folder.mkdir(mode=0o755), lambda folder: folder.symlink_to("/tmp"), Path.touch,
    lambda folder: os.chown(folder.mkdir() or folder, 12345, -1) if os.getuid() == 0 else folder.mkdir(mode=0o770)])
def test_a_folder_that_another_user_has_made_is_not_used(
        folder: Path, prepare: object, caplog: pytest.LogCaptureFixture) -> None:
    previous = os.umask(0)
    prepare(folder)  # type: ignore[operator]
    os.umask(previous)
    before = list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    assert find_secret({}, HERE, "srun:7:0") == "" and not before
    assert f"cannot share a secret in {folder}: " in caplog.text and HERE.rank == 0


def test_a_file_in_place_of_the_secret_is_not_followed(folder: Path, tmp_path: Path) -> None:
    find_secret({}, HERE, "srun:7:0")
    [path] = folder.iterdir()
    path.unlink()
    (tmp_path / "known").write_text("known to another user")
    path.symlink_to(tmp_path / "known")
    assert find_secret({}, HERE, "srun:7:0") == ""


@pytest.mark.parametrize(("mode", "content", "problem"), [
    (0o600, "s3cret\n", ""), (0o640, "s3cret\n", "its mode 0640"), (0o600, " \n", "it is empty"),
    (None, "", "No such file"), (0o700, None, "it is of another kind")])
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
    environ = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", REQUIRED: "1"}
    with pytest.raises(LaunchError, match=f"{REQUIRED} is set, and ranks numbered by RANK and WORLD_SIZE share no"):
        agree(placement, make_report(placement), launcher=launcher, timeout=5, environ=environ)
