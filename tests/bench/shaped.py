"""Ranks on hosts whose links have a given rate."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = "29533"


def shape(hosts: Hosts, rate: str, slow: dict[tuple[str, str], str] | None = None) -> None:
    """Limit what each host sends to `rate`, and between the pairs in `slow` to theirs. "" removes the limits."""
    for host in hosts.hosts:
        run = hosts.enter(host)
        subprocess.run([*run, "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
        if not rate:
            continue
        commands = ["qdisc add dev eth0 root handle 1: htb default 10",
                    f"class add dev eth0 parent 1: classid 1:10 htb rate {rate} burst 512k"]
        for i, (pair, slower) in enumerate((slow or {}).items()):
            if host in pair:
                other = hosts.address[pair[pair[0] == host]]
                commands += [f"class add dev eth0 parent 1: classid 1:{20 + i} htb rate {slower} burst 64k",
                             f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {other}/32 flowid 1:{20 + i}"]
        for command in commands:
            subprocess.run([*run, "tc", *command.split()], check=True, capture_output=True)


def start_ranks(hosts: Hosts, words: Sequence[str], *, threads: int = 1) -> list[subprocess.Popen[str]]:
    """Start one rank on each host, each on one core."""
    started = []
    for rank, host in enumerate(hosts.hosts):
        env = {"RANK": rank, "WORLD_SIZE": len(hosts.hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
               "MASTER_ADDR": hosts.address[hosts.hosts[0]], "MASTER_PORT": PORT, "OMP_NUM_THREADS": threads}
        started.append(hosts.popen(
            host, ["taskset", "-c", str(rank % 2), sys.executable, *words], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={name: str(value) for name, value in env.items()}))
    return started
