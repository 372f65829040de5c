"""Print which launcher started this process, why, and which variables decided or were ignored."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ..errors import LaunchError
from ..log import print_result
from .detect import LAUNCHERS, find_launcher
from .launcher import shown

_UNKNOWN = "not reported by the launcher; the start-up exchange determines it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain the launcher of this process; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    names = ", ".join(dict.fromkeys(launcher.name for launcher in LAUNCHERS))
    parser.add_argument("launcher", nargs="?", help=f"use this one; skip detection: {names}")
    parser.add_argument("--json", action="store_true", help="print the placement as JSON")
    args = parser.parse_args(arguments)
    try:
        found = find_launcher(launcher=args.launcher)
    except (LaunchError, ValueError) as error:
        print(f"the rank is unknown: {error}", file=sys.stderr)
        return 1

    placement, used = found.placement, found.launcher.variables
    places = ("rank", "world_size", "local_rank", "local_world_size")
    if args.json:
        values = {name: getattr(placement, name) for name in ("launcher", *places, "notes")}
        print_result(json.dumps({**values, "reason": found.reason}))
        return 0
    lines = [f"launcher          {placement.launcher}: {found.reason}"]
    for name in places:
        value = getattr(placement, name)
        lines.append(f"{name:<17} {_UNKNOWN if value is None else value}")

    others = dict.fromkeys(
        name for launcher in LAUNCHERS for name in launcher.variables if name not in used
    )
    lines.append(f"decided by        {shown(os.environ, used) or 'no variable'}")
    lines.append(f"ignored           {shown(os.environ, others) or 'nothing'}")
    lines += [f"note              {note}" for note in placement.notes]
    print_result("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
