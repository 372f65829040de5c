"""Break one of four hosts in many ways, and check what doctor.py says about it.

python -m tests.faults.doctor [FAULT ...] [--show]
python -m tests.faults.doctor --healthy 16      no finding where nothing is wrong

Each fault is real: packets are lost, disks are full, hosts vanish. doctor.py runs on two ranks per host, started by
launch.py unless the fault is about another launcher. It prints for each fault the seconds, and whether doctor.py has
named the cause and the host or rank, and nothing else. The hosts are network namespaces (root).
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.hosts import CLEAN_ENV, Hosts, killed_at_end, wait_until
from tests.conftest import find_or_skip
from tests.faults import host_faults, packets
from tests.launch.launchers import LAUNCH, MPIS, ROOT, Lab
from utils.host import process

DOCTOR = ROOT / "scripts" / "doctor.py"
BAD, OTHER, LAST = "h3", "h2", "h4"
SECONDS = 60


@dataclass
class Run:
    """A run of doctor.py: what faults change about it.

    shell: lines that each rank runs before doctor.py. options: of doctor.py. start: starts it; None: launch.py does.
    """

    folder: Path
    size: int
    per_host: int
    hosts: Hosts = field(init=False)
    lab: Lab = field(init=False)
    environ: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pid: int | None = None  # of rank 5

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints, which all hosts share."""
        return self.folder / "shared" / "checkpoints"

    @property
    def work(self) -> Path:
        """The working directory, with the training script."""
        return self.folder / "work"

    @property
    def environment(self) -> dict[str, str]:
        node_file = self.folder / "nodes"
        node_file.write_text("".join(f"{host}\n" * self.per_host for host in self.hosts.hosts))
        return {"PATH": f"{self.lab.ssh.parent}:{CLEAN_ENV['PATH']}", "PBS_JOBID": "1.lab", "NCPUS": "2",
                "PBS_NODEFILE": str(node_file), "PYTHONDONTWRITEBYTECODE": "1", **self.environ}

    @property
    def doctor(self) -> list[str]:
        """The command of a rank."""
        words = [sys.executable, str(DOCTOR), "--json", "--checkpoints", str(self.checkpoints), *self.options]
        return ["sh", "-c", "\n".join([*self.shell, 'exec "$@"']), "sh", *words] if self.shell else words

    def launch(self) -> subprocess.Popen[str]:
        return self.start("h1", [*LAUNCH, *self.doctor])

    def start(self, host: str, words: Sequence[str], stdout: int = subprocess.PIPE,
              **environ: str) -> subprocess.Popen[str]:
        return self.hosts.popen(host, ["env", "-C", str(self.work), *words], env={**self.environment, **environ},
                                stdout=stdout, stderr=subprocess.STDOUT)

    def rank_pid(self, rank: int) -> int | None:
        """Return the process id of a rank, once it is connected to rank 0."""
        host = self.hosts.hosts[rank // self.per_host]
        for pid in host_faults.processes_on(self.hosts, host):
            is_rank = process.environment(pid).get(b"RANK") == str(rank).encode()
            if is_rank and "python" in process.name(pid) and connections(pid) >= 2:
                return pid
        return None


def connections(pid: int) -> int:
    """Return how many TCP connections a process has."""
    with contextlib.suppress(OSError):
        fds = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return sum(row[3] == "01" and f"socket:[{row[9]}]" in fds for row in rows)
    return 0


# What doctor.py says -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Fault:
    """A fault, and what doctor.py has to say.

    check: the name of the check; "": that which runs then. cause: a regular expression for the message of its
    finding. hosts: those that this finding names, and no others but `maybe`; none: it names no host or all. before:
    what is done before the hosts start; inject: when they are up; during: when the ranks have joined. start: what
    starts doctor.py instead of launch.py. also: further findings that follow from the fault. output: a regular
    expression for what other ranks print.
    """

    check: str
    cause: str
    hosts: tuple[str, ...] = (BAD,)
    inject: Callable[[Run], object] | None = None
    before: Callable[[Run], object] | None = None
    during: Callable[[Run], object] | None = None
    start: Callable[[Run], subprocess.Popen[str]] = Run.launch
    also: str = ""
    output: str = ""
    maybe: tuple[str, ...] = ()
    size: int = 4
    per_host: int = 2


@dataclass
class Outcome:
    """seconds: until the report, or the end without one. output: all of it."""

    seconds: float
    status: int | None
    output: str

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings of the report that are not good; empty without a report."""
        report = self.report or {"checks": []}
        return [{**finding, "check": check["name"]} for check in report["checks"] for finding in check["findings"]
                if finding["level"] != "good"]

    @property
    def report(self) -> dict[str, Any] | None:
        starts = [found.start() for found in re.finditer(r"^\{\n", self.output, re.MULTILINE)]
        for start in reversed(starts):  # rank 0's; another rank that does not find it reports that earlier
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.JSONDecoder().raw_decode(self.output, start)[0]
                return found
        return None


def named(finding: dict[str, Any], report: dict[str, Any]) -> set[str]:
    """Return the hosts that a finding blames: by its fields, else by its text."""
    host_of = {place["rank"]: place["host"] for place in report["ranks"]}
    hosts = set(finding["hosts"]) | {host_of[rank] for rank in finding["ranks"] if rank in host_of}
    return hosts or set(re.findall(r"\bh\d\b", finding["message"]))


def problem(fault: Fault, outcome: Outcome) -> str:
    """Return what is wrong with the report; "" where cause and host are right, and nothing else is blamed."""
    report = outcome.report
    if report is None:  # launch.py has found it before any rank ran
        right = re.search(fault.cause, outcome.output) and all(host in outcome.output for host in fault.hosts)
        return "" if right and outcome.status else f"no report, exit status {outcome.status}"
    right, everywhere, alarms = False, {place["host"] for place in report["ranks"]}, []
    for finding in outcome.findings:
        blamed = named(finding, report)
        hosts = set(fault.hosts) if fault.hosts or not blamed else everywhere
        if (fault.check in ("", finding["check"]) and re.search(fault.cause, finding["message"])
                and blamed - set(fault.maybe) in (set(fault.hosts), hosts)):
            right = True
        elif not (fault.also and re.search(fault.also, f"{finding['check']}: {finding['message']}")):
            alarms.append(f"{finding['check']} about {','.join(sorted(blamed)) or 'all'}: {finding['message']}")
    wrong = [] if right else [f"no finding of {fault.check} with {fault.cause!r} about {fault.hosts or 'all'}"]
    wrong += [f"false alarm: {alarm}" for alarm in alarms]
    if not re.search(fault.output, outcome.output):
        wrong.append(f"no output {fault.output!r}")
    if right and not outcome.status:
        wrong.append(f"exit status {outcome.status}")
    if right and outcome.seconds > SECONDS:
        wrong.append("too late")
    return "; ".join(wrong)


# Faults --------------------------------------------------------------------------------------------------------------

def host_file(host: str, **other: str) -> Callable[[Run], object]:
    """Change names in the hosts file of a host: an address, or "" for none."""
    def inject(run: Run) -> None:
        names = {**run.hosts.address, **other}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items() if address)]
        (run.hosts.folder / f"hosts.{host}").write_text("\n".join(lines) + "\n")
    return inject


def lose(host: str, *conditions: packets.Condition) -> Callable[[Run], object]:
    """Lose what a host would receive from the bad one."""
    return lambda run: packets.drop(run.hosts, host, "to", *conditions, packets.source(run.hosts, BAD))


def black_hole(run: Run) -> None:
    packets.one_packet_per_frame(run.hosts, run.hosts.hosts)
    for direction in ("from", "to"):
        packets.drop(run.hosts, BAD, direction, *packets.NOT_SSH, packets.longer_than(1400))


def on_bad_host(*lines: str) -> Callable[[Run], object]:
    """Let the ranks of one host run lines of shell first."""
    def inject(run: Run) -> None:
        run.shell += [f"if [ $(hostname) = {BAD} ]; then", *lines, "fi"]
    return inject


def gpus(*lines: str) -> Callable[[Run], object]:
    """Let the driver of each host list two GPUs, and run lines of shell on one of them."""
    def inject(run: Run) -> None:
        for host in run.hosts.hosts:
            driver = run.folder / f"driver.{host}"
            for number in range(2):
                gpu = driver / "nvidia" / "gpus" / f"0000:0{number + 1}:00.0"
                gpu.mkdir(parents=True)
                (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{host}-{number}\n"
                                                 f"Device Minor: \t {number}\n")
            packets.run(run.hosts, host, f"mount --bind {driver} /proc/driver")
        if lines:
            on_bad_host(*lines)(run)
    return inject


def another_kit(run: Run) -> None:
    file = ROOT / "utils" / "training" / "batch.py"
    host_faults.replace_file(run.hosts, BAD, file, file.read_text() + "# an older version\n")


def full_disk(run: Run) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", run.checkpoints], check=True)
    with contextlib.suppress(OSError), open(run.checkpoints / "old.pt", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def read_only(run: Run) -> None:
    for options in (f"--bind {run.checkpoints}", "-o remount,bind,ro"):
        packets.run(run.hosts, BAD, f"mount {options} {run.checkpoints}")


def low_memlock(run: Run) -> None:
    gpus()(run)
    host_faults.set_limits(run.hosts, BAD, memlock=65536)


def little(controller: str, **settings: str) -> Callable[[Run], object]:
    """Set a limit by a cgroup: memory_limit_in_bytes="1"."""
    def inject(run: Run) -> None:
        named = {name.replace("_", ".", 1): value for name, value in settings.items()}
        run.undo.enter_context(host_faults.cgroup(controller, named))(run.hosts, BAD)
    return inject


def one_name(run: Run) -> None:
    """Two hosts with one name. Each has its boot id, which hosts of the tests otherwise share."""
    for number, host in enumerate(run.hosts.hosts):
        host_faults.replace_file(run.hosts, host, Path("/proc/sys/kernel/random/boot_id"),
                                 f"{number}1111111-2222-4333-8444-555555555555\n")
    packets.run(run.hosts, LAST, f"hostname {BAD}")


def by_hand(run: Run) -> subprocess.Popen[str]:
    """Start the ranks with torchrun's variables, as scripts do that know no launcher."""
    output, end = os.pipe()
    started = []
    for rank in range(run.size * run.per_host):
        started.append(run.start(
            run.hosts.hosts[rank // run.per_host], run.doctor, end, RANK=str(rank), PBS_JOBID="",
            WORLD_SIZE=str(run.size * run.per_host), LOCAL_RANK=str(rank % run.per_host),
            LOCAL_WORLD_SIZE=str(run.per_host), MASTER_ADDR=run.hosts.address["h1"], MASTER_PORT="29541"))
        run.undo.enter_context(killed_at_end(started[-1]))
    os.close(end)
    started[0].stdout = os.fdopen(output)
    return started[0]


def another_numpy(run: Run) -> None:
    path = next(Path(sys.prefix).glob("lib/python*/site-packages/numpy/version.py"))
    text = re.sub(r'^version = .*', 'version = "1.26.4"', path.read_text(), flags=re.MULTILINE)
    host_faults.replace_file(run.hosts, BAD, path, text)


def broken_torch(run: Run) -> None:
    run.options.append("--quick")
    path = next(Path(sys.prefix).glob("lib/python*/site-packages/torch/functional.py"))
    host_faults.replace_file(run.hosts, BAD, path, "raise ImportError('libmpi.so.12: not found')")


def other_file(run: Run) -> None:
    (run.work / "train.yaml").write_text("lr: 0.1\n")
    host_faults.replace_file(run.hosts, BAD, run.work / "train.yaml", "lr: 0.2\n")


def by_torchrun(run: Run) -> subprocess.Popen[str]:
    return run.start("h1", [*LAUNCH, "--torchrun", *run.doctor[1:]])


def by_mpiexec(name: str) -> Callable[[Run], subprocess.Popen[str]]:
    def start(run: Run) -> subprocess.Popen[str]:
        hosts = " ".join(host for host in run.hosts.hosts for _ in range(run.per_host))
        return run.start("h1", [*run.lab.mpiexec(name, hosts, run.environ), *run.doctor], PBS_JOBID="")
    return start


def another_mpi(run: Run) -> subprocess.Popen[str]:
    """mpiexec of Open MPI, and an mpi4py that loads MPICH."""
    environ = run.lab.mpi4py("mpich5")
    hosts = " ".join(host for host in run.hosts.hosts for _ in range(run.per_host))
    mpiexec = run.lab.mpiexec("openmpi5", hosts, {**environ, "PYTHONDONTWRITEBYTECODE": "1"})
    run.environ["PATH"] = f"{Path(mpiexec[0]).parent}:{CLEAN_ENV['PATH']}"
    return run.start("h1", [*mpiexec, *run.doctor], **environ)


BOTH, MAYBE_ALL = (OTHER, BAD), ("h1", "h2", "h4")
COLLECTIVES = r"collectives: .*(h3|h2)"
FAULTS = {
    "own name is 127.0.1.1": Fault("names", r"own name of h3 leads to 127\.0\.1\.1", inject=host_file(
        BAD, h3="127.0.1.1")),
    "name without an address": Fault("names", r"h3: h2 is not resolved", inject=host_file(BAD, h2=""),
                                     maybe=(OTHER,), also=COLLECTIVES),
    "IPv6 name that leads nowhere": Fault("names", r"h2: h3 leads to fd00::99", hosts=(OTHER,), size=3,
                                          inject=host_file(OTHER, h3="fd00::99"), start=by_mpiexec("mpich5")),
    "one name on two hosts": Fault("placement", r"2 hosts have the name h3", inject=one_name,
                                   also="no rank runs on h4|names: "),
    # The network
    "one-way loss between two hosts": Fault("connections", r"h3 to h2|from h3", hosts=BOTH, inject=lose(OTHER),
                                            also=COLLECTIVES),
    "rank 0 cannot be reached": Fault("launch", r"did not join: ranks 4-5", hosts=(), maybe=MAYBE_ALL, start=by_hand,
                                      inject=lose("h1", packets.TCP, *packets.NOT_SSH),
                                      output=r"rank [45] of 8 on h3 .*rank 0"),
    "refused connections": Fault("connections", r"refuse", inject=lambda run: packets.refuse(run.hosts, BAD),
                                 also=COLLECTIVES, maybe=MAYBE_ALL),
    "200 ms delay": Fault("connections", r"round trip to h3", also=r"collectives: .*h3",
                          inject=lambda run: packets.delay(run.hosts, BAD, 0.1)),
    "small MTU on one host": Fault("connections", r"MTU.*1200", inject=lambda run: packets.run(
        run.hosts, BAD, "ip link set eth0 mtu 1200")),
    "path MTU black hole": Fault("connections", r"packets of full size", inject=black_hole,
                                 also=r"collectives: .*h3", maybe=MAYBE_ALL),
    "loopback on two hosts": Fault("connections", r"GLOO_SOCKET_IFNAME=lo .*loopback", hosts=BOTH, size=3,
                                   inject=lambda run: run.shell.append(
        f"case $(hostname) in {OTHER}|{BAD}) export GLOO_SOCKET_IFNAME=lo;; esac")),
    "interface that does not exist": Fault("connections", r"GLOO_SOCKET_IFNAME=ib7, but h3 has no interface ib7",
                                           inject=on_bad_host("export GLOO_SOCKET_IFNAME=ib7"),
                                           also="GLOO_SOCKET_IFNAME|" + COLLECTIVES),
    # Ranks
    "host vanishes": Fault("", r"did not respond|ended", during=lambda run: packets.run(
        run.hosts, "switch", f"ip link set {packets.port(run.hosts, BAD)} down"), also=r"h3"),
    "stopped rank": Fault("", r"rank 5 on h3 did not respond", during=lambda run: os.kill(run.pid, signal.SIGSTOP)),
    "killed rank": Fault("", r"rank 5.*(ended|died)", during=lambda run: os.kill(run.pid, signal.SIGKILL)),
    "mpi4py of another MPI": Fault("installation", r"mpi4py.*(MPICH|mpich)", hosts=(), start=another_mpi),
    # Placement
    "both ranks on one core": Fault("placement", r"2 ranks of h3 may run on core 0 only",
                                    inject=lambda run: host_faults.set_cores(run.hosts, BAD, {0})),
    "64 threads on one host": Fault("placement", r"2 ranks on h3 would start 128 threads", size=3,
                                    inject=on_bad_host("export OMP_NUM_THREADS=64")),
    "masked GPU": Fault("placement", r"sees? no GPU", inject=gpus("export CUDA_VISIBLE_DEVICES="),
                        also="CUDA_VISIBLE_DEVICES"),
    # Equality
    "other code": Fault("equality", r"code of the kit.*batch\.py", inject=another_kit),
    "another variable": Fault("equality", r"NCCL_IB_DISABLE", inject=on_bad_host("export NCCL_IB_DISABLE=1")),
    "another numpy": Fault("equality", r"packages \(numpy\) differs\. h3: 1\.26\.4", inject=another_numpy,
                           start=by_torchrun, size=3),
    "another configuration": Fault("equality", r"working directory \(train\.yaml\) differs", size=3,
                                   inject=other_file),
    # Storage
    "full disk": Fault("storage", r"No space", hosts=(), before=full_disk),
    "read-only folder": Fault("storage", r"[Rr]ead-only", inject=read_only),
    "hung file system": Fault("storage", r"storage|checkpoints", inject=lambda run: host_faults.hang_folder(
        run.hosts, BAD, run.checkpoints)),
    # Limits
    "low memlock": Fault("limits", r"locked", maybe=MAYBE_ALL, also="CPU build|torch|GPU", inject=low_memlock),
    "few open files": Fault("limits", r"ulimit -n", inject=lambda run: host_faults.set_limits(
        run.hosts, BAD, nofile=256)),
    "little memory": Fault("limits", r"memory", inject=little("memory", memory_limit_in_bytes=str(768 << 20))),
    "CPU quota": Fault("limits", r"allows the time of 1 CPUs", size=3,
                       inject=little("cpu", cpu_cfs_quota_us="100000")),  # of 100 ms: one CPU
    # torch
    "torch that cannot be imported": Fault("import", r"cannot be imported on h3: ImportError: libmpi", size=3,
                                           inject=broken_torch),
}


# Runs ----------------------------------------------------------------------------------------------------------------

def examine(fault: Fault, *options: str) -> Outcome:
    """Start hosts, break them, and run doctor.py with these options there; all is gone at the end."""
    with (tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder,
          contextlib.ExitStack() as at_end):
        run = Run(Path(folder), fault.size, fault.per_host)
        run.checkpoints.mkdir(parents=True)
        run.work.mkdir()
        (run.work / "train.py").write_text("import torch\n")
        at_end.callback(subprocess.run, ["umount", "--lazy", "--quiet", run.checkpoints], capture_output=True)
        if fault.before:
            fault.before(run)
        run.hosts = at_end.enter_context(Hosts(fault.size))
        run.lab = Lab(run.hosts, run.hosts.start_sshd(), find_or_skip)
        at_end.enter_context(run.undo)
        if fault.inject:
            fault.inject(run)
        run.options += options
        begin = time.monotonic()
        started = at_end.enter_context(killed_at_end(fault.start(run)))
        if fault.during:
            threading.Thread(target=break_later, args=(fault, run), daemon=True).start()
        return follow(started, begin, 2 * SECONDS)


def break_later(fault: Fault, run: Run) -> None:
    def joined() -> bool:
        run.pid = run.rank_pid(5)
        return run.pid is not None

    assert fault.during
    wait_until(joined, "the ranks to join", seconds=SECONDS)
    fault.during(run)


def follow(started: subprocess.Popen[str], begin: float, limit: float) -> Outcome:
    """Read the output until the end; the seconds are those until the report."""
    lines: list[str] = []
    reported = 0.0

    def read() -> None:
        nonlocal reported
        assert started.stdout
        for line in started.stdout:
            lines.append(line)
            if line == "}\n":
                reported = time.monotonic() - begin

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(limit)
    reader.join(1)
    return Outcome(reported or time.monotonic() - begin, started.poll(), "".join(lines))


# A healthy run: the hosts, the launcher, and the options of doctor.py.
HEALTHY = (("launch.py", 4, 2, ()), ("torchrun", 2, 2, ()), ("mpich5", 3, 2, ()), ("launch.py", 1, 2, ()),
           ("openmpi5", 3, 2, ()), ("launch.py", 4, 2, ("--quick",)), ("laptop", 1, 1, ()), ("launch.py", 8, 1, ()))


def healthy(number: int) -> tuple[str, Outcome]:
    """Run doctor.py where nothing is wrong, on hosts that have the bridge of Docker, too."""
    kind, size, per_host, options = HEALTHY[number % len(HEALTHY)]

    def docker(run: Run) -> None:
        for host in run.hosts.hosts:
            for words in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0",
                          "link set docker0 up"):
                packets.run(run.hosts, host, f"ip {words}")

    def start(run: Run) -> subprocess.Popen[str]:
        if kind == "laptop":
            return run.hosts.popen("h1", ["env", "-C", str(run.work), *run.doctor], stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, env=run.environ)
        return by_torchrun(run) if kind == "torchrun" else by_mpiexec(kind)(run) if kind in MPIS else run.launch()

    fault = Fault("", "", start=start, inject=docker, size=size, per_host=per_host)
    return f"{kind} {size} x {per_host} {' '.join(options)}", examine(fault, *options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="; ".join(FAULTS).replace("%", "%%"))
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help="runs without a fault")
    parser.add_argument("--show", action="store_true", help="print the whole output")
    args = parser.parse_args()
    if unknown := [name for name in args.faults if name not in FAULTS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAULTS)}")
    names = args.faults or ([] if args.healthy else list(FAULTS))
    problems = []
    for name in names:
        outcome = examine(FAULTS[name])
        problems.append(problem(FAULTS[name], outcome))
        print(f"{name:32} {outcome.seconds:5.1f} s  {problems[-1] or 'right'}", flush=True)
        if args.show:
            print(outcome.output, flush=True)
    alarms = [try_healthy(number) for number in range(args.healthy)]
    print(f"{problems.count('')} of {len(names)} faults right, {sum(alarms)} alarms in {args.healthy} healthy runs")
    return int(any(problems) or any(alarms))


def try_healthy(number: int) -> bool:
    """Make one healthy run and print its line; return whether doctor.py gives an alarm."""
    kind, outcome = healthy(number)
    alarms = [f"{one['check']}: {one['message']}" for one in outcome.findings]
    if outcome.report is None or outcome.status != 0:
        alarms.append(f"exit status {outcome.status}: {outcome.output[-2000:]}")
    print(f"healthy, {kind:24} {outcome.seconds:5.1f} s  {'; '.join(alarms) or 'no alarm'}", flush=True)
    return bool(alarms)


if __name__ == "__main__":
    if os.readlink("/proc/self/ns/mnt") == os.readlink(f"/proc/{os.getppid()}/ns/mnt"):
        # What is mounted before the hosts start is seen by nobody else.
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.faults.doctor"]
        os.execvp(command[0], [*command, *sys.argv[1:]])
    sys.exit(main())
