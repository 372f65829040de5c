"""Files that the kit finds by itself: those that another user may change are not used."""
from __future__ import annotations

import ctypes
import grp  # the child of trusts() may not read the file of this module
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import killed_at_end
from tests.launch.launchers import ROOT
from tests.launch.shared_packages import assert_one_warning, make_shared
from tests.launch.users import ATTACKER, GROUP, VICTIM, Machine, machine
from tests.unit.doctor_findings import exchanged, places
from utils.channel import Channel, PeerServer
from utils.errors import LaunchError
from utils.host.trust import NotTrusted, may_trust
from utils.launch_protocol import REPORT
from utils.launchers import Placement
from utils.monitor.hangs.hang_report import write_hang_report
from utils.startup import secret
from utils.tools.cli import defaults
from utils.tools.doctor.check import Ranks
from utils.tools.doctor.checks.shared_storage import StorageCheck
from utils.tools.launch.bootstrap import module_command
from utils.tools.launch.event_loop import EventLoop
from utils.tools.launch.host_readiness import ReservedPort
from utils.tools.launch.launch_connection import secret_of, secret_of_ranks
from utils.tools.schedulers.job_spec import Job
from utils.tools.staging import ALSO, PACKAGES, Archive, StagingError
from utils.tools.staging.archive import line_of
from utils.tools.staging.unpack import make
from utils.tools.submission import submissions as records
from utils.tools.submission.submissions import git_state

__all__ = ["grp", "machine"]
needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")


# may_trust() --------------------------------------------------------------------------------------

USER = 61235  # neither root nor the attacker


def trusts(path: Path, *, in_container: bool = False) -> str:
    """Return what a user reads from a trusted file, or the message of the error."""
    (reading, writing), (wake_up, start) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            if in_container:
                ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
            os.write(writing, b"ready")
            os.read(wake_up, 1)
            text = os.read(may_trust(path, "name another"), 99)
        except BaseException as error:
            text = str(error).encode()
        os.write(writing, text)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    if in_container:
        Path(f"/proc/{child}/uid_map").write_text(f"{USER} {USER} 1")
    os.write(start, b"x")
    os.waitpid(child, 0)
    for descriptor in (wake_up, start):
        os.close(descriptor)
    with open(reading) as pipe:
        return pipe.read()


def test_own_file_of_a_sticky_folder_is_trusted(machine: Machine) -> None:
    assert trusts(machine.write(machine.folder / "mine", "text", USER)) == "text"
    assert trusts(machine.write(machine.folder / "roots", "text", 0)) == "text"


def test_link_to_an_own_file_is_trusted(machine: Machine) -> None:
    file = machine.write(machine.make("folder", USER) / "file", "text", USER)
    (machine.folder / "link").symlink_to("folder/../folder/file")
    (machine.folder / "second").symlink_to(machine.folder / "link")
    assert [trusts(machine.folder / name) for name in ("link", "second")] == ["text", "text"]
    machine.attack(["ln", "-s", str(file), "third"])
    assert f"because another user owns {machine.folder}/third" in trusts(machine.folder / "third")


def test_file_below_a_closed_folder_may_be_writable(machine: Machine) -> None:
    inner = machine.make("closed", USER, 0o700) / "project"
    inner.mkdir()
    inner.chmod(0o777)
    assert trusts(machine.write(inner / "file", "text", 0, 0o666)) == "text"


def test_container_in_which_root_has_no_id(machine: Machine) -> None:
    assert trusts(machine.write(machine.folder / "mine", "text", USER), in_container=True) == "text"
    others = machine.write(machine.folder / "others", "text", ATTACKER)
    assert "because another user owns" in trusts(others, in_container=True)


@pytest.mark.parametrize(("user", "mode", "folder_user", "folder_mode", "reason"), [
    (ATTACKER, 0o644, USER, 0o755, "another user owns {file} (owner 61234, mode 0644)"),
    (USER, 0o666, USER, 0o755, "other users may write {file} (owner 61235, mode 0666)"),
    (USER, 0o664, USER, 0o755, "other users may write {file} (owner 61235, mode 0664)"),
    (USER, 0o644, ATTACKER, 0o755, "another user owns {folder} (owner 61234, mode 0755)"),
    (USER, 0o644, USER, 0o777, "other users may write {folder} (owner 61235, mode 0777)"),
    (USER, 0o644, USER, 0o2775, "other users may write {folder} (owner 61235, mode 2775)")])
