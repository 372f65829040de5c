"""ddpkit launch --stage on several hosts: the archive gets to each by sbcast or MPI, or each reads it."""
from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MPIS, ROOT, Lab
from tests.launch.shared_packages import Shared, assert_one_warning, make_shared
from tests.matrix import with_all
from utils.tools.staging import distribute


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return make_shared(tmp_path)


@pytest.fixture
def own_disks(lab: Lab, shared: Shared) -> Iterator[Callable[[], dict[str, Path]]]:
    """A local disk on each of the hosts, at the same path."""
    for host in ("h1", "h2"):
        subprocess.run([*lab.hosts.enter(host), "mount", "-t", "tmpfs", "tmpfs", str(shared.disk)], check=True)
    yield lambda: {host: Path(f"/proc/{lab.hosts.pid(host)}/root{shared.root}") for host in ("h1", "h2")}
    for host in ("h1", "h2"):
        subprocess.run([*lab.hosts.enter(host), "umount", str(shared.disk)], check=True)


@pytest.fixture
def own_disks_in_slurm(slurm: SlurmCluster, shared: Shared) -> Iterator[dict[str, Path]]:
    """As own_disks, on two nodes of Slurm."""
    for node in ("node1", "node2"):
        subprocess.run([*slurm.enter(node), "mount", "-t", "tmpfs", "tmpfs", str(shared.disk)], check=True)
    yield {node: Path(f"/proc/{slurm.pid(node)}/root{shared.disk}") for node in ("node1", "node2")}
    for node in ("node1", "node2"):
        subprocess.run([*slurm.enter(node), "umount", "-l", str(shared.disk)], check=True)


@pytest.mark.parametrize("sbcast", ["works", "fails"])
def test_slurm_sends_the_archive_to_each_node(slurm: SlurmCluster, shared: Shared, sbcast: str,
                                              own_disks_in_slurm: dict[str, Path]) -> None:
    programs = shared.folder / "programs"
    programs.mkdir()
    if sbcast == "fails":
        (programs / "sbcast").write_text("#!/bin/sh\necho sbcast: error: no >&2\nexit 1\n")
        (programs / "sbcast").chmod(0o755)
    line = shlex.join(shared.words("--independent"))
    before = [f"cd {shared.folder}", f"export PATH={programs}:$PATH"]
    done = slurm.batch("-N2 -n2 --ntasks-per-node=1", *before, line, line)
    staged = [Path(rank["heavy"]).is_relative_to(shared.root) for rank in shared.ranks(done.output)]
    assert staged == [True] * 4, done.output
    expected = "has sent the archive to 2 nodes" if sbcast == "works" else "sbcast failed (sbcast: error: no)"
    assert done.output.count(expected) == 1 and "warning" not in done.output, done.output
    left = [sorted(path.name for path in disk.iterdir()) for disk in own_disks_in_slurm.values()]
    assert left == [[shared.root.name]] * 2


@pytest.mark.parametrize("by", ["ssh", *with_all("mpich5")])
def test_each_host_has_a_copy(lab: Lab, shared: Shared, own_disks: Callable[[], dict[str, Path]], by: str) -> None:
    launcher = "ssh" if by == "ssh" else str(lab.need("mpich"))
    node_file = shared.folder / "nodes"
    node_file.write_text("h1\nh2\n")
    env = {"PATH": f"{lab.ssh.parent}:/usr/bin:/bin", "PBS_JOBID": "1.lab", "PBS_NODEFILE": str(node_file)}
    words = ["env", "-C", str(shared.folder), *shared.words("--independent", "--launcher", launcher)]
    done = lab.run("h1", words, env=env)
    ranks = shared.ranks(done.output)
    assert done.status == 0 and shared.uses_copy(ranks), done.output
    keys = [[path.name for path in root.iterdir() if path.is_dir()] for root in own_disks().values()]
    assert keys[0] == keys[1] and len(keys[0]) == 1

    root = own_disks()["h2"]
    shutil.rmtree(root)
    root.write_text("")  # nothing can be made there
    done = lab.run("h1", words, env=env)
    ranks = shared.ranks(done.output)
    assert Path(ranks[0]["heavy"]).is_relative_to(shared.root), done.output
    assert Path(ranks[1]["heavy"]).is_relative_to(shared.packages), done.output
    assert_one_warning(done.output, "on h2 the packages are not staged")


