"""Use mpi4py as a name service, if it is installed: rank 0 broadcasts its address.

It is the last resort, because MPI_Init may take seconds and waits for all ranks.
"""

from __future__ import annotations

import faulthandler
import sys
from types import ModuleType

from ..errors import LaunchError
from .launcher import Launcher, NameService, NameServiceUnavailable, Placement


class MpiBroadcast(NameService):
    """A single broadcast from rank 0, in which every rank takes part.

    timeout: seconds until the process ends with a traceback if MPI_Init does not return; None: no
    limit. Raises the errors of import_mpi().
    """

    def __init__(
        self, launcher: Launcher, placement: Placement, timeout: float | None = None
    ) -> None:
        self._mpi = import_mpi(launcher, placement, timeout)
        self._received: str | None = None

    def publish(self, text: str, timeout: float) -> None:
        self._mpi.COMM_WORLD.bcast(text, root=0)

    def look_up(self, timeout: float) -> str | None:
        self._received = self._received or str(self._mpi.COMM_WORLD.bcast(None, root=0))
        return self._received


def is_running() -> bool:
    """Whether MPI_Init was called through mpi4py, which is not imported here."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not bool(mpi.Is_finalized())


def import_mpi(launcher: Launcher, placement: Placement, timeout: float | None) -> ModuleType:
    """Return mpi4py's MPI module, initialised.

    An MPI library of another family would start every rank as rank 0 of 1, or abort the process,
    so the library is checked first.

    Raises NameServiceUnavailable if mpi4py is missing or its library does not belong to the
    launcher, LaunchError if MPI numbers the ranks differently.
    """
    was_running = is_running()
    mpi = _import(was_running)
    version = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    if not version.startswith(launcher.mpi_libraries):
        raise NameServiceUnavailable(
            f"mpi4py uses the library {version!r}, which does not belong to {launcher.name}, the "
            "launcher of this process. Install mpi4py with that MPI, or use the other mpiexec",
            affects_mpi=True,
        )

    if not was_running:
        _initialise(mpi, timeout)
    size, rank = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    if (rank, size) == (placement.rank, placement.world_size):
        return mpi
    if was_running:  # the launcher's own name service may still work
        raise NameServiceUnavailable(
            f"mpi4py reports rank {rank} of {size}, which is not this launch's", affects_mpi=True
        )
    raise LaunchError(
        f"MPI reports rank {rank} of {size}, but {launcher.name} started this process as rank "
        f"{placement.rank} of {placement.world_size}: mpi4py's library ({version}) does not belong "
        "to this mpiexec. Install mpi4py with the MPI that starts the job"
    )


def _import(is_initialised: bool) -> ModuleType:
    try:
        import mpi4py  # type: ignore[import-not-found,unused-ignore]

        if not is_initialised:
            mpi4py.rc.initialize = False  # check the library before MPI_Init
            mpi4py.rc.finalize = True  # at exit: mpirun ends the job if a rank does not finalize
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:
        raise NameServiceUnavailable(
            f"mpi4py cannot be imported: {error}", affects_mpi=True
        ) from None
    return MPI  # type: ignore[no-any-return]


def _initialise(mpi: ModuleType, timeout: float | None) -> None:
    """Call MPI_Init. It holds Python's lock, so only faulthandler's thread can end it."""
    if timeout is not None:
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        mpi.Init()
    finally:
        if timeout is not None:
            faulthandler.cancel_dump_traceback_later()