def test_refusal_is_a_sentence(machine: Machine, user: int, mode: int, folder_user: int, folder_mode: int,
                               reason: str) -> None:
    folder = machine.make("folder", folder_user, folder_mode, group=GROUP)
    file = machine.write(folder / "file", "text", user, mode)
    expected = f"{file} is not used, because {reason.format(file=file, folder=folder)}; name another"
    assert trusts(file) == expected


def test_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        may_trust(tmp_path / "loop", "")


def test_folder_such_as_tmp_is_trusted_as_a_parent_only(machine: Machine) -> None:
    os.close(may_trust(machine.folder, "", is_parent=True))
    with pytest.raises(NotTrusted, match="mode 1777"):
        may_trust(machine.folder, "")


# Defaults of options ------------------------------------------------------------------------------

@pytest.fixture
def program(machine: Machine) -> Path:
    """A program of the attacker that leaves a file where it has run."""
    bait = machine.make("bait", ATTACKER, 0o777)
    text = f"#!/bin/sh\nid >> '{bait}/log'\nexec {sys.executable} \"$@\"\n"
    return machine.write(bait / "python", text, ATTACKER, 0o755)


COMMANDS = (["launch", "--dry-run", "t.py"], ["submit", "run", "--site", "generic-slurm", "--dry-run", "t.py"],
            ["sites", "config"])


def project_of(machine: Machine, folder: Path, program: Path, user: int) -> str:
    """Write a project's file which names the program, and a profile with a line for the job script."""
    profile = machine.write(folder / "site.yaml", "title: x\nscheduler: slurm\nsetup: [echo planted]\n", user)
    return f'[tool.ddpkit]\npython = "{program}"\nsite = "{profile}"\naccount = "abc"\n'


@needs_toml
@pytest.mark.parametrize("place", ["above a folder of the victim", "in a clone of the attacker"])
def test_project_file_of_another_user_is_not_read(machine: Machine, program: Path, place: str) -> None:
    folder = machine.folder if "above" in place else machine.make("clone", ATTACKER)
    (folder / ".git").mkdir()
    machine.write(folder / "pyproject.toml", project_of(machine, folder, program, ATTACKER), ATTACKER)
    work = machine.make("work", VICTIM) if "above" in place else folder
    machine.write(work / "t.py", "print('hello')\n", VICTIM)
    for words in COMMANDS:
        done = machine.kit(*words, cwd=work)
        assert done.stderr.count(f"{folder}/pyproject.toml is not used, because another user owns ") == 1, done
        assert "abc" not in done.stdout and "planted" not in done.stdout
    assert not (program.parent / "log").exists()


def test_project_file_of_another_user_without_a_table_is_no_warning(machine: Machine) -> None:
    machine.write(machine.folder / "pyproject.toml", "[project]\nname = 'other'\n", ATTACKER)
    assert not machine.kit("sites", "config", cwd=machine.folder).stderr


@needs_toml
def test_own_project_file_runs_nothing_until_it_is_trusted(machine: Machine, program: Path) -> None:
    work = machine.make("work", VICTIM)
    file = machine.write(work / "pyproject.toml", project_of(machine, work, program, VICTIM), VICTIM)
    machine.write(work / "t.py", "print('hello')\n", VICTIM)
    for words in COMMANDS:
        done = machine.kit(*words, cwd=work)
        assert f"Read it, then run: ddpkit sites trust '{file}'" in done.stderr and "planted" not in done.stdout
    assert "abc" in done.stdout  # an account runs nothing
    assert not (program.parent / "log").exists()

    done = machine.kit("sites", "trust", cwd=work, umask=0)
    assert f"{file}: trusted" in done.stdout, done
    assert oct((machine.home / ".config/ddpkit/trusted").stat().st_mode) == oct(0o100600)
    done = machine.kit("launch", "--dry-run", "t.py", cwd=work)
    assert "sites trust" not in done.stderr and (program.parent / "log").exists()
    file.write_text(file.read_text() + "stage = true\n")
    assert "sites trust" in machine.kit("sites", "config", cwd=work).stderr