@pytest.mark.parametrize("by", ["ssh", "mpich5"])
def test_copies_in_memory_go_with_the_ranks_of_each_host(lab: Lab, shared: Shared, by: str,
                                                         own_disks: Callable[[], dict[str, Path]]) -> None:
    """Agents and the parents of ranks remove them, where no option names a folder."""
    launcher = "ssh" if by == "ssh" else str(lab.need("mpich"))
    (shared.folder / "nodes").write_text("h1\nh2\n")
    env = {"PATH": f"{lab.ssh.parent}:/usr/bin:/bin", "PBS_JOBID": "1.lab",
           "PBS_NODEFILE": str(shared.folder / "nodes"), "TMPDIR": str(shared.disk)}
    words = [word for word in shared.words("--stage", "--independent", "--launcher", launcher)
             if word not in ("--stage-dir", str(shared.disk))]
    done = lab.run("h1", ["env", "-C", str(shared.folder), *words], env=env)
    assert done.status == 0 and shared.uses_copy(shared.ranks(done.output)), done.output
    assert [list(root.iterdir()) for root in own_disks().values()] == [[], []]


def test_a_spare_host_of_slurm_has_a_copy_too(slurm: SlurmCluster, shared: Shared,
                                              own_disks_in_slurm: dict[str, Path]) -> None:
    """Made while the ranks run, so that a restart there need not wait for it; no archive is left."""
    line = shlex.join(shared.words("--spare", "1", program=("sleep", "8")))
    done = slurm.batch("-N2 -n2 --ntasks-per-node=1 --no-kill", f"cd {shared.folder}", line)
    assert "has sent the archive to 2 nodes" in done.output, done.output
    left = [sorted(path.name for path in disk.iterdir()) for disk in own_disks_in_slurm.values()]
    assert left == [[shared.root.name]] * 2
    copies = [[path.name for path in (disk / shared.root.name).iterdir() if path.is_dir()]
              for disk in own_disks_in_slurm.values()]
    assert len(copies[0]) == 1 and copies[0] == copies[1]


def test_a_spare_host_has_a_copy_too(lab: Lab, shared: Shared, own_disks: Callable[[], dict[str, Path]]) -> None:
    node_file = shared.folder / "nodes"
    node_file.write_text("h1\nh2\n")
    env = {"PATH": f"{lab.ssh.parent}:/usr/bin:/bin", "PBS_JOBID": "1.lab", "PBS_NODEFILE": str(node_file)}
    words = shared.words("--launcher", "ssh", "--spare", "1", program=("sleep", "8"))
    done = lab.run("h1", ["env", "-C", str(shared.folder), *words], env=env)
    assert done.status == 0, done.output
    copies = [[path.name for path in root.iterdir() if path.is_dir()] for root in own_disks().values()]
    assert len(copies[0]) == 1 and copies[0] == copies[1]


@pytest.fixture
def by_mpi(lab: Lab, shared: Shared, own_disks: Callable[[], dict[str, Path]]) -> Callable[..., tuple[list[bool], str]]:
    """Launch on h1 and h2, as in a job of PBS, with an mpiexec and mpi4py; whether each rank uses a copy, and output.

    In the end each disk holds the copies only, and no process is left.
    """
    (shared.folder / "nodes").write_text("h1\nh2\n")

    def launch(by: str, **env: str) -> tuple[list[bool], str]:
        mpi = lab.mpi4py(by) if by else {}
        programs = [str(lab.need(MPIS[by][0]).parent)] if by else []
        env = {"PATH": ":".join([*programs, str(lab.ssh.parent), "/usr/bin:/bin"]), "PBS_JOBID": "1.lab",
               "PBS_NODEFILE": str(shared.folder / "nodes"), **mpi, **env}
        done = lab.run("h1", ["env", "-C", str(shared.folder), *shared.words("--independent")], env=env)
        assert done.status == 0, done.output
        for root in own_disks().values():
            assert [path.name for path in root.parent.iterdir()] == [shared.root.name]
        mine = f"broadcast import main.*{shared.disk}/"
        left = subprocess.run(["pgrep", "-f", mine], capture_output=True, text=True).stdout
        assert not left
        return [Path(rank["heavy"]).is_relative_to(shared.root) for rank in shared.ranks(done.output)], done.output

    return launch


