"""What ranks and a launch that can start again tell each other.

The launch sets VARIABLE, from the first start on. Rank 0 reports each checkpoint that is safe, so
that the launch sees whether the training makes progress from one failure to the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from . import launch_report

VARIABLE = "DDPKIT_RESTART"  # JSON, see RestartNotice


class RestartNotice(NamedTuple):
    """Why the ranks were started again.

    number: of restarts so far; 0 in the first start. cause: what failed. without: hosts that are
    left out. failed_at: when the launch noticed the failure, in seconds since 1970.
    """

    number: int = 0
    cause: str = ""
    without: tuple[str, ...] = ()
    failed_at: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the ranks."""
        return {VARIABLE: json.dumps(self._asdict())}


def read(environ: Mapping[str, str] = os.environ) -> RestartNotice | None:
    """Return what the launch says; None where it cannot start again, or there is none."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        fields = json.loads(text)
        return RestartNotice(
            int(fields["number"]),
            str(fields["cause"]),
            tuple(map(str, fields["without"])),
            float(fields["failed_at"]),
        )
    except (ValueError, KeyError, TypeError):  # not of a launch of this version
        return None


def report_checkpoint(step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Report to the launch that the checkpoint of a step is safe, where it asks for that."""
    if environ.get(VARIABLE):
        launch_report.send("checkpoint", environ, launch_report.Failure(str(step), ""))
