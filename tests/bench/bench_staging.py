#!/usr/bin/env python3
"""Measure --stage: the start of ranks where each open takes a while, or (--hosts) the way of the archive to the nodes.

python tests/bench/bench_staging.py                    two ranks, 2 ms for each open of a shared package
python tests/bench/bench_staging.py --delay 0          what --stage costs where the packages are local
python tests/bench/bench_staging.py --ranks 8 --pairs 5
python tests/bench/bench_staging.py --hosts 16                  500 MB, links of 1 Gbit/s: MPICH, Open MPI, Intel MPI
python tests/bench/bench_staging.py --hosts 16 --by sbcast      a real Slurm; DDPKIT_SLURM_HOME: which one

A library that g++ compiles delays open() of files below the packages of this Python; those that the dynamic linker
opens are not delayed. A pair is a launch without and one with --stage, whose copy is kept from a launch before. Each
rank imports torch and takes part in one all-reduce. Exit status: 0 whatever the figures are; 1 when a launch failed.

With --hosts, as root: network namespaces, each with a link of --rate and a disk of its own in memory. All of them share
the cores of this machine: with many hosts at a high rate these are the limit, not the links.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.shaped import shape
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import HEAD, SlurmCluster
from tests.conftest import find_or_skip
from tests.launch.launchers import LAUNCH, MPIS, Lab

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = """\
columns, in seconds, medians over the pairs:
  shared   from the start of ddpkit launch to its end, with the packages where they are
  staged   the same with --stage and a kept copy; packing, copying: of the first launch with --stage
  ratio    staged / shared of one pair; the median over the pairs. The bar is 0.3 at 2 ms and 8 ranks, 1.03 at 0 ms
  cpu      the same for the seconds of CPU of the launch and all its ranks, which other programs on the host change less
"""
HOST_COLUMNS = """\
columns of --hosts, in seconds:
  link     the archive over one link, by a plain TCP connection from the first host to the second
  sent     to all hosts, from the start of mpiexec or sbcast to its end
  unpacked on one host, while the others do nothing; with the check that Python starts from there
  ratio    (sent + unpacked) / (link + unpacked). The bar is 1.5