@pytest.mark.parametrize("by", ["mpich5", *with_all("openmpi5", "intel")])
def test_mpi_sends_the_archive_to_each_host(by_mpi: Callable[..., tuple[list[bool], str]], by: str) -> None:
    staged, output = by_mpi(by)
    assert staged == [True] * 2 and "MPI has sent the archive to 2 nodes" in output, output
    assert "not written" not in output and "warning" not in output, output
    staged, output = by_mpi(by)
    assert staged == [True] * 2 and "staging" not in output, output


@pytest.mark.usefixtures("own_disks")
@pytest.mark.parametrize("by", ["openmpi5", *with_all("mpich5", "intel")])
def test_mpi_changes_no_byte_of_the_archive(lab: Lab, shared: Shared, by: str) -> None:
    """h2 passes on what h1 reads; h3 has the disk of this machine."""
    archive = shared.folder / "archive"
    archive.write_bytes(os.urandom((30 << 20) + 7))
    order = {"archive": ("key", str(archive), archive.stat().st_size, 1, ""), "target": str(shared.disk / "target"),
             "stage_dir": str(shared.disk), "hosts": 3, "seconds": 60}
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from utils.tools.staging.broadcast import main; main({order})"
    env = {**lab.mpi4py(by), "I_MPI_PERHOST": "1"}
    done = lab.mpi(by, "h1 h2 h3", [sys.executable, "-c", code], env=env)
    assert done.status == 0 and "ddpkit-stage" not in done.output, done.output  # Open MPI may warn of setpgid()
    for received in (Path(f"/proc/{lab.hosts.pid('h2')}/root{shared.disk}/target"), shared.disk / "target"):
        assert received.read_bytes() == archive.read_bytes()
        assert stat.S_IMODE(received.stat().st_mode) == 0o600


