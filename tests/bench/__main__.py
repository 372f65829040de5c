"""Check bench: links between hosts with limited rates (root), causes: python -m tests.bench links|causes."""
from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.shaped import ROOT, shape, start_ranks
from tests.cluster.hosts import Hosts

HERE = Path(__file__).resolve().parent
TRAINING = str(HERE / "training.py")
# What is planted: the name that has to come first, and more options of the training.
PLANTED = {
    "data": ("data wait", []),
    "rank": ("one slow rank", []),
    "batch": ("too small a micro-batch", ["--batch", "2", "--width", "512"]),
}


def check_links(times: int, count: int, seed: int = 0) -> int:
    """Plant one slow link or one slow host among `count` hosts, several times; return how often it was found."""
    choose, right = random.Random(seed), 0
    with Hosts(count) as hosts:
        ranks = start_ranks(hosts, [str(HERE / "rounds.py"), "400000"])
        assert ranks[0].stdout
        for number in range(times):
            a, b = sorted(choose.sample(hosts.hosts, 2))
            if number % 2:
                slow = {(a, other): "50mbit" for other in hosts.hosts if other != a}
                expected = f"FOUND {a} is "
            else:
                slow, expected = {(a, b): "50mbit"}, f"FOUND the link {a} - {b} is "
            shape(hosts, "200mbit", slow)
            found = ask(ranks[0])
            right += found.startswith(expected) and ";" not in found.replace("; both hosts", "")
            print(f"{number + 1}: planted {expected[6:]}slow: {found[6:].strip()}", flush=True)
        for rank in ranks:
            rank.communicate()
    print(f"{right} of {times} found, among {count * (count - 1) // 2} pairs")
    return right


def ask(rank: subprocess.Popen[str]) -> str:
    assert rank.stdin and rank.stdout
    rank.stdin.write("go\n")
    rank.stdin.flush()
    lines = []
    for line in rank.stdout:
        lines.append(line)
        if line.startswith("FOUND"):
            return line
    raise AssertionError("".join(lines))


def check_causes(names: list[str]) -> int:
    right = 0
    for plant in names:
        name, options = PLANTED[plant]
        words = ["bench", "ddp", "-n", "2", "--full-only", "--steps", "6", TRAINING, "--plant", plant, *options]
        done = subprocess.run([sys.executable, str(ROOT / "utils"), *words], capture_output=True, text=True)
        first = re.search(r"^1\. (.*?), up to", done.stdout, re.MULTILINE)
        right += bool(first) and first[1] == name
        print(f"--- planted: {plant} ({name})\n{done.stdout}{done.stderr}", flush=True)
    print(f"{right} of {len(names)} planted causes named first")
    return right


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    if what == "links":
        sys.exit(check_links(20, 8) < 20)
    planted = more or list(PLANTED)
    sys.exit(check_causes(planted) < len(planted))
