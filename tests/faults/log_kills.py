"""Kill examples/03_text_lm.py at random moments and start it again: its log has every step exactly once.

python tests/faults/log_kills.py [--kills 50] [--ranks 2] [--steps 400] [--keep FILE]

All ranks get SIGKILL at the same moment, as in kills.py. After every kill, the complete lines of the log have to be the
steps 1, 2, 3, ... At the end of each training, it has to contain all steps, with the losses of a training that nobody
killed. --keep copies the log of the training with the most restarts, for scripts/plot.py. Exit status 0 if all is so.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order in each start
from tests.faults import kills
from utils.metrics.run_log import FILE_NAME, parse_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "03_text_lm.py")
OPTIONS = ["--backend", "gloo", "--text", str(ROOT / "README.md"), "--layers", "1", "--heads", "2", "--width", "32",
           "--context", "32", "--save-every", "7", "--eval-every", "50", "--log-every", "1000",
           "--sample", "0"]


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step in the log. Exits if a step is missing or there twice, or starts do not fit."""
    found: dict[int, float] = {}
    log = folder / FILE_NAME
    for text in log.read_bytes().splitlines(keepends=True) if log.exists() else []:
        line = parse_line(text)
        if line is None:
            continue  # cut off by the kill; the next start drops it
        step = int(str(line["step"]))
        if step != len(found) + ("event" not in line):
            sys.exit(f"{log}: step {step} follows {len(found)} steps:\n{log.read_text()[-3000:]}")
        if "event" not in line:
            found[step] = float(str(line["loss"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of a training, which saves after every seven")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    args = parser.parse_args()
    options = [*OPTIONS, "--steps", str(args.steps)]
    done, most = 0, -1
    with tempfile.TemporaryDirectory(prefix="log-kills-") as name:
        output, whole, killed = Path(name) / "output", Path(name) / "whole", Path(name) / "killed"
        kills.run(args.ranks, SCRIPT, [*options, "--checkpoints", str(whole)], output)
        expected = losses(whole)
        assert list(expected) == list(range(1, args.steps + 1)), output.read_text()
        while done < args.kills:
            shutil.rmtree(killed, ignore_errors=True)
            starts, words = 0, [*options, "--checkpoints", str(killed)]
            while not kills.run(args.ranks, SCRIPT, words, output, kills.killer(killed)):
                starts += 1
                losses(killed)
            done += starts
            found = losses(killed)
            if found != expected:
                wrong = [step for step in expected if found.get(step) != expected[step]]
                sys.exit(f"killed {starts} times: the log differs in steps {wrong[:10]}\n{output.read_text()[-3000:]}")
            print(f"killed {starts} times: {len(found)} steps, each once, with the same losses", flush=True)
            if args.keep and starts > most:
                shutil.copy(killed / FILE_NAME, args.keep)
                most = starts
    print(f"{done} kills, every step exactly once in the log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
