"""Find the secret by which the ranks of a launch prove themselves to each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import LaunchError
from ..launch_protocol import REPORT, parse_address
from ..launchers.launcher import Placement
from ..launchers.rank_variables import launch_rank
from ..log import get_logger

_log = get_logger(__name__)
FILE = "DDPKIT_SECRET_FILE"  # names a file that all ranks can read, and no other user
SHARED_FOLDER = Path("/dev/shm")  # writable by all users; without it, the folder of temporary files
_LONGEST = 4096  # bytes read from a file
_TICK_NS = 12_000_000  # longer than a tick of file systems' clocks, at most 10 ms (100 Hz)
_PAUSE_SECONDS = 0.002
_LONGEST_WAIT_SECONDS = 1.0


def find_secret(environ: Mapping[str, str], placement: Placement, identity: str) -> str:
    """Return the secret that the ranks share without rank 0; "" if there is none.

    It comes from FILE or ddpkit launch, or the ranks of one host create one in a private file.
    identity: text that only this launch has; "" if unknown. Raises LaunchError if FILE is unusable.
    """
    if path := environ.get(FILE):
        return _of_user(path)
    *_, secret = parse_address(environ.get(REPORT, ""))
    # Below a rank of ddpkit launch, another launcher's ranks may lack some of its variables.
    position = launch_rank(environ)
    if secret and (
        position.endswith(f"/{placement.world_size}")
        or (not position and placement.launcher == "torchrun")
    ):
        return secret
    if placement.on_one_host and identity:
        try:
            return _of_this_host(_prefix(identity))
        except OSError as error:
            if placement.rank == 0:
                _log.warning(
                    "the ranks of this host cannot share a secret in %s: %s. Expected a folder in "
                    "which this user can make files. Make space, or set %s",
                    _shared_folder(),
                    error.strerror or error,
                    FILE,
                )
    return ""


def forget_secret(identity: str) -> None:
    """Remove this host's secret files, if there are any. All ranks have read them."""
    with contextlib.suppress(OSError):
        for _, path in _own_files(_prefix(identity)):
            path.unlink()


def _of_user(path: str) -> str:
    try:
        return _read(Path(path))
    except OSError as error:
        raise LaunchError(
            f"{FILE}={path} cannot be used: {error.strerror or error}. Expected a file that is "
            "yours, that nobody else can read, and that all ranks can. Make one, for example by "
            "umask 077; head -c 32 /dev/urandom > FILE"
        ) from None


def _shared_folder() -> Path:
    return SHARED_FOLDER if SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())


def _prefix(identity: str) -> str:
    return f"ddpkit-{os.getuid()}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}-"


def _of_this_host(prefix: str) -> str:
    """Return the secret in the file that a rank of this launch renamed first.

    All users may write into the folder, so another user may already own any name that can be
    predicted. Each rank that finds no file makes one with a random name, and other users' files
    are ignored. A rename sets the time of change, and no folder is read meanwhile. Therefore a
    file that is older than one tick of that clock when it is read remains the first one.
    """
    made: Path | None = None
    limit = time.monotonic() + _LONGEST_WAIT_SECONDS
    while True:
        files = sorted(_own_files(prefix))
        if files and (
            time.time_ns() - files[0][0] > _TICK_NS or time.monotonic() > limit  # the clock was set
        ):
            break
        if not files:
            made = _make(prefix)
        time.sleep(_PAUSE_SECONDS)
    first = files[0][1]
    if made is not None and made != first:
        with contextlib.suppress(OSError):
            made.unlink()
    return _read(first)


def _own_files(prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield the files of this user and launch: when each got its name, and its path."""
    with os.scandir(_shared_folder()) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                _check_private(found, stat.S_ISREG)
                if found.st_nlink == 1:  # not a hard link that another user has made
                    yield found.st_ctime_ns, Path(entry.path)


def _make(prefix: str) -> Path:
    path = _shared_folder() / f"{prefix}{os.urandom(12).hex()}"
    new = path.with_name(f"ddpkit-{os.getuid()}.{os.urandom(12).hex()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(os.urandom(32))
        os.rename(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return path


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
    """Raise OSError unless a file has the expected type, belongs to this user, and is private."""
    if not is_expected(found.st_mode):
        raise OSError("it is of another kind")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"its owner is {found.st_uid} and its mode {stat.S_IMODE(found.st_mode):04o}")
