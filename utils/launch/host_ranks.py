"""Start the processes of one host and connect their output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from .output import Outputs, open_file
from .processes import Processes


def start_on_host(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    environ: Mapping[str, str],
    processes: Processes,
    outputs: Outputs | None,
    *,
    output_dir: str = "",
    new_session: bool = False,
) -> None:
    """Start ranks or a torchrun agent on this host.

    commands: words and variables of each. outputs: gets what they write; None where they share our
    streams. output_dir: where each rank writes a file instead. new_session: see Processes.start().
    """
    for index, (words, variables) in enumerate(commands):
        target: int | None = None if outputs is None else subprocess.PIPE
        if output_dir:
            target = open_file(output_dir, variables["RANK"])
        child = processes.start(
            words,
            {**environ, **variables},
            stdout=target,
            stderr=target,
            new_session=new_session,
            hold_signals=True,
        )
        if output_dir and target is not None:
            os.close(target)
        if child is not None and outputs is not None:
            outputs.add(child, index)
