"""ddpkit launch --stage: ranks import from a copy on the node, or from the shared packages with one warning."""
from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.launchers import LAUNCH, ROOT
from tests.launch.shared_packages import PROGRAM, Shared, assert_one_warning, make_shared
from tests.matrix import with_all
from utils.tools.staging import room


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return make_shared(tmp_path)


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
    broken = shared.folder / "broken"
    broken.write_text("#!/no-such-shell\n")
    broken.chmod(0o755)
    _, output = shared.launch(status=127, program=(str(broken),))
    assert "broken could not be started" in output


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


@pytest.mark.parametrize("words", [
    ["1", "tests/launch/staged_program.py", "spawn", "forkserver", "workers-fork"],
    *with_all(["2", "tests/launch/training.py"])], ids=["processes", "two ranks"])
def test_a_training_has_the_same_bits_with_a_copy(words: list[str]) -> None:
    """Of this environment. The copy is kept where --stage has it, for the next run of this test, too."""
    def losses(*options: str) -> list[str]:
        done = subprocess.run([*LAUNCH, *options, "-n", *words], cwd=ROOT, capture_output=True, text=True,
                              timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0 and "not staged" not in done.stderr, done.stderr
        found = dict.fromkeys(re.findall(r"torch of all its processes: (.*)", done.stdout))
        assert all(("/ddpkit-stage-" in file) == (options == ("--stage",)) for file in found), done.stdout
        return sorted(re.findall(r"^(?:rank \d .*)?(?:final )?loss:? .*$", done.stdout, re.MULTILINE))

    shared = losses("--no-stage")
    assert shared and losses("--stage") == shared


@pytest.mark.parametrize("method", ["spawn", *with_all("forkserver", "fork")])
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


@pytest.mark.parametrize("lost", [False, True])
def test_a_restart_checks_the_copy_again(shared: Shared, lost: bool) -> None:
    """It is not made again, unless it has lost files in the meantime; a line says so when it was made."""
    (shared.packages / "heavy" / "part.py").write_text("")
    (shared.folder / "fails.py").write_text(textwrap.dedent(f"""\
        import json, os, sys
        from heavy import part
        if json.loads(os.environ["DDPKIT_RESTART"])["number"] == 0:
            if {lost}:
                os.unlink(part.__file__)
            sys.exit(5)
        print("imported", part.__file__)
        """))
    words = shared.words("-n", "1", "--independent", "--max-restarts", "1", program=(str(shared.folder / "fails.py"),))
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0 and f"imported {shared.root}" in done.stdout, done.stdout
    assert done.stdout.count("made in") == 1 + lost, done.stdout


def test_what_a_killed_process_left_of_another_copy_is_removed(shared: Shared) -> None:
    shared.launch()
    half = shared.root / "0123456789abcdef-half"
    (half / "lib").mkdir(parents=True)
    ranks, _ = shared.launch()
    assert shared.uses_copy(ranks) and not half.exists()


def test_what_a_killed_process_left_of_this_copy_is_removed(shared: Shared) -> None:
    """It has made the copy again, as files were lost, and was killed before it removed the old one."""
    shared.launch()
    lost = shared.root / f"{shared.copies[0].name}-abc-lost"
    (lost / "lib").mkdir(parents=True)
    ranks, _ = shared.launch()
    assert shared.uses_copy(ranks) and not lost.exists()


def test_what_a_killed_launch_left_of_archives_is_removed(shared: Shared) -> None:
    shared.launch()
    archives = shared.folder / "env" / ".ddpkit-stage"
    archive, = archives.glob("*.tar")
    archive.unlink()
    halves = [archives / f".{key}-abc" for key in (archive.stem, "0" * 24, "1" * 24)]
    for half in halves:
        half.mkdir()
        (half / "tar").write_text("half")
    with (archives / f"{'1' * 24}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another launch still packs
        ranks, _ = shared.launch()
    assert shared.uses_copy(ranks) and [half.exists() for half in halves] == [False, False, True]


def test_an_archive_that_was_sent_for_a_killed_launch_is_removed(shared: Shared) -> None:
    old, young = (shared.disk / f"ddpkit-stage-{number:016x}.tar" for number in (1, 2))
    for file in (old, young):
        file.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    shared.launch()
    assert not old.exists() and young.exists()


def test_a_copy_that_a_launch_checks_is_not_removed(shared: Shared) -> None:
    shared.launch()
    checked, = shared.copies
    os.utime(checked / ".ddpkit-complete", (0, 0))
    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 22\n")
    with (shared.root / f"{checked.name}.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shared.launch()
    assert checked in shared.copies and len(shared.copies) == 2


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


@pytest.mark.parametrize(("kind", "limit", "expected"), [
    ("tmpfs", "max", 75 << 10), ("tmpfs", str(80 << 10), 20 << 10), ("ramfs", str(800 << 10), 75 << 10),
    ("ext4", "1", 0)])
@pytest.mark.parametrize(("cgroup", "file"), [
    ("0::/job/step", "job/memory.max"), ("9:cpu:/\n4:memory,x:/job/step\n0::/", "memory/job/memory.limit_in_bytes")])
def test_a_copy_in_memory_leaves_most_of_it_to_the_ranks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limit: str, expected: int, cgroup: str, file: str,
) -> None:
    """Five copies of 6 GB in memory ended all on a machine of 24 GB. expected: 0: as much as is free on the disk."""
    device = os.stat(tmp_path).st_dev
    files = {"/proc/self/mountinfo": f"30 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw",
             "/proc/meminfo": "MemTotal: 400 kB\nMemFree: 1 kB\nMemAvailable: 300 kB",
             "/proc/self/cgroup": cgroup, f"/sys/fs/cgroup/{file}": limit}
    monkeypatch.setattr(room.process, "read", lambda path: files.get(path, "").encode())
    found = room.free_bytes(str(tmp_path))
    assert found == expected or not expected and found > 100 << 20


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


@pytest.mark.parametrize("name", ["SIGTERM", *with_all("SIGHUP", "SIGINT")])
def test_a_signal_while_packing_leaves_no_file(shared: Shared, name: str) -> None:
    (shared.packages / "heavy" / "data").write_bytes(bytes(300 << 20))
    launch = subprocess.Popen(shared.words("-n", "1", "--independent"), stderr=subprocess.DEVNULL,
                              preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # not that of nohup
    cache = shared.folder / "env" / ".ddpkit-stage"
    while not list(cache.glob(".*-*/tar")):
        time.sleep(0.002)
    launch.send_signal(signal.Signals[name])
    assert launch.wait(60) != 0
    assert {path.suffix for path in cache.iterdir()} <= {".lock", ".index"}


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
