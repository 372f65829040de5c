"""The hosts of a PBS job: each once, although PBS names one host in several ways and places."""

from __future__ import annotations

from collections.abc import Iterable

from .hostnames import same_host, short_name


class Host:
    """A host of a job. None: not known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = 0  # in the node file
        self.cores: int | None = None
        self.gpus: int | None = None


class Hosts:
    """Hosts in the order of their first mention; "n1" and "n1.pbs.lab" are one host."""

    def __init__(self) -> None:
        self.all: list[Host] = []
        self._by_short_name: dict[str, list[Host]] = {}

    def find(self, name: str) -> Host:
        """Return the host of this name, new where it has not been mentioned before."""
        namesakes = self._by_short_name.setdefault(short_name(name), [])
        for host in namesakes:
            if same_host(host.name, name):
                return host
        host = Host(name)
        self.all.append(host)
        namesakes.append(host)
        return host


def read_nodefile(lines: Iterable[str]) -> Hosts:
    """Return the hosts of a node file with their numbers of lines, which need not be adjacent."""
    hosts = Hosts()
    for line in lines:
        if line.strip():
            hosts.find(line.strip()).lines += 1
    return hosts
