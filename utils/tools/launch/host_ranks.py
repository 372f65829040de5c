"""Start the processes of one host and connect their output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from ...launch_error import LaunchError
from .child_processes import Processes
from .launch_result import print_status
from .rank_cores import RankShare, divides_cores, report_mask, shares_of_ranks
from .rank_output import Outputs, open_file


def start_on_host(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    environ: Mapping[str, str],
    processes: Processes,
    outputs: Outputs | None,
    *,
    output_dir: str = "",
    stdin: bytes | int = b"",
) -> None:
    """Start ranks or a torchrun agent on this host.

    commands: words and variables of each. outputs: gets what they write; None where they share our
    streams. output_dir: where each rank writes a file instead. stdin: of the first one.
    """
    shares = _shares(commands, environ)
    for index, (words, variables) in enumerate(commands):
        target: int | None = None if outputs is None else subprocess.PIPE
        if output_dir:
            target = open_file(output_dir, variables["RANK"])
        child = processes.start(
            words,
            {**environ, **variables, **shares[index].variables},
            stdout=target,
            stderr=target,
            stdin=b"" if index else stdin,
            cpus=shares[index].cpus,
        )
        if output_dir and target is not None:
            os.close(target)
        if child is not None and outputs is not None:
            outputs.add(child, index)


def _shares(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], environ: Mapping[str, str]
) -> list[RankShare]:
    """Return what each rank gets of the cores; nothing where setup_distributed() divides them."""
    unbound = [RankShare() for _ in commands]
    words, variables = commands[0]
    if "LOCAL_RANK" not in variables or divides_cores(words):  # not for torchrun's agent
        return unbound
    reports = [report_mask({**environ, **variables}) for _, variables in commands]
    try:
        return shares_of_ranks(reports, {**environ, **variables})
    except LaunchError as error:
        print_status(f"the ranks are not bound to cores: {error}")
        return unbound
