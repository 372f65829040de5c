"""ddpkit launch --stage: ranks import from a copy on the node, or from the shared packages with one warning."""
from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import LAUNCH, MPIS, ROOT, Lab
from utils.tools.staging import distribute

PROGRAM = """\
import json, os, subprocess, sys
import editable, heavy, torch
out = subprocess.run([sys.argv[1], "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout
sys.stdout.write("rank " + json.dumps({"rank": os.environ["RANK"], "prefix": sys.prefix, "heavy": heavy.__file__,
    "version": heavy.VERSION, "editable": editable.__file__, "other": out.strip(), "hooked": os.environ.get("HOOKED"),
    "cache": os.environ.get("TRITON_CACHE_DIR"), "mpl": os.environ.get("MPLCONFIGDIR")}) + "\\n")
sys.stdout.flush()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@dataclass
class Shared:
    """A shared environment with small packages, and the local disk of a node."""

    folder: Path
    python: Path
    disk: Path

    @property
    def packages(self) -> Path:
        return next((self.folder / "env" / "lib").glob("python*")) / "site-packages"

    @property
    def root(self) -> Path:
        return self.disk / f"ddpkit-stage-{os.geteuid()}"

    @property
    def copies(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir()]

    def words(self, *options: str, program: tuple[str, ...] = ()) -> list[str]:
        program = program or (str(self.folder / "program.py"), sys.executable)
        return [*LAUNCH, "--python", str(self.python), "--stage-dir", str(self.disk), *options, *program]

    def launch(self, *options: str, status: int = 0, program: tuple[str, ...] = (),
               **env: str) -> tuple[list[dict[str, str]], str]:
        """What each rank printed, by rank, and all output."""
        done = subprocess.run(self.words("-n", "2", "--independent", *options, program=program), text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env})
        assert done.returncode == status, done.stdout
        return self.ranks(done.stdout), done.stdout

    @staticmethod
    def ranks(output: str) -> list[dict[str, str]]:
        found = [json.loads(text) for text in re.findall(r"rank (\{.*?\})", output)]
        return sorted(found, key=lambda rank: rank["rank"])

    def uses_copy(self, ranks: list[dict[str, str]]) -> bool:
        return [Path(rank["heavy"]).is_relative_to(self.root) for rank in ranks] == [True] * 2

    def uses_shared(self, ranks: list[dict[str, str]]) -> bool:
        return [Path(rank["heavy"]).is_relative_to(self.packages) for rank in ranks] == [True] * 2


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    made = Shared(tmp_path, tmp_path / "env" / "bin" / "python", tmp_path / "disk")
    made.disk.mkdir()
    for name in ("heavy", "torch"):
        (made.packages / name).mkdir()
        (made.packages / name / "__init__.py").write_text("VERSION = 1\n")
    (made.packages / "link").symlink_to("heavy")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "editable.py").write_text("")
    (made.packages / "editable.pth").write_text(f"{tmp_path}/source\nimport os; os.environ['HOOKED'] = 'yes'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    return made


def test_ranks_import_from_a_copy_that_the_next_launch_uses_again(shared: Shared) -> None:
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and output.count("staging: packed") == 1, output
    assert {rank["hooked"] for rank in ranks} == {"yes"}
    assert {rank["editable"] for rank in ranks} == {str(shared.folder / "source" / "editable.py")}
    assert all(rank["other"] == sys.prefix for rank in ranks), "another Python must not see the copy"
    assert all(Path(rank["cache"]).is_relative_to(shared.root) for rank in ranks)
    assert stat.S_IMODE(shared.root.stat().st_mode) == 0o700
    inode = shared.copies[0].stat().st_ino

    ranks, output = shared.launch(MPLCONFIGDIR="/own")
    assert shared.uses_copy(ranks) and "staging" not in output, output
    assert shared.copies[0].stat().st_ino == inode and ranks[0]["mpl"] == "/own"


def test_without_the_option_nothing_is_staged(shared: Shared) -> None:
    assert shared.uses_shared(shared.launch("--no-stage")[0]) and not list(shared.disk.iterdir())
    ranks, output = shared.launch("--no-stage", DDPKIT_STAGE="true")
    assert shared.uses_shared(ranks), output


def test_the_variables_of_the_option(shared: Shared) -> None:
    words = [word for word in shared.words("-n", "2", "--independent") if word not in ("--stage-dir", str(shared.disk))]
    done = subprocess.run(words, capture_output=True, text=True,
                          env={**os.environ, "DDPKIT_STAGE": "true", "DDPKIT_STAGE_DIR": str(shared.disk)})
    assert shared.uses_copy(shared.ranks(done.stdout)), done.stderr


def test_changed_packages_are_another_copy(shared: Shared) -> None:
    shared.launch()
    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 22\n")
    ranks, _ = shared.launch()
    assert shared.uses_copy(ranks) and ranks[0]["version"] == 22 and len(shared.copies) == 2


def test_the_exit_status_is_that_of_the_rank(shared: Shared) -> None:
    ranks, _ = shared.launch(status=7, program=(str(shared.folder / "program.py"), sys.executable, "7"))
    assert ranks
    _, output = shared.launch(status=127, program=("no-such-program",))
    assert "no-such-program could not be started" in output


def test_a_program_that_the_python_runs_uses_the_copy(shared: Shared) -> None:
    """As accelerate does: a script of the environment, and "python" in a shell."""
    script = shared.folder / "env" / "bin" / "tool"
    script.write_text(f"#!{shared.python}\n{PROGRAM}")
    script.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    assert shared.uses_copy(shared.launch(program=("tool", sys.executable), PATH=path)[0])
    by_shell = ("sh", "-c", f"python {shared.folder}/program.py {sys.executable}")
    assert shared.uses_copy(shared.launch(program=by_shell, PATH=path)[0])
    assert shared.uses_copy(shared.launch(program=("python", *by_shell[2].split()[1:]), PATH=path)[0])


def test_other_folders_are_staged_with_the_option(shared: Shared) -> None:
    source = shared.folder / "source"
    (shared.folder / "more").mkdir()
    (shared.folder / "more" / "heavy.py").write_text("VERSION = 5\n")
    (shared.folder / "more" / "unused.py").write_text("")
    ranks, output = shared.launch("--stage-also", str(source), "--stage-also", str(shared.folder / "more"),
                                  PYTHONPATH=str(shared.folder / "more"))
    assert Path(ranks[0]["editable"]).is_relative_to(shared.root), output
    assert ranks[0]["version"] == 5 and shared.uses_copy(ranks)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_no_process_of_a_rank_opens_a_shared_package(shared: Shared, method: str, need: Callable[[str], Path]) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    (shared.folder / "work.py").write_text("import heavy\ndef work(number):\n    return heavy.__file__\n")
    (shared.folder / "pool.py").write_text(textwrap.dedent(f"""\
        import multiprocessing, heavy
        from work import work
        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print("workers", set(pool.map(work, range(4))))
        """))
    shared.launch()
    traces = shared.folder / "traces"
    traces.mkdir()
    done = subprocess.run(
        ["strace", "-ff", "-e", "trace=open,openat,execve", "-o", str(traces / "t"),
         *shared.words("-n", "2", "--independent", program=(str(shared.folder / "pool.py"),))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count(f"workers {{'{shared.root}") == 2, done.stdout
    ranks = [file.read_text() for file in traces.iterdir() if "pool.py" in file.read_text()]
    opened = [line for text in ranks for line in text.splitlines() if line.startswith("open")]
    assert len(ranks) >= 2 and any(str(shared.root) in line for line in opened)
    programs = {file.name: file.read_text() for file in traces.iterdir()}
    of_copy = [line for text in programs.values() if f'execve("{shared.root}' in text or "pool.py" in text
               for line in text.partition(f'execve("{shared.root}')[2].splitlines()]
    assert [line for line in of_copy if str(shared.packages) in line and "ENOENT" not in line] == []


# What goes wrong ------------------------------------------------------------------------------------------------------


def assert_one_warning(output: str, reason: str) -> None:
    warnings = [line for line in output.splitlines() if "warning" in line]
    assert len(warnings) == 1 and reason in warnings[0], output


def test_a_folder_of_another_user_is_not_used(shared: Shared) -> None:
    shared.launch()
    os.chown(shared.root, 12345, 12345)
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "belongs to another user")


def test_a_folder_that_others_may_enter_is_not_used(shared: Shared) -> None:
    shared.root.mkdir()
    shared.root.chmod(0o755)
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "mode 755")


def test_a_link_in_place_of_the_folder_is_not_used(shared: Shared) -> None:
    (shared.folder / "elsewhere").mkdir(mode=0o700)
    shared.root.symlink_to(shared.folder / "elsewhere")
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks) and not list((shared.folder / "elsewhere").iterdir())
    assert_one_warning(output, "is no folder")


def test_a_copy_that_lost_files_is_made_again(shared: Shared) -> None:
    """As a node does that removes old files from /tmp."""
    shared.launch()
    next(shared.copies[0].glob("lib/python*/site-packages/heavy/__init__.py")).unlink()
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "made in" in output and "warning" not in output, output


def test_a_half_written_copy_is_made_again(shared: Shared) -> None:
    shared.launch()
    copy = shared.copies[0]
    (copy / ".ddpkit-complete").unlink()
    half = copy.with_name(f"{copy.name}-half")
    copy.rename(half)
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and shared.copies == [copy], output


def test_what_a_killed_process_left_of_another_copy_is_removed(shared: Shared) -> None:
    shared.launch()
    half = shared.root / "0123456789abcdef-half"
    (half / "lib").mkdir(parents=True)
    ranks, _ = shared.launch()
    assert shared.uses_copy(ranks) and not half.exists()


def test_a_torn_archive_is_packed_again(shared: Shared) -> None:
    shared.launch()
    archive, = (shared.folder / "env" / ".ddpkit-stage").glob("*.tar")
    content = archive.read_bytes()
    archive.write_bytes(content[:-5000])
    shutil.rmtree(shared.root)
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "staging: packed" in output
    assert archive.read_bytes() == content

    place = content.rindex(b"lib/python")  # the same size, another member
    archive.write_bytes(content[:place] + b"LIB" + content[place + 3:])
    shutil.rmtree(shared.root)
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "")
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "staging: packed" in output, output


def test_a_full_disk(shared: Shared) -> None:
    (shared.packages / "heavy" / "data").write_bytes(bytes(200 << 20))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(shared.disk)], check=True)
    try:
        ranks, output = shared.launch()
        assert shared.uses_shared(ranks), output
        assert_one_warning(output, "are needed")
    finally:
        subprocess.run(["umount", str(shared.disk)], check=True)


def test_a_missing_folder_is_made(shared: Shared) -> None:
    shared.disk.rmdir()
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "warning" not in output, output


def test_a_folder_that_cannot_be_made(shared: Shared) -> None:
    shared.disk.rmdir()
    shared.disk.write_text("")
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "Not a directory")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_while_packing_leaves_no_file(shared: Shared, name: str) -> None:
    (shared.packages / "heavy" / "data").write_bytes(bytes(300 << 20))
    launch = subprocess.Popen(shared.words("-n", "1", "--independent"), stderr=subprocess.DEVNULL)
    cache = shared.folder / "env" / ".ddpkit-stage"
    while not list(cache.glob(".*-*/tar")):
        time.sleep(0.002)
    launch.send_signal(signal.Signals[name])
    assert launch.wait(60) != 0
    assert {path.suffix for path in cache.iterdir()} <= {".lock", ".index"}


def settle(folder: Path) -> None:
    """Let all files below a folder be older than the seconds in which an index is not written."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 60,) * 2, follow_symlinks=False)