@needs_toml
def test_project_file_is_looked_for_up_to_the_repository(machine: Machine) -> None:
    outer = machine.make("outer", VICTIM)
    machine.write(outer / "pyproject.toml", '[tool.ddpkit]\naccount = "outer"\n', VICTIM)
    work = machine.make("outer/inner", VICTIM)
    assert "outer" not in machine.kit("sites", "config", cwd=work).stdout.splitlines()[1].split()
    machine.make("outer/.git", VICTIM)
    assert "outer" in machine.kit("sites", "config", cwd=work).stdout.splitlines()[1].split()
    machine.make("outer/inner/.git", VICTIM)
    assert "outer" not in machine.kit("sites", "config", cwd=work).stdout.splitlines()[1].split()


def test_trust_of_a_file_that_others_may_write_is_refused(machine: Machine) -> None:
    file = machine.write(machine.folder / "pyproject.toml", "[tool.ddpkit]\npython = 'x'\n", VICTIM, 0o666)
    done = machine.kit("sites", "trust", cwd=machine.folder)
    assert done.returncode == 1 and f"other users may write {file} (owner root, mode 0666)" in done.stderr


def test_defaults_of_the_system_count_only_if_they_are_roots(machine: Machine, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    file = machine.write(machine.folder / "ddpkit.yaml", "account: abc\npython: /planted\n", ATTACKER)
    monkeypatch.setattr(defaults, "SYSTEM_FILE", str(file))
    environ = {"XDG_CONFIG_HOME": str(machine.home)}
    monkeypatch.chdir(machine.home)
    assert not defaults.load(environ)
    assert f"{file} is not used, because another user owns {file}" in capsys.readouterr().err
    os.chown(file, 0, 0)
    assert {name: value.value for name, value in defaults.load(environ).items()} == {
        "account": "abc", "python": "/planted"}


# Copies of packages on a node ---------------------------------------------------------------------

# Another folder in the place of the victim's, as soon as there is one.
SWAPS = 'while ! mv "$0" "$0.away" 2> /dev/null; do sleep 0.001; done; mkdir -m 777 "$0"'


@pytest.mark.parametrize(("user", "mode"), [(ATTACKER, 0o1777), (VICTIM, 0o777), (VICTIM, 0o2770)])
def test_stage_folder_that_others_can_replace_is_not_used(machine: Machine, user: int, mode: int) -> None:
    (made := machine.make("shared", VICTIM)).chmod(0o755)
    shared = make_shared(made)
    shared.disk.rmdir()
    shared.disk = machine.make("stage", user, mode, group=GROUP)
    attacker = subprocess.Popen(["bash", "-c", SWAPS, str(shared.root)], user=ATTACKER, group=ATTACKER,
                                extra_groups=[GROUP], cwd="/")
    try:
        ranks, output = shared.launch()
    finally:
        attacker.kill()
        attacker.wait()
    assert shared.uses_shared(ranks) and not list(shared.disk.iterdir())
    assert_one_warning(output, f"{shared.disk} is not used, because ")
    assert "name another folder with --stage-dir" in output


def test_own_stage_folder_is_made_for_this_user_whatever_the_umask(machine: Machine) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    shared.disk = machine.folder / "new" / "stage"
    before = os.umask(0o002)
    try:
        ranks, output = shared.launch()
    finally:
        os.umask(before)
    assert shared.uses_copy(ranks) and "warning" not in output, output
    assert [oct(path.stat().st_mode & 0o777) for path in (shared.disk.parent, shared.disk)] == ["0o755", "0o755"]


def packed(path: Path, members: list[tuple[str, str, int]]) -> Archive:
    """Write an archive of members: name, target of a link or "", mode; a name with a slash at its end is a folder."""
    digest = hashlib.sha256()
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, target, mode in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode, info.linkname = mode, target
            info.type = tarfile.SYMTYPE if target else tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            tar.addfile(info)
            digest.update(line_of(info))
    return Archive("key", str(path), path.stat().st_size, len(members), digest.hexdigest(), str(path.parent))


def test_archive_does_not_write_through_its_links(machine: Machine) -> None:
    outside, root = machine.make("outside", VICTIM), machine.make("root", VICTIM, 0o700)
    for name in ("link/planted", "link/./planted", "lib/../link/planted"):
        archive = packed(machine.home / "tar", [("lib/", "", 0o755), ("link", str(outside), 0o777), (name, "", 0o644)])
        with pytest.raises(StagingError, match="planted, (and above it no folder|which leads out)"):
            make(str(root), str(root / "key"), archive, "")
        assert not list(outside.iterdir()) and not list(root.iterdir())


def test_archive_gives_no_rights_of_other_users(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine.make("root", VICTIM, 0o700)
    archive = packed(machine.home / "tar", [*[(f"{name}/", "", 0o755) for name in ("bin", "lib", PACKAGES, ALSO)],
                                            ("bin/python", "", 0o6755)])
    modes = []

    def start(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        modes.append(os.stat(words[0]).st_mode)
        return subprocess.CompletedProcess(words, 0, f"{root}/key", "")
    monkeypatch.setattr(subprocess, "run", start)
    make(str(root), str(root / "key"), archive, "")
    assert [oct(mode & 0o7777) for mode in modes] == ["0o755"]


@pytest.mark.parametrize(("name", "means"), [("tar", "owner"), ("json", "mode"), ("json", "owner"), ("index", "mode")])
def test_kept_archive_of_another_user_is_not_used(machine: Machine, name: str, means: str) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    if name == "index":
        time.sleep(2.1)  # that of younger files is not kept
    assert "staging: packed" in shared.launch()[1]
    file, = (shared.folder / "env" / ".ddpkit-stage").glob(f"*.{name}")
    if means == "owner":
        os.chown(file, ATTACKER, ATTACKER)
    else:
        file.chmod(0o666)
    shutil.rmtree(shared.root)
    ranks, output = shared.launch()
    assert shared.uses_copy(ranks) and ("staging: packed" in output) == (name != "index")
    file, = (shared.folder / "env" / ".ddpkit-stage").glob(f"*.{name}")
    assert (file.stat().st_uid, oct(file.stat().st_mode & 0o777)) == (VICTIM, "0o644")


def test_lock_of_an_archive_follows_no_link(machine: Machine) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    shared.launch()
    lock, = (shared.folder / "env" / ".ddpkit-stage").glob("*.lock")
    lock.unlink()
    lock.symlink_to(machine.write(machine.home / "precious", "text", VICTIM))
    lock.with_suffix(".tar").unlink()
    shared.launch(XDG_CACHE_HOME=str(machine.home))
    assert (machine.home / "precious").read_text() == "text"


# Reservations of ports ----------------------------------------------------------------------------

HOLDS = """import os, socket, sys
held = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(31100, 31140)]
for port, name in enumerate(held, 31100):
    name.bind(f"\\0ddpkit-port-{port}")
os.setgroups([]), os.setuid(int(sys.argv[1]))
owned = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(31140, 31180)]
for port, name in enumerate(owned, 31140):
    name.bind(f"\\0ddpkit-port-{port}")
print("held", flush=True)
sys.stdin.read()
"""


def test_names_of_ports_that_another_user_holds_stop_no_launch(machine: Machine, capfd: pytest.CaptureFixture[str],
                                                              ) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(ATTACKER)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout and attacker.stdout.readline() == b"held\n"
        port = ReservedPort(range(31140, 31180))
        assert 31140 <= port.port < 31180
        assert f"port {port.port} of " in (err := capfd.readouterr().err) and f"user {ATTACKER} reserves it" in err
        port.close()
        with pytest.raises(LaunchError, match="no port of 31101 to 31139 is free"):
            ReservedPort(range(31101, 31140))  # of another launch of this user
        ReservedPort(range(31180, 31190)).close()
        assert not capfd.readouterr().err
        attacker.communicate()


# The secret of the ranks of one host ---------------------------------------------------------------

def test_names_of_secrets_that_another_user_has_taken_are_stepped_around(
        machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "SHARED_FOLDER", folder := machine.make("shm", 0, 0o1777))
    here = Placement("srun", 0, 2, 0, 2)
    first = secret.find_secret({}, here, "srun:7:0")
    [path] = folder.iterdir()
    prefix = path.name[:-24]
    for name in (f"ddpkit-{VICTIM}", prefix, f"{prefix}{'0' * 24}"):
        os.utime(machine.write(folder / name, "known to another user", ATTACKER, 0o600), (0, 0))
    own = machine.write(folder / "known", "known to another user", VICTIM, 0o600)
    os.link(own, folder / f"{prefix}1")
    (folder / f"{prefix}2").symlink_to(own)
    machine.make(f"shm/{prefix}3", ATTACKER)
    assert secret.find_secret({}, here, "srun:7:0") == first
    path.unlink()
    second = secret.find_secret({}, here, "srun:7:0")
    assert len(second) == 64 and second != first and secret.find_secret({}, here, "srun:7:0") == second
    assert not caplog.text


# The secret of agents -------------------------------------------------------------------------------

class Impostor(PeerServer):
    """Orders agents that know its secret to run a command of the attacker."""

    def receive(self, peer: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "agent":
            words = [["sh", "-c", "id -u > ran"], {}]
            peer.send({"kind": "start", "launch_id": "1", "host": "", "environ": {REPORT: "", **os.environ},
                       "output_dir": "", "watched_ranks": 0, "hang_limit": 0.0, "processes": [words]})


@pytest.mark.parametrize(("user", "mode", "reason"), [(VICTIM, 0o777, "other users may write "),
                                                      (ATTACKER, 0o755, "another user owns ")])
def test_agent_takes_no_secret_that_another_user_has_put_there(machine: Machine, user: int, mode: int,
                                                               reason: str) -> None:
    """The path is on the command line, which all can read; of a launch that has ended, its port is free."""
    shared = machine.make("shared", user, mode)
    path = machine.write(shared / ".ddpkit-0123456789ab", "of the victim", VICTIM, 0o600)
    assert machine.attack(["bash", "-c", f"rm -f '{path}'; echo -n known > '{path}'"]).returncode == 0
    with EventLoop() as loop, closing(socket.create_server(("127.0.0.1", 0))) as listener:
        with closing(Impostor(listener, loop, secret_of(secret_of_ranks("known")), 1)):
            port = str(listener.getsockname()[1])
            words = module_command(sys.executable, "agent", ["127.0.0.1", port, "0", str(path)])
            agent = subprocess.Popen(words, cwd=machine.home, stderr=subprocess.PIPE, text=True)
            with killed_at_end(agent):
                limit = time.monotonic() + 30
                while agent.poll() is None and not (machine.home / "ran").exists() and time.monotonic() < limit:
                    loop.run_once(0.1)
    assert not (machine.home / "ran").exists()
    assert agent.returncode == 1 and agent.stderr
    assert f"{path} is not used, because {reason}" in agent.stderr.read()


def test_secret_of_agents_is_in_no_folder_that_others_can_replace(machine: Machine) -> None:
    """Where none is left, the launch says of each whose it is."""
    work, home = machine.make("work", VICTIM, 0o777), machine.make("foreign", ATTACKER)
    machine.write(work / "t.py", "", VICTIM)
    machine.write(machine.home / "pbs_tmrsh", "#!/bin/sh\nexit 1\n", VICTIM, 0o755)
    hosts = machine.write(machine.home / "hosts", f"{socket.gethostname()}\n", VICTIM)
    done = machine.kit("launch", "--launcher", "pbs_tmrsh", "-n", "1", "t.py", cwd=work, HOME=str(home),
                       PATH=f"{machine.home}:{os.environ['PATH']}", PBS_JOBID="1.head", PBS_NODEFILE=str(hosts),
                       PBS_TASKNUM="1", PBS_JOBCOOKIE="1", PBS_MOMPORT="1")
    assert done.returncode == 1 and f"{home} is not used, because another user owns {home}" in done.stderr, done
    assert f"{work} is not used, because other users may write {work}" in done.stderr
    assert not [*work.glob(".ddpkit-*"), *home.iterdir()]


# The remote shell of an mpiexec --------------------------------------------------------------------

HYDRA = """#!/bin/bash
case "$*" in *--version*) echo "HYDRA build details: Version: 4.2"; exit;; esac
setpriv --reuid=61234 --regid=61234 --clear-groups bash -c '
    shopt -s nullglob
    for folder in "$TMPDIR"/launch-*; do
        mv "$folder" "$folder.away"; mkdir -m 755 "$folder"
        printf "#!/bin/sh\\nid -u > ran\\n" > "$folder/remote-shell"; chmod 755 "$folder/remote-shell"
    done' 2> /dev/null
while [ "$1" != -launcher-exec ]; do shift; done
exec "$2" n2 true
"""


def test_remote_shell_of_mpiexec_is_in_no_folder_that_others_can_replace(machine: Machine) -> None:
    work, temporary = machine.make("work", VICTIM), machine.make("shared", VICTIM, 0o777)
    machine.write(work / "t.py", "", VICTIM)
    machine.write(machine.home / "mpiexec", HYDRA, VICTIM, 0o755)
    machine.write(machine.home / "pbs_tmrsh", "#!/bin/sh\necho reached $1\n", VICTIM, 0o755)
    hosts = machine.write(machine.home / "hosts", f"{socket.gethostname()}\nn2\n", VICTIM)
    done = machine.kit("launch", "--launcher", "mpiexec", "--no-watch", "t.py", cwd=work, TMPDIR=str(temporary),
                       PATH=f"{machine.home}:{os.environ['PATH']}", PBS_JOBID="1.head", PBS_NODEFILE=str(hosts),
                       PBS_TASKNUM="1", PBS_JOBCOOKIE="1", PBS_MOMPORT="1")
    assert "reached n2" in done.stdout and not (work / "ran").exists(), done
    assert not list(temporary.iterdir())


# The hosts that jobs avoid -------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["file", "fifo", "link"])
def test_bad_hosts_of_another_user_are_not_read(machine: Machine, kind: str) -> None:
    machine.make("jobs-out", VICTIM).chmod(0o1777)
    records.write(machine.make("jobs-out/train-1", VICTIM), records.new_record(Job(("train.py",)), "pbs", "x"), ["11"])
    listed = machine.write(machine.home / "listed", "n7\n", VICTIM)
    make = {"file": "echo n7 > {0}", "fifo": "mkfifo {0}", "link": f"ln -s '{listed}' {{0}}"}[kind]
    assert machine.attack(["bash", "-c", make.format("jobs-out/bad-hosts.txt")]).returncode == 0
    done = machine.kit("submit", "list")
    assert "11" in done.stdout and "n7" not in done.stdout + done.stderr, done
    warning = r"bad-hosts\.txt belongs to user \d+, and the hosts that it lists are not avoided"
    assert re.search(warning, done.stderr), done


# The folder in which doctor tries a file system ----------------------------------------------------

@pytest.mark.parametrize("attack", ["link", "folder", "exchange"])
def test_storage_check_follows_no_link_of_another_user(machine: Machine, monkeypatch: pytest.MonkeyPatch,
                                                       attack: str) -> None:
    theirs = machine.write(machine.make("results", VICTIM) / "mark", "text", VICTIM).parent
    (theirs / "0").mkdir()
    kept = [machine.write(theirs / "0" / name, "text", VICTIM) for name in ("mark", "large", "small-0", "other")]
    scratch = machine.make("scratch", VICTIM, 0o777)
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.chdir(machine.home)
    attacks = iter({
        "link": ["ln -s '{theirs}' .doctor-{token}", ":"],
        "folder": ["mkdir -m 777 .doctor-{token}; ln -s '{theirs}/0' .doctor-{token}/0", ":"],
        "exchange": [":", "mv .doctor-{token} away; ln -s '{theirs}' .doctor-{token}"]}[attack])

    def values(sent: list[Any]) -> list[Any]:
        tokens.extend(sent[:1])
        command = next(attacks, ":").format(token=tokens[0], theirs=theirs)
        machine.attack(["bash", "-c", f"cd '{scratch}'; {command}"])
        return sent
    tokens: list[str] = []
    [here] = everyone = tuple(places("h1"))
    [facts] = exchanged([StorageCheck().collect(Ranks(here, everyone))], values)
    assert [path.read_text() for path in kept] == ["text"] * 4 and len(list(theirs.iterdir())) == 2
    assert ("another user owns .doctor-" in facts.folders[1]["problem"]) == (attack == "folder")


# Programs of a folder in which the kit runs -------------------------------------------------------

def planted(folder: Path) -> str:
    """Return the lines of a module, or of a script, that leaves a file where it has run."""
    return f"open({str(folder / 'ran')!r}, 'w').close(); raise SystemExit('planted')\n"


def test_modules_of_the_users_folder_are_not_those_of_doctor(machine: Machine) -> None:
    installed = machine.make("site", VICTIM) / "ddpkit"
    shutil.copytree(ROOT / "utils", installed, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "jobs", installed / "jobs")
    work = machine.make("work", VICTIM)
    for name in ("json", "typing", "torch", "ddpkit", "utils", "argparse"):
        machine.write(work / f"{name}.py", planted(machine.folder), VICTIM)
    machine.write(machine.make("bin", VICTIM) / "qsub", "#!/bin/sh\necho 101.head\n", VICTIM, 0o755)
    environ = {**os.environ, "PATH": f"{machine.folder}/bin:{os.environ['PATH']}"}
    words = [sys.executable, str(installed), "submit", "doctor", "--site", "generic-pbs", "--no-check", "--launcher",
             "ssh", "--ntasks-per-node", "1", "--", "--quick"]
    done = subprocess.run(words, cwd=work, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done
    [script] = (work / "jobs-out").glob("*/job.sh")
    machine.write(work / "hosts", os.uname().nodename, VICTIM)
    done = subprocess.run(["bash", str(script)], cwd=work, text=True, capture_output=True, timeout=90, env={
        **environ, "PBS_JOBID": "101.head", "PBS_NODEFILE": str(work / "hosts")})
    assert "doctor: good: 1 rank on 1 host" in done.stdout, done
    assert not (machine.folder / "ran").exists()


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean", "filter.x.process", "core.hooksPath",
                                     "submodule"])
def test_settings_of_a_clone_run_nothing(tmp_path: Path, setting: str) -> None:
    clone, hooks = tmp_path / "clone", tmp_path / "hooks"
    hooks.mkdir()
    for name in ("program", "post-index-change", "post-checkout"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\ncat\n")
        (hooks / name).chmod(0o755)

    def git(*words: str, cwd: Path = clone) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", "-c", "protocol.file.allow=always", *words],
                       cwd=cwd, check=True, capture_output=True)
    git("init", str(clone), cwd=tmp_path)
    (clone / "train.py").write_text("one\n")
    (clone / ".gitattributes").write_text("*.py filter=x\n")
    git("add", ".")
    git("commit", "-m", "first")
    if setting == "submodule":
        git("submodule", "add", str(clone), "inner")
        git("commit", "-m", "second")
        git("config", "core.fsmonitor", str(hooks / "program"), cwd=clone / "inner")
    else:
        git("config", setting, str(hooks if "hooks" in setting else hooks / "program"))
    state = git_state(clone)
    assert state is not None and state["dirty"] is False
    (clone / "train.py").write_text("two\n")
    state = git_state(clone)
    assert state is not None and state["dirty"] is True
    assert not (tmp_path / "ran").exists()


def test_submission_of_another_user_is_neither_listed_nor_found(machine: Machine) -> None:
    jobs = machine.make("jobs-out", VICTIM)
    jobs.chmod(0o1777)
    for user, job_id in ((VICTIM, "11"), (ATTACKER, "12")):
        folder = machine.make(f"jobs-out/train-{job_id}", user)
        records.write(folder, records.new_record(Job(("train.py",)), "pbs", "x"), [job_id])
        for path in (folder, folder / records.FILE):
            os.chown(path, user, -1)
    assert [record.job_ids for record in records.read_all(jobs)] == [("11",)]


def test_hang_report_follows_no_link(machine: Machine) -> None:
    """Its folder is hang-DATE-TIME in the working folder, which others may foresee."""
    folder, theirs = machine.make("hang-20261129-120000", ATTACKER), machine.write(machine.folder / "own", "x", VICTIM)
    (folder / f"rank0-{socket.gethostname()}.txt").symlink_to(theirs)
    write_hang_report(0, str(folder), "the ranks hang")
    assert theirs.read_text() == "x"
