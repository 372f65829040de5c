"""An attacker in the job's network, who knows no secret: talks to every port that the kit may listen on.

python attacker.py FOLDER FIRST LAST ADDRESS...    until FOLDER/stop exists; writes FOLDER/attacks: what it heard
"""
from __future__ import annotations

import itertools
import json
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.channel import Secret, Session

PEERS = [{"role": role, "index": index, "size": 2, "instance": "0" * 16}
         for role in ("rank", "agent", "notice", "doctor") for index in (0, 1, 7)]
SECRETS = [Secret(b""), Secret(b"guessed"), Secret(b"guessed", "launch 1")]


def talk(opened: socket.socket, data: bytes) -> bytes:
    opened.sendall(data)
    opened.settimeout(0.2)
    with suppress(OSError):
        return opened.recv(1 << 16)
    return b""


def attack(number: int, opened: socket.socket) -> bytes:
    """Say one thing; return what was answered."""
    peer = random.choice(PEERS)
    session = Session(random.choice(SECRETS), peer)
    hello = bytes(session.output)
    kind = number % 8
    if kind < 3:  # a proof with a wrong secret, or the server's own; then orders and reports
        heard = talk(opened, hello)
        session.output.clear()
        with suppress(Exception):
            session.feed(heard)
        own = json.loads(heard.partition(b"\n")[2] or b"{}").get("proof", "0" * 64) if heard else "0" * 64
        body = json.dumps({"proof": own if kind else "0" * 64}).encode()
        forged = [b'{"what":"saved"}', b'{"what":"failed","text":"forged","rank":0,"is_over":true}', b"{}"][kind]
        name = [b"notice", b"notice", b"end"][kind]
        return heard + talk(opened, b"proof %d -\n" % len(body) + body + b"%s %d -\n" % (name, len(forged)) + forged)
    return talk(opened, [hello[:20], hello * 3, random.randbytes(4097), b"GET / HTTP/1.1\r\n\r\n", b"{}\n"][kind - 3])


def flood(addresses: list[tuple[str, int]]) -> Iterator[None]:
    """Hold 100 silent connections."""
    held: list[socket.socket] = []
    for address in itertools.cycle(addresses):
        with suppress(OSError):
            held.append(socket.create_connection(address, timeout=0.5))
        if len(held) > 100:
            held.pop(0).close()
        yield


def main(folder: Path, first: int, last: int, hosts: list[str]) -> None:
    addresses = [(host, port) for host in hosts for port in range(first, last + 1)]
    heard, counts = set[bytes](), dict.fromkeys(map(str, addresses), 0)
    flooding = flood(addresses)
    for number in itertools.count():
        if (folder / "stop").exists():
            break
        address = addresses[(number // 8) % len(addresses)]
        next(flooding)
        with suppress(OSError), socket.create_connection(address, timeout=0.5) as opened:
            counts[str(address)] += 1
            heard.add(attack(number, opened))
    report = {"connections": sum(counts.values()), "heard": b"\n".join(heard).decode(errors="replace")}
    (folder / "attacks").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