@pytest.mark.parametrize("change", ["module in place", "extension in place", ".pth in place", "data in place", "new",
                                    "removed", "renamed", "folder removed", "link"])
def test_a_change_is_noticed_without_a_walk_over_all_files(shared: Shared, change: str) -> None:
    heavy = shared.packages / "heavy"
    for name in ("part.py", "part.so", "part.json", "other.py"):
        (heavy / name).write_text("")
    (heavy / "inner").mkdir()
    settle(shared.packages)
    shared.launch()
    index, = (shared.folder / "env" / ".ddpkit-stage").glob("*.index")
    before = index.stat().st_ino
    shared.launch()
    assert len(shared.copies) == 1 and index.stat().st_ino == before

    files = {"module": heavy / "part.py", "extension": heavy / "part.so", "data": heavy / "part.json",
             ".pth": shared.packages / "editable.pth"}
    if change.endswith("in place"):
        with files[change.split()[0]].open("a") as file:
            file.write("\n")
    elif change == "new":
        (heavy / "inner" / "new.py").write_text("")
    elif change == "removed":
        (heavy / "other.py").unlink()
    elif change == "renamed":
        (heavy / "other.py").rename(heavy / "part.py")
    elif change == "folder removed":
        (heavy / "inner").rmdir()
    else:
        (shared.packages / "link").unlink()
        (shared.packages / "link").symlink_to("torch")
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and len(shared.copies) == 2 and "staging: packed" in output