@pytest.mark.parametrize("by", ["intel", *with_all("mpich5", "openmpi5")])
def test_a_host_without_mpi4py(lab: Lab, by_mpi: Callable[..., tuple[list[bool], str]], by: str) -> None:
    """It ends at once, while the other waits for it in MPI."""
    folder = str(lab.need("mpi4py"))
    subprocess.run([*lab.hosts.enter("h2"), "mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        start = time.monotonic()
        staged, output = by_mpi(by)
        assert time.monotonic() - start < 30
    finally:
        subprocess.run([*lab.hosts.enter("h2"), "umount", folder], check=True)
    assert staged == [True] * 2 and "warning" not in output, output
    assert "MPI broadcast failed (h2: ModuleNotFoundError: No module named 'mpi4py'). Each node reads" in output, output


def test_a_host_without_room_for_the_archive(lab: Lab, shared: Shared, by_mpi: Callable[..., tuple[list[bool], str]],
                                             own_disks: Callable[[], dict[str, Path]]) -> None:
    """There is room for the copy, which it makes of the shared archive."""
    (shared.packages / "heavy" / "data").write_bytes(bytes(100 << 20))
    subprocess.run([*lab.hosts.enter("h2"), "mount", "-o", "remount,size=200m", str(shared.disk)], check=True)
    staged, output = by_mpi("mpich5")
    assert staged == [True] * 2 and "sent the archive to 2 nodes" in output and "warning" not in output, output
    assert "not written on h2: no room for the archive" in output, output


def of_broadcast(shared: Shared) -> list[int]:
    """The processes that send the archive, and those that have started them."""
    mine = f"broadcast import main.*{shared.disk}/"
    return [int(pid) for pid in subprocess.run(["pgrep", "-f", mine], capture_output=True, text=True).stdout.split()]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("by", ["mpich5", *with_all("openmpi5")])
def test_a_launch_killed_while_it_sends_leaves_nothing(lab: Lab, shared: Shared, by: str, name: str,
                                                       own_disks: Callable[[], dict[str, Path]]) -> None:
    (shared.packages / "heavy" / "data").write_bytes(os.urandom(300 << 20))
    (shared.folder / "nodes").write_text("h1\nh2\n")
    path = ":".join([str(lab.need(MPIS[by][0]).parent), str(lab.ssh.parent), "/usr/bin:/bin"])
    env = {"PATH": path, "PBS_JOBID": "1.lab", "PBS_NODEFILE": str(shared.folder / "nodes"), **lab.mpi4py(by)}
    launch = lab.hosts.popen("h1", ["env", "-C", str(shared.folder), *shared.words("--independent")], env=env,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def receives(pid: int) -> bool:
        try:
            files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            return False
        return any(file.startswith(f"{shared.disk}/") for file in files)

    with killed_at_end(launch):
        limit = time.monotonic() + 60
        while not (receiving := list(filter(receives, of_broadcast(shared)))):
            assert launch.poll() is None and time.monotonic() < limit
        os.kill(receiving[0], signal.SIGSTOP)  # the archive is not complete
        launch.send_signal(signal.Signals[name])
        launch.wait(60)
        for pid in receiving:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        limit = time.monotonic() + 30
        while left := of_broadcast(shared):
            assert time.monotonic() < limit, left
            time.sleep(0.1)
    assert [path.name for root in own_disks().values() for path in root.parent.iterdir()] == []


@pytest.mark.parametrize(("by", "mpiexec", "expected"), [
    ("mpich5", "", "MPI has 1 processes instead of 2"),  # as with mpi4py of another MPI
    ("mpich5", 'echo "mpiexec: no" >&2; exit 3', "MPI broadcast failed ("),
    ("", "", None)])  # no mpi4py: nothing is tried
def test_where_mpi_cannot_send_each_host_reads(lab: Lab, shared: Shared, by_mpi: Callable[..., tuple[list[bool], str]],
                                               by: str, mpiexec: str, expected: str | None) -> None:
    env = {} if mpiexec else {"MPI4PY_LIBMPI": "libmpi.so.40"}
    if mpiexec:
        script = shared.folder / "mpiexec"
        script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "HYDRA build details"; exit; fi\n{mpiexec}\n')
        script.chmod(0o755)
        env["PATH"] = f"{shared.folder}:{lab.ssh.parent}:/usr/bin:/bin"
    staged, output = by_mpi(by, **env)
    assert staged == [True] * 2 and "warning" not in output, output
    assert (expected in output) if expected else "MPI" not in output, output
    assert "staging: MPI" not in output


def stage_with(words: list[str], shared: Shared, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Call distribute.stage() with these words in place of the launch by mpiexec."""
    (shared.packages / "mpi4py.py").write_text("")
    monkeypatch.setattr(distribute, "MPI_SECONDS", 1.0)
    return distribute.stage(str(shared.python), ["h1", "h2"], "h1", {}, spares=0, one_per_host=words,
                            stage_dir=str(shared.disk), also=[], note=notes.append)


@pytest.mark.parametrize("ignored", ["", "trap '' TERM; "])
def test_a_broadcast_that_takes_too_long_is_ended(shared: Shared, ignored: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribute, "END_SECONDS", 0.5)
    notes: list[str] = []
    flag = shared.folder / "pid"
    words = ["sh", "-c", f"{ignored}echo $$ > {flag}; while sleep 0.1; do :; done"]
    starter = stage_with(words, shared, notes, monkeypatch)
    assert starter and "MPI broadcast failed (it took too long). Each node reads" in notes[-1]
    assert not Path(f"/proc/{flag.read_text().strip()}").exists()


def test_a_broadcast_that_cannot_start(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assert stage_with([str(shared.folder / "none")], shared, notes, monkeypatch)
    assert "MPI broadcast failed" in notes[-1]


def test_slurm_has_no_broadcast_by_mpi(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared.packages / "mpi4py.py").write_text("")
    notes: list[str] = []
    assert distribute.stage(str(shared.python), ["h1", "h2"], "h1", {"SLURM_JOB_ID": "1"}, spares=0,
                            one_per_host=["false"], stage_dir=str(shared.disk), also=[], note=notes.append)
    assert not [text for text in notes if "MPI" in text]
