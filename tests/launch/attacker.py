"""An attacker in the job's network, who knows no secret: talks to every port that the kit may listen on.

python attacker.py FOLDER FIRST LAST ADDRESS...    until FOLDER/stop exists; writes FOLDER/attacks: what it heard
The attacker reads FOLDER/recording, all that has passed an interface of the job, and sends it again.
"""
from __future__ import annotations

import itertools
import json
import os
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.channel import Secret, Session

FOLDER, HOSTS = Path(sys.argv[1]), sys.argv[4:]
INSTANCE = b"a" * 16
PEER = {"role": "rank", "index": 1, "size": 2, "instance": INSTANCE.decode()}
GUESSED = Secret(b"guessed")
FAILED = {"kind": "notice", "what": "failed", "text": "forged", "rank": 0, "is_over": True}
ATTACKS: dict[str, Callable[[socket.socket], bytes]] = {}
HELD: list[socket.socket] = []  # silent connections
FRAME = re.compile(rb'ddp\n(.{4})\{', re.DOTALL)
KIND = re.compile(rb'"kind":"(\w+)"')


class Forger(Session):
    """Goes on whatever the server has proved."""

    def _check_proof(self, message: dict[str, Any], whose: str) -> None:
        pass


def listen(opened: socket.socket, data: bytes, seconds: float = 0.05) -> bytes:
    opened.settimeout(seconds)
    with suppress(OSError):
        opened.sendall(data)
        return opened.recv(1 << 16)
    return b""


def hello(**changed: object) -> bytes:
    return bytes(Session(GUESSED, {**PEER, **changed}).output)


def frame(**fields: object) -> bytes:
    body = json.dumps(fields, separators=(",", ":")).encode()
    return b"ddp\n" + struct.pack(">I", len(body)) + body


def proof(text: str) -> bytes:
    return frame(kind="proof", proof=text)


def fields(heard: bytes) -> dict[str, Any]:
    return json.loads(heard[8:] or b'{"nonce": "", "proof": ""}')  # type: ignore[no-any-return]


def recorded(*kinds: bytes) -> list[bytes]:
    """Messages of the job's own processes, oldest first."""
    path = FOLDER / "recording"
    data = path.read_bytes()[-(1 << 22):] if path.exists() else b""
    ends = ((one.start(), one.start() + 8 + int.from_bytes(one[1], "big")) for one in FRAME.finditer(data))
    found = [data[start:end] for start, end in ends]
    foreign = (one for one in found if INSTANCE not in one)
    own = [one for one in foreign if (kind := KIND.search(one)) and (not kinds or kind[1] in kinds)]
    return own or [frame(kind="none")]


def forge(secret: Secret = GUESSED, *messages: dict[str, Any], **changed: object) -> Callable[[socket.socket], bytes]:
    """Say hello, prove a guessed secret, and go on as if that had been right."""
    def attack(opened: socket.socket) -> bytes:
        session = Forger(secret, {**PEER, **changed})
        heard = listen(opened, bytes(session.output))
        session.output.clear()
        with suppress(Exception):
            session.feed(heard)
        later = b"".join(map(session.encode, messages or (FAILED,)))
        return heard + listen(opened, bytes(session.output) + later)
    return attack


def say(make: Callable[[], bytes]) -> Callable[[socket.socket], bytes]:
    return lambda opened: listen(opened, make())


def hold(data: bytes) -> Callable[[socket.socket], bytes]:
    """Say a part, and keep the connection."""
    def attack(opened: socket.socket) -> bytes:
        HELD.append(opened.dup())
        opened.sendall(data)
        while len(HELD) > 100:
            HELD.pop(0).close()
        return b""
    return attack


def flood(data: bytes, *, reset: bool = False) -> Callable[[socket.socket], bytes]:
    """Connect 30 times more, as fast as possible."""
    def attack(opened: socket.socket) -> bytes:
        for _ in range(30):
            another = socket.create_connection(opened.getpeername(), timeout=0.5)
            with suppress(OSError):
                another.sendall(data)
            if reset:
                another.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                another.close()
            else:
                hold(b"")(another)
                another.close()
        return b""
    return attack


def one_byte_at_a_time(opened: socket.socket) -> bytes:
    for byte in hello()[:5]:
        opened.sendall(bytes([byte]))
        time.sleep(0.01)
    return b""


def send_back(opened: socket.socket) -> bytes:
    heard = listen(opened, hello())
    return heard + listen(opened, heard)


def own_proof(opened: socket.socket) -> bytes:
    heard = listen(opened, hello())
    return heard + listen(opened, proof(fields(heard)["proof"]))