@pytest.mark.parametrize("content", ["", "a b c", "key 0 9999", "torn"])
def test_a_damaged_index_is_written_again(shared: Shared, content: str) -> None:
    settle(shared.packages)
    shared.launch()
    index, = (shared.folder / "env" / ".ddpkit-stage").glob("*.index")
    whole = index.read_bytes()
    index.write_bytes(whole[:-3] if content == "torn" else content.encode())
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "staging" not in output and index.read_bytes() == whole


def test_an_index_of_another_user_is_not_used(shared: Shared) -> None:
    settle(shared.packages)
    shared.launch()
    index, = (shared.folder / "env" / ".ddpkit-stage").glob("*.index")
    index.write_bytes(b"forged " + index.read_bytes().partition(b" ")[2])
    os.chown(index, 12345, 12345)
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and "staging" not in output, output


def test_a_launch_by_the_python_of_the_ranks(shared: Shared) -> None:
    """It knows its own folders, and starts no Python to list them."""
    words = [str(shared.python), *LAUNCH[1:], "-n", "2", "--independent", "--stage-dir", str(shared.disk),
             str(shared.folder / "program.py"), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and shared.uses_copy(shared.ranks(done.stdout)), done.stderr
    shared.launch()
    assert len(shared.copies) == 1


def test_packages_that_nobody_can_pack(shared: Shared) -> None:
    beside = shared.folder / "env" / ".ddpkit-stage"
    beside.write_text("")
    (shared.folder / "cache").write_text("")
    ranks, output = shared.launch(XDG_CACHE_HOME=str(shared.folder / "cache"))
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "cannot hold the archive")


