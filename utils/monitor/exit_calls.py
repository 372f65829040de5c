"""Remember who calls sys.exit(): nothing else shows how a program without a with statement ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from ..launch_protocol import may_have
from .counts import entered_collectives


class ExitCall(NamedTuple):
    """A call of sys.exit() in the main thread.

    place: the line of the script, "train.py, line 12, in main". handled: the exception that an
    `except` block handles when it calls; Hydra and click print it, and then call sys.exit(1).
    """

    status: Any
    place: str
    handled: BaseException | None
    entered: int | None  # number of collectives entered before the call


_last: ExitCall | None = None
_previous: Callable[..., Any] | None = None  # the original sys.exit(), or another wrapper


def record() -> None:
    """Wrap sys.exit() until stop(); a second call does nothing."""
    global _previous
    if _previous is None and may_have("excepthook"):
        _previous, sys.exit = sys.exit, _exit


def stop() -> None:
    """Restore sys.exit(), unless something else has wrapped it since."""
    global _previous, _last
    if _previous is not None and sys.exit is _exit:
        sys.exit, _previous, _last = _previous, None, None


def last_exit() -> ExitCall | None:
    """Return the call that ends this program; None where it was caught and the training went on."""
    if _last is not None and _last.entered == entered_collectives():
        return _last
    return None


def _exit(status: Any = None, /) -> Any:
    global _last
    if threading.current_thread() is threading.main_thread():
        from .hangs.positions import user_frame  # imported only when a program exits

        place = user_frame(_frames(sys._getframe(1)))
        _last = ExitCall(status, place, sys.exc_info()[1], entered_collectives())
    (_previous or _raise)(status)


def _raise(status: Any) -> None:
    raise SystemExit(status)


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
