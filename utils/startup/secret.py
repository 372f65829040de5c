"""Find the secret by which the ranks of a launch prove themselves to each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..launch_error import LaunchError
from ..launch_report import VARIABLE, parse_address
from ..launchers.launcher import Placement
from ..launchers.rank_variables import launch_rank
from ..log import get_logger

_log = get_logger(__name__)
FILE = "DDPKIT_SECRET_FILE"  # a file that all ranks can read and no other user
REQUIRED = "DDPKIT_REQUIRE_SECRET"  # "1": ranks without a secret do not start
_LONGEST = 4096  # bytes of a file


def find_secret(environ: Mapping[str, str], placement: Placement, identity: str) -> str:
    """Return the secret that the ranks have without rank 0; "" for none.

    It is that of FILE or launch.py, or a new one that the ranks of one host share in a private
    file. identity: of the launch, "" where it is unknown. Raises LaunchError if FILE is not usable.
    """
    if path := environ.get(FILE):
        return _of_user(path)
    *_, secret = parse_address(environ.get(VARIABLE, ""))
    # The ranks of another launcher below a rank of launch.py need not have all its variables.
    position = launch_rank(environ)
    if secret and (
        position.endswith(f"/{placement.world_size}")
        or (not position and placement.launcher == "torchrun")
    ):
        return secret
    if placement.on_one_host and identity:
        try:
            return _of_this_host(_path(identity))
        except OSError as error:
            if placement.rank == 0:
                _log.warning(
                    "the ranks of this host cannot share a secret in %s: %s. Expected a folder of "
                    "this user, mode 0700. Remove it, or set %s",
                    _folder(),
                    error.strerror or error,
                    FILE,
                )
    return ""


def forget_secret(identity: str) -> None:
    """Remove the file of the ranks of this host, if there is one: all of them have read it."""
    with contextlib.suppress(OSError):
        _path(identity).unlink()


def _of_user(path: str) -> str:
    try:
        return _read(Path(path))
    except OSError as error:
        raise LaunchError(
            f"{FILE}={path} cannot be used: {error.strerror or error}. Expected a file that is "
            "yours, that nobody else can read, and that all ranks can. Make one, for example by "
            "umask 077; head -c 32 /dev/urandom > FILE"
        ) from None


def _folder() -> Path:
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"ddpkit-{os.getuid()}"


def _path(identity: str) -> Path:
    return _folder() / hashlib.sha256(identity.encode()).hexdigest()[:24]


def _of_this_host(path: Path) -> str:
    """Return the secret in a file, which is made by the first rank that needs it."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    _check_private(path.parent.lstat(), stat.S_ISDIR)
    new = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, os.urandom(32))
        os.close(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
    return _read(path)


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check_private(os.fstat(descriptor), stat.S_ISREG)
        content = os.read(descriptor, _LONGEST)
    finally:
        os.close(descriptor)
    if not content.strip():
        raise OSError("it is empty")
    return hashlib.sha256(content).hexdigest()


def _check_private(found: os.stat_result, is_expected: Callable[[int], bool]) -> None:
    """Raise OSError unless it is of this kind, belongs to this user, and is closed to others."""
    if not is_expected(found.st_mode):
        raise OSError("it is of another kind")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"its owner is {found.st_uid} and its mode {stat.S_IMODE(found.st_mode):04o}")