def parallel(opened: socket.socket, host: str = "") -> bytes:
    """Let a second session with the server, or with another one, answer the challenge of the first."""
    address = opened.getpeername()
    heard = listen(opened, hello())
    with socket.create_connection((host or address[0], address[1]), timeout=0.5) as second:
        other = listen(second, hello().replace(b'"nonce":"', b'"nonce":"' + fields(heard)["nonce"].encode())[:600])
        other += listen(second, re.sub(rb'"nonce":"\w+"', b'"nonce":"%s"' % fields(heard)["nonce"].encode(), hello()))
    found = re.findall(rb'"proof":"(\w+)"', other) or [b"0" * 64]
    return heard + other + listen(opened, proof(found[0].decode()))


ATTACKS |= {
    # Proof
    "no proof": lambda opened: listen(opened, hello() + frame(kind="notice", what="saved")),
    "wrong secret": forge(), "empty secret": forge(Secret(b"")), "other label": forge(Secret(b"guessed", "launch 1")),
    "other role": forge(role="agent"), "unknown role": forge(role="root"), "other size": forge(size=3),
    "old version": say(lambda: hello().replace(b'"version":3', b'"version":2')),
    # Replay
    "hello again": say(lambda: recorded(b"hello")[-1]),
    "hello and proof again": say(lambda: recorded(b"hello")[-1] + recorded(b"proof")[-1]),
    "session again": say(lambda: b"".join(recorded()[:40])),
    "message again": say(lambda: recorded(b"hello")[-1] + recorded(b"report", b"beat", b"notice", b"connected")[-1]),
    "messages in another order": say(lambda: b"".join(reversed(recorded()[:40]))),
    # Reflection and relay
    "challenge sent back": send_back, "proof of the server sent back": own_proof, "parallel sessions": parallel,
    "challenge of another host": lambda opened: parallel(opened, HOSTS[opened.getpeername()[0] == HOSTS[0]]),
    "changed message": say(lambda: b"".join(recorded()[:40]).replace(b":0", b":1")),
    # Half messages
    "silence": hold(b""), "half a header": hold(b"ddp\n\0"), "half a body": hold(hello()[:60]),
    "a byte at a time": one_byte_at_a_time, "a length without a body": hold(b"ddp\n\0\0\1\0"),
    "4,097 bytes": say(lambda: b"a" * 4097),
    # Floods
    "flood of silence": flood(b""), "flood of half messages": flood(hello()[:40]),
    "flood of resets": flood(hello(), reset=True), "flood of garbage": flood(os.urandom(4096)),
    "flood of greetings": flood(hello()), "flood of proofs": flood(hello() + proof("0" * 64)),
    # Forgery
    "forged report": forge(GUESSED, {"kind": "report", "value": {"error": "forged"}}),
    "forged failure": forge(GUESSED, FAILED, role="notice"),
    "forged end": forge(GUESSED, {"kind": "end", "cause": "forged"}),
    "forged save": forge(GUESSED, {**FAILED, "what": "saved"}, role="notice"),
    "forged rank 0": forge(GUESSED, {"kind": "failed", "cause": "forged"}, index=0),
    "forged index": forge(GUESSED, {"kind": "failed", "cause": "forged"}, index=7),
    # Other programs
    "HTTP": say(lambda: b"GET / HTTP/1.1\r\n\r\n"), "SSH": say(lambda: b"SSH-2.0-OpenSSH_9.2\r\n"),
    "TLS": say(lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(506)),
    "JSON": say(lambda: b'{"token": null, "join": 1}\n'),
}


def attack_port(address: tuple[str, int], first: int, heard: set[bytes], counts: Counter[str]) -> None:
    """Try all attacks in turn, again and again. first: the number of the one to begin with."""
    names = itertools.cycle([*ATTACKS][first:] + [*ATTACKS][:first])
    while not (FOLDER / "stop").exists():
        name = next(names)
        with suppress(OSError), socket.create_connection(address, timeout=0.5) as opened:
            counts[name] += 1
            heard.add(ATTACKS[name](opened))
        time.sleep(0.05)  # the job shares its cores with the attacker here


def main(first: int, last: int) -> None:
    heard, counts = set[bytes](), Counter(dict.fromkeys(ATTACKS, 0))
    turns = list(itertools.product(HOSTS, range(first, last + 1), range(0, len(ATTACKS), 8)))
    with ThreadPoolExecutor(len(turns)) as pool:
        for host, port, begin in turns:
            pool.submit(attack_port, (host, port), begin, heard, counts)
    report = {"attacks": counts, "heard": b"\n".join(heard).decode(errors="replace")}
    (FOLDER / "attacks").write_text(json.dumps(report))


if __name__ == "__main__":
    os.nice(19)  # an attacker has cores of its own
    main(int(sys.argv[2]), int(sys.argv[3]))