"""
DELAY = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(const char *path) {
    const char *prefix = getenv("SLOW_PREFIX");
    if (prefix && path && !strncmp(path, prefix, strlen(prefix))) usleep(atoi(getenv("SLOW_MICROSECONDS")));
}
#define OPEN(name) extern "C" int name(const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); wait_for(path); \
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(name) extern "C" int name(int folder, const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); wait_for(path); \
    return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(folder, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
"""
PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS + HOST_COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of each launch (default 2)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="pairs of launches (default 3)")
    parser.add_argument("--delay", type=float, default=2.0, metavar="MS", help="of each open (default 2 ms)")
    parser.add_argument("--hosts", type=int, metavar="N", help="measure how the archive gets to N hosts")
    parser.add_argument("--by", nargs="+", choices=[*MPIS, "sbcast"], default=["mpich5", "openmpi5", "intel"],
                        help="what sends it")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it (default 1gbit)")
    parser.add_argument("--megabytes", type=int, default=500, metavar="N", help="of the archive (default 500)")
    args = parser.parse_args(arguments)
    if args.hosts:
        return measure_hosts(args.hosts, args.by, args.rate, args.megabytes)
    with tempfile.TemporaryDirectory(prefix="staging-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "disk").mkdir()
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if args.delay:
            (folder / "delay.cc").write_text(DELAY)
            library = str(folder / "delay.so")
            subprocess.run(["g++", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", "-O1", "-shared", "-fPIC", "-o", library,
                            str(folder / "delay.cc"), "-ldl"], check=True)
            environ |= {"LD_PRELOAD": library, "SLOW_PREFIX": sysconfig.get_path("purelib"),
                        "SLOW_MICROSECONDS": str(int(1000 * args.delay))}
        stage = ["--stage", "--stage-dir", str(folder / "disk")]
        print(f"{args.ranks} ranks, {args.delay:g} ms for each open of a shared package")
        try:
            first = seconds(args.ranks, stage, folder, environ)
            pairs = []
            for number in range(args.pairs):
                sides: list[list[str]] = [[], stage] if number % 2 else [stage, []]
                times = [seconds(args.ranks, side, folder, environ) for side in sides]
                pairs.append(times if number % 2 else times[::-1])
        except subprocess.CalledProcessError as error:
            print(error.stdout, file=sys.stderr)
            return 1
    print(f"packing, copying {first[0]:8.2f}\n{'':18}{'shared':>8}{'staged':>8}{'ratio':>8}")
    for name, column in (("start to end", 0), ("cpu", 1)):
        values = [(without[column], with_copy[column]) for without, with_copy in pairs]
        shared, staged = (statistics.median(side) for side in zip(*values, strict=True))
        ratio = statistics.median(with_copy / without for without, with_copy in values)
        print(f"{name:18}{shared:8.2f}{staged:8.2f}{ratio:8.3f}")
    print("load average: " + " ".join(f"{load:.1f}" for load in os.getloadavg()))
    return 0


def seconds(ranks: int, options: Sequence[str], folder: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of a launch, and of its CPU; CalledProcessError where it fails or stages nothing."""
    words = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", str(ranks), *options]
    start, cpu = time.perf_counter(), cpu_of_children()
    done = subprocess.run([*words, str(folder / "program.py")], env=environ, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    taken = time.perf_counter() - start
    if done.returncode or "warning" in done.stdout:
        raise subprocess.CalledProcessError(done.returncode or 1, words, done.stdout)
    return taken, cpu_of_children() - cpu


def cpu_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system


# The way of the archive ----------------------------------------------------------------------------------------------

RECEIVE = """\
import socket, sys, time
with socket.create_server((sys.argv[1], 29534)) as server, open(sys.argv[2], "wb") as file:
    print("listens", flush=True)
    link, buffer = server.accept()[0], bytearray(1 << 20)
    start = time.perf_counter()
    while count := link.recv_into(buffer):
        file.write(memoryview(buffer)[:count])
print(time.perf_counter() - start)
"""
SEND = """\
import socket, sys
with socket.create_connection((sys.argv[1], 29534)) as link, open(sys.argv[2], "rb") as file:
    link.sendfile(file)
"""
STAGE = """\
import json, os, sys
sys.path.insert(0, {root!r})
from utils.tools.staging import distribute
starter = distribute.stage({python!r}, {hosts!r}, {hosts!r}[0], os.environ, spares=0, one_per_host={words!r},
                           stage_dir={disk!r}, also=[], note=lambda text: print(text, flush=True))
print("starter " + json.dumps(starter))
"""


def measure_hosts(count: int, by: Sequence[str], rate: str, megabytes: int) -> int:
    """Print the seconds in which the archive gets to all hosts, by each of the launchers or sbcast."""
    print(f"{count} hosts, {megabytes} MB, links of {rate}, {os.cpu_count()} cores for all of them")
    print(f"{'':10}{'link':>8}{'sent':>8}{'unpacked':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory(prefix="staging-") as name:
        folder = Path(name)
        python, disk = make_environment(folder, megabytes), folder / "disk"
        for title in by:
            with (SlurmCluster(count) if title == "sbcast" else Hosts(count)) as hosts:
                nodes = [host for host in hosts.hosts if host != HEAD]
                for host in nodes:
                    subprocess.run([*hosts.enter(host), "mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True)
                shape(hosts, rate)
                words = [*LAUNCH, "--launcher", "mpiexec", "--ntasks-per-node", "1", "--independent", "--no-stage"]
                code = STAGE.format(root=str(ROOT), python=str(python), hosts=nodes, words=words, disk=str(disk))
                (folder / "stage.py").write_text(code)
                # The first call packs the archive; it is for one host.
                (folder / "pack.py").write_text(code.replace(repr(nodes), repr(nodes[:1])))
                packed = subprocess.run([sys.executable, str(folder / "pack.py")], capture_output=True, text=True)
                archive = next((folder / "env" / ".ddpkit-stage").glob("*.tar"))
                link = seconds_of_link(hosts, nodes, archive, disk)
                if isinstance(hosts, SlurmCluster):
                    output = hosts.batch(f"-N{count} -n{count}", f"{sys.executable} {folder}/stage.py").output
                else:
                    output = run_by_mpi(hosts, nodes, title, folder)
                sent = re.search(r"has sent the archive to \d+ nodes, ([\d.]+) s\n", output)
                if sent is None:
                    print(packed.stdout, output, file=sys.stderr)
                    return 1
                unpacked = seconds_to_unpack(hosts, nodes[-1], json.loads(output.partition("starter ")[2]))
                ratio = (float(sent[1]) + unpacked) / (link + unpacked)
                print(f"{title:10}{link:8.1f}{float(sent[1]):8.1f}{unpacked:10.1f}{ratio:8.2f}", flush=True)
    print("load average: " + " ".join(f"{load:.1f}" for load in os.getloadavg()))
    return 0


def make_environment(folder: Path, megabytes: int) -> Path:
    """Make an environment whose packages are 20 files for each two megabytes; return its Python."""
    (folder / "disk").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    packages = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    for number in range(10 * megabytes):
        file = packages / f"package{number // 100}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.urandom(1000) * 100)
    return folder / "env" / "bin" / "python"


def seconds_of_link(hosts: Hosts, nodes: Sequence[str], archive: Path, disk: Path) -> float:
    target, address = str(disk / "received"), hosts.address[nodes[1]]
    receiver = hosts.popen(nodes[1], [sys.executable, "-c", RECEIVE, address, target], stdout=subprocess.PIPE)
    assert receiver.stdout is not None and receiver.stdout.readline() == "listens\n"
    subprocess.run([*hosts.enter(nodes[0]), sys.executable, "-c", SEND, address, str(archive)], check=True)
    seconds = float(receiver.communicate()[0])
    subprocess.run([*hosts.enter(nodes[1]), "rm", target], check=True)
    return seconds


def run_by_mpi(hosts: Hosts, nodes: Sequence[str], title: str, folder: Path) -> str:
    """Stage as in a job of PBS whose hosts are reached by ssh; return the output."""
    lab = Lab(hosts, hosts.start_sshd(), find_or_skip)
    (folder / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    env = {"PATH": f"{find_or_skip(MPIS[title][0]).parent}:{lab.ssh.parent}:/usr/bin:/bin", "PBS_JOBID": "1.bench",
           "PBS_NODEFILE": str(folder / "nodes"), **lab.mpi4py(title),
           "UCX_TLS": "tcp,self"}  # MPICH would use the memory that the hosts share
    return lab.run(nodes[0], ["env", "-C", str(folder), sys.executable, "stage.py"], env=env, seconds=600).output


def seconds_to_unpack(hosts: Hosts, host: str, starter: Sequence[str]) -> float:
    done = subprocess.run([*hosts.enter(host), *starter, "true"], stderr=subprocess.PIPE, text=True)
    found = re.search(r"made in ([\d.]+) s", done.stderr)
    if found is None:
        raise RuntimeError(done.stderr)
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