def test_an_environment_that_is_read_only_is_packed_into_the_cache(shared: Shared) -> None:
    (shared.folder / "env" / ".ddpkit-stage").write_text("")
    ranks, output = shared.launch(XDG_CACHE_HOME=str(shared.folder / "cache"))
    assert shared.uses_copy(ranks) and list((shared.folder / "cache" / "ddpkit" / "stage").glob("*.tar"))


def test_launches_at_once_make_one_copy(shared: Shared) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: shared.launch(), range(3)))
    assert all(shared.uses_copy(ranks) for ranks, _ in results)
    output = "".join(output for _, output in results)
    assert output.count("staging: packed") == 1 and len(shared.copies) == 1, output


def test_old_copies_are_removed_unless_a_rank_uses_them(shared: Shared) -> None:
    (shared.folder / "waits.py").write_text(
        "import heavy, sys, time\nfrom pathlib import Path\nPath(sys.argv[1]).write_text('')\n"
        "while Path(sys.argv[1]).exists():\n    time.sleep(0.02)\n")
    flag = shared.folder / "runs"
    program = (str(shared.folder / "waits.py"), str(flag))
    waits = subprocess.Popen(shared.words("--independent", "-n", "1", program=program))
    while not flag.exists():
        time.sleep(0.02)
    used, = shared.copies
    eight_days_ago = time.time() - 8 * 86400

    def make_another(version: int) -> None:
        os.utime(used / ".ddpkit-complete", (eight_days_ago, eight_days_ago))
        (shared.packages / "heavy" / "__init__.py").write_text(f"VERSION = {'1' * version}\n")
        shared.launch()

    make_another(2)
    assert used in shared.copies
    flag.unlink()
    assert waits.wait(60) == 0
    make_another(3)
    assert used not in shared.copies and len(shared.copies) == 2


# Several hosts --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("by", ["ssh", "mpich5"])
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


@pytest.mark.parametrize("by", ["mpich5", "openmpi5", "intel"])
def test_mpi_sends_the_archive_to_each_host(by_mpi: Callable[..., tuple[list[bool], str]], by: str) -> None:
    staged, output = by_mpi(by)
    assert staged == [True] * 2 and "MPI has sent the archive to 2 nodes" in output, output
    assert "not written" not in output and "warning" not in output, output
    staged, output = by_mpi(by)
    assert staged == [True] * 2 and "staging" not in output, output


@pytest.mark.usefixtures("own_disks")
@pytest.mark.parametrize("by", ["mpich5", "openmpi5", "intel"])
def test_mpi_changes_no_byte_of_the_archive(lab: Lab, shared: Shared, by: str) -> None:
    """h2 passes on what h1 reads; h3 has the disk of this machine."""
    archive = shared.folder / "archive"
    archive.write_bytes(os.urandom((30 << 20) + 7))
    order = {"archive": ("key", str(archive), archive.stat().st_size, 1, ""), "target": str(shared.disk / "target"),
             "stage_dir": str(shared.disk), "hosts": 3, "seconds": 60}
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from utils.tools.staging.broadcast import main; main({order})"
    env = {**lab.mpi4py(by), "I_MPI_PERHOST": "1"}
    done = lab.mpi(by, "h1 h2 h3", [sys.executable, "-c", code], env=env)
    assert done.status == 0 and not done.output, done.output
    for received in (Path(f"/proc/{lab.hosts.pid('h2')}/root{shared.disk}/target"), shared.disk / "target"):
        assert received.read_bytes() == archive.read_bytes()
        assert stat.S_IMODE(received.stat().st_mode) == 0o600


@pytest.mark.parametrize("by", ["mpich5", "openmpi5", "intel"])
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
