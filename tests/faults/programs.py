"""What the tests of this folder start: a training that survives, and programs on forked ranks."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SURVIVE = [str(ROOT / "tests" / "faults" / "survive.py"), "--epochs", "2", "--save-every", "5"]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--launcher", "local", "--ntasks-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_ranks(folder: Path, program: str, *runs: tuple[int, list[str]]) -> str:
    """Run a program on so many forked ranks with these arguments, for each of `runs`; return the output of all.

    One process imports torch for all of them, which takes longer than most of these programs. A rank ends with 0, or
    with 75 after a stop.
    """
    code = ("import json, sys; from pathlib import Path; from tests.faults import kills\n"
            "for ranks, arguments in json.loads(sys.argv[3]):\n"
            "    kills.run(ranks, sys.argv[1], arguments, Path(sys.argv[2]), expected=(0, 75))")
    output = folder / "output"
    ended = subprocess.run([sys.executable, "-c", code, program, output, json.dumps(runs)], cwd=ROOT, env=ENVIRONMENT,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout
    return output.read_text()


def done_line(output: str) -> str:
    """The last line of a training, with a digest of its state."""
    lines = [line for line in output.splitlines() if line.startswith("done")]
    assert len(lines) == 1, output
    return lines[0]
