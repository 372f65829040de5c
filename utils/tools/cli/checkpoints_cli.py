"""List, verify and export the checkpoints of a training, without changing their folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint import CheckpointError, export_safetensors
from ...checkpoint.disk import explain
from ...checkpoint.folder import checkpoint_names, read_manifest
from ...checkpoint.format import Damaged, Unreadable
from ...checkpoint.rank_file import check_file
from ...log import print_result
from .arguments import ArgumentParser
from .missing_files import no_such_file

DESCRIPTION = """\
List, verify and export the checkpoints of a training. Nothing in their folder changes.

ddpkit checkpoints list checkpoints                             steps, ranks, sizes and metrics
ddpkit checkpoints verify checkpoints                           read all bytes, compare checksums
ddpkit checkpoints export checkpoints model.safetensors         one part of the newest, whole

Exit status: 0; 1 for a damaged checkpoint, or none; 2 for a command line that is wrong.
"""


def main(words: Sequence[str]) -> int:
    """Run a subcommand; return its exit status."""
    parser = ArgumentParser(
        prog="ddpkit checkpoints",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("list", "verify", "export"))
    parser.add_argument("folder", type=Path, help="of the Checkpointer")
    parser.add_argument("file", type=Path, nargs="?", help="export: the file to write")
    parser.add_argument("--step", type=int, help="default: all; export: the newest")
    parser.add_argument("--part", default="model", help='export: key of the state ("model")')
    parser.add_argument("--json", action="store_true", help="list, verify: a line of JSON for each")
    args = parser.parse_args(words)
    if (args.action == "export") != (args.file is not None):
        parser.error("export needs a file, and the others have none")
    try:
        if args.action == "export":
            step = export_safetensors(args.folder, args.file, part=args.part, step=args.step)
            print_result(f"{args.file}: {args.part} of step {step}")
            return 0
        return _report(args.folder, args.step, args.action == "verify", args.json)
    except CheckpointError as error:
        problem = str(error)
    except FileNotFoundError as error:
        if args.folder.is_dir():
            problem = f"{error.filename}: {explain(error)}"
        else:
            wanted = "Expected the folder of a Checkpointer"
            print(
                f"ddpkit checkpoints: error: {no_such_file(str(args.folder), wanted)}",
                file=sys.stderr,
            )
            return 2
    except OSError as error:
        problem = f"{args.folder}: {explain(error)}"
    print(f"ddpkit checkpoints: error: {problem}", file=sys.stderr)
    return 1


def _report(folder: Path, step: int | None, verify: bool, as_json: bool) -> int:
    names = checkpoint_names(folder)
    checkpoints = [_describe(folder / name, verify) for name in names]
    if step is not None:
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.get("step") == step]
    if not checkpoints:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(
            f"there is no {wanted} in {str(folder)!r}. Expected the folder of a training"
        )
    for checkpoint in checkpoints:
        problem = checkpoint.get("problem")
        megabytes = checkpoint.get("bytes", 0) / 1e6
        text = f"{checkpoint['name']}  {checkpoint.get('ranks', '?')} ranks  {megabytes:.1f} MB"
        metric = checkpoint.get("metric")
        text += f"  metric {metric:g}" if metric is not None else ""
        text += f"  {problem}" if problem else "  intact" if verify else ""
        print_result(json.dumps(checkpoint) if as_json else text)
    return int(any("problem" in checkpoint for checkpoint in checkpoints))


def _describe(path: Path, verify: bool) -> dict[str, Any]:
    description: dict[str, Any] = {"name": path.name}
    try:
        manifest = read_manifest(path)
        description |= {
            "step": manifest["step"],
            "ranks": manifest["world_size"],
            "bytes": sum(entry["size"] for entry in manifest["files"]),
            "metric": manifest["metric"],
        }
        for entry in manifest["files"] if verify else ():
            check_file(path, entry)
    except (Damaged, Unreadable) as error:
        description["problem"] = (
            f"{'damaged' if isinstance(error, Damaged) else 'unreadable'}: {error}"
        )
    return description
