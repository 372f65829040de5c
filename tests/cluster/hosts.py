"""Several hosts on one machine: Linux network namespaces, each with its own host name, hosts file and sshd.

One process per host holds its namespaces: when the processes there have ended, interfaces, names and mounts are gone.
A guard process ends them when this one is killed.
"""
from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

# What a login by ssh gives: nothing of the caller's environment.
CLEAN_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(Path.home()), "LANG": "C.UTF-8"}
Self = TypeVar("Self", bound="Hosts")
MARK = "DDPKIT_HOSTS"  # in the environment of every holder: the folder of its hosts


def why_impossible() -> str | None:
    """Return the reason why hosts cannot be started here, or None where they can."""
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing (Debian package iproute2 or util-linux)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return None if probe.returncode == 0 else (
        f"network namespaces need root, or the user namespace that scripts/test.sh makes. {probe.stderr.strip()}")


class Hosts:
    """`count` hosts PREFIX1, PREFIX2, ... with the addresses SUBNET.1, SUBNET.2, ... on a common bridge.

    names: "right" gives every host a hosts file with all addresses; "debian" gives each host the line
    "127.0.1.1 own-name", as the Debian installer writes it; "none" leaves every name but localhost unresolvable.
    """

    def __init__(self, count: int = 3, *, prefix: str = "h", subnet: str = "10.79.1", names: str = "right") -> None:
        self.hosts = [f"{prefix}{i + 1}" for i in range(count)]
        dot, self._prefix = (":", "64") if ":" in subnet else (".", "24")
        self.address = {host: f"{subnet}{dot}{i + 1}" for i, host in enumerate(self.hosts)}
        self.names = names
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))

    def __enter__(self: Self) -> Self:
        guard = [sys.executable, "-I", __file__, str(self.folder)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._start_hosts()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_hosts(self) -> None:
        self._hold("switch", None)
        self._in("switch", ["ip", "link", "add", "br0", "type", "bridge"])
        self._in("switch", ["ip", "link", "set", "br0", "up"])
        for i, host in enumerate(self.hosts):
            holder = self._hold(host, self._hosts_file(host))
            end = f"v{i + 1}"
            self._in("switch", ["ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(holder)])
            self._in("switch", ["ip", "link", "set", end, "master", "br0", "up"])
            self._in(host, ["ip", "link", "set", "lo", "up"])
            one = f"{self.address[host]}/{self._prefix}"
            self._in(host, ["ip", "address", "add", one, "dev", "eth0", *["nodad"] * (":" in one)])
            self._in(host, ["ip", "link", "set", "eth0", "up"])

    def _hosts_file(self, host: str) -> Path:
        lines = ["127.0.0.1 localhost"]
        if self.names != "none":
            if self.names == "debian":
                lines.append(f"127.0.1.1 {host}")
            lines += [f"{self.address[h]} {h}" for h in self.hosts if self.names == "right" or h != host]
        path = self.folder / f"hosts.{host}"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _hold(self, host: str, hosts_file: Path | None) -> int:
        """Start the process that holds the namespaces of a host; return its process id."""
        script = ('hostname "$1"; if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi; echo $$ > "$3"; '
                  'exec sleep infinity </dev/null >/dev/null 2>&1')
        ready = self.folder / f"ready.{host}"
        command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-ec", script, "sh",
                   host, str(hosts_file or ""), str(ready)]
        process = subprocess.Popen(command, start_new_session=True, env={**os.environ, MARK: str(self.folder)})
        self._holders[host] = process
        wait_until(ready.exists, f"host {host} to come up", process)
        return process.pid

    def _in(self, host: str, command: Sequence[str]) -> None:
        subprocess.run(self.enter(host) + list(command), check=True, capture_output=True, text=True)

    def enter(self, host: str) -> list[str]:
        """Return the words before a command that run it on `host`."""
        return ["nsenter", "-t", str(self.pid(host)), "--net", "--uts", "--mount", "--"]

    def pid(self, host: str) -> int:
        """Return the id of the process that holds the namespaces of `host`."""
        return self._holders[host].pid

    def popen(self, host: str, command: Sequence[str], *, env: dict[str, str] | None = None,
              **options: object) -> subprocess.Popen[str]:
        """Start `command` on `host` with a login's environment plus `env`, in a separate process group."""
        return subprocess.Popen(self.enter(host) + list(command), env={**CLEAN_ENV, **(env or {})},  # type: ignore[call-overload,no-any-return]
                                text=True, start_new_session=True, **options)

    def set_link(self, host: str, state: str) -> None:
        """Cut the network of a host ("down") or mend it ("up")."""
        self._in(host, ["ip", "link", "set", "eth0", state])
        for other in self.hosts if state == "up" else ():  # else an ARP request of before may still fail: no route
            self._in(other, ["ip", "neigh", "flush", "dev", "eth0"])

    def start_sshd(self) -> Path:
        """Start an sshd on every host; return the path of an `ssh` command that logs in anywhere without a prompt."""
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        if sshd is None:
            raise RuntimeError("sshd is missing (Debian package openssh-server)")
        keys = self.folder / "keys"
        keys.mkdir(mode=0o700)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
        (keys / "authorized").write_text((keys / "user.pub").read_text())
        (keys / "sshd_config").write_text(
            f"HostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nUseDNS no\nMaxStartups 200\nSubsystem sftp internal-sftp\n")
        ssh = keys / "ssh"
        ssh.write_text("#!/bin/sh\nexec /usr/bin/ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR "
                       f"-o UserKnownHostsFile=/dev/null -i {keys}/user \"$@\"\n")
        ssh.chmod(0o755)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation folder, made by its service elsewhere
        for host in self.hosts:
            self._daemons.append(subprocess.Popen(
                [*self.enter(host), sshd, "-D", "-f", str(keys / "sshd_config")], start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            # Raw addresses: the agent must work where names do not resolve.
            login = [*self.enter(self.hosts[0]), str(ssh), self.address[host], "true"]
            wait_until(lambda command=login: subprocess.run(command, capture_output=True).returncode == 0,  # type: ignore[misc]
                       f"sshd on {host}")
        return ssh

    def close(self) -> None:
        end_hosts(self.folder)
        for process in [*self._daemons, *self._holders.values()]:
            process.wait()
        self._daemons.clear()
        self._holders.clear()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None


def end_hosts(folder: Path) -> None:
    """End every process on the hosts of this folder, and remove the folder."""
    mark, own = f"{MARK}={folder}".encode(), os.readlink("/proc/self/ns/net")
    networks: set[str] = set()
    while True:
        seen: list[tuple[int, str, bool]] = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie
                marked = mark in (process / "environ").read_bytes().split(b"\0")
                seen.append((int(process.name), os.readlink(process / "ns/net"), marked))
        networks.update(network for _, network, marked in seen if marked and network != own)
        # The holders last: with them another call, should this one be killed, finds the others.
        found = ([pid for pid, network, marked in seen if network in networks and not marked]
                 or [pid for pid, _, marked in seen if marked])
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None,
               seconds: float = 20, pause: float = 0.01) -> None:
    """Poll `condition()` until it is true; RuntimeError after `seconds` or when `process` has ended."""
    limit = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"waiting for {what}: the process ended with status {process.returncode}")
        if time.monotonic() > limit:
            raise RuntimeError(f"waiting for {what}: nothing after {seconds} s")
        time.sleep(pause)


@contextlib.contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End the process group of `process` at the end of the block."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def keep_up(hosts: Sequence[str], shell: Sequence[str]) -> None:
    """Print how to enter hosts that somebody uses by hand, and wait for ctrl-C."""
    print(f"{', '.join(hosts)} are up. A shell:\n  {shlex.join(shell)}\nctrl-C ends everything.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":  # the guard: it waits until the process that started the hosts of argv[1] has ended
    sys.stdin.read()
    end_hosts(Path(sys.argv[1]))
