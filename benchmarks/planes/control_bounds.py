"""What strangers and a hostile peer can take of a control port, and what thousands of links cost D.

    python benchmarks/planes/control_bounds.py [--links 2000] [--json FILE]

Three parts: the memory that P takes while strangers hold every place and a holder of the key sends messages without end
and reads no answer; how long an honest peer waits for its first answer beside a process that connects as fast as it
can; and the time and the descriptors of a D that connects to many ports at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from kvferry.transport.control.dialer import Connection, Dialer
from kvferry.transport.control.keys import Keys, greeting, new_secret
from kvferry.transport.control.listener import Listener
from kvferry.transport.host import raise_file_limit

REQUEST_BYTES, ANSWER_BYTES = 1 << 20, 64 << 10
MESSAGE = [b"kvferry", b"\0\7", bytes(300)]
STRANGERS, HOLDERS, HONEST, SERVERS = 400, 64, 30, 4
SECONDS = 10.0
"""How long the attack on the memory goes on."""


def serve(secret: str) -> None:
    """P: answers every message until its stdin ends."""
    raise_file_limit()
    listener = Listener("127.0.0.1", 0, keys=Keys(secret), max_message_bytes=REQUEST_BYTES)
    print(listener.port, flush=True)
    answer = [b"kvferry", b"\0\7", bytes(ANSWER_BYTES)]
    while sys.stdin not in select.select([listener.fd, sys.stdin], [], [], 1.0)[0]:
        for identity, _, _ in listener.receive():
            listener.send(identity, answer)


def flood(port: int) -> None:
    """A stranger that connects as fast as it can, with bytes that are no greeting."""
    while True:
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.2", 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # no port waits for its end
            sock.connect(("127.0.0.1", port))
            sock.send(bytes(8))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def first_answers(dialer: Dialer, connections: list[Connection]) -> None:
    """Returns when each connection has its answer."""
    for connection in connections:
        connection.send(MESSAGE)
    missing = set(connections)
    while missing:
        select.select([dialer.fd], [], [], 1.0)
        dialer.progress()
        lost = [connection for connection in missing if connection.lost]
        if lost:
            raise RuntimeError(lost[0].reason)
        missing -= {connection for connection in missing if connection.news and connection.receive()}


def memory(keys: Keys) -> float:
    """MiB by which P grows, at most."""
    with ExitStack() as stack:
        p = stack.enter_context(started("--serve", keys.secret))
        port = port_of(p)
        dialer = stack.enter_context(contextlib.closing(Dialer(keys, max_message_bytes=REQUEST_BYTES)))
        first_answers(dialer, [dialer.connect("127.0.0.1", port, key=keys.fingerprint)])
        before = most = resident_mib(p.pid)
        hello = greeting(keys.admitted[keys.fingerprint])
        holders: list[ssl.SSLSocket] = []
        for number in range(STRANGERS + HOLDERS):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.send(hello)
            if number < STRANGERS:
                tls = keys.of_d.wrap_socket(sock, do_handshake_on_connect=False)
                tls.setblocking(False)
                with suppress(ssl.SSLWantReadError):  # P has answered, and waits for the rest
                    tls.do_handshake()
            else:
                tls = keys.of_d.wrap_socket(sock)
                tls.recv(1)
                tls.setblocking(False)
                holders.append(tls)
            stack.enter_context(tls)
        ask = b"\0\0" + (300).to_bytes(4, "big") + bytes(300)
        endless = b"\0\0" + (REQUEST_BYTES).to_bytes(4, "big") + bytes(REQUEST_BYTES - 1)
        unsent = [memoryview(ask * 1000 if number % 2 else endless) for number in range(HOLDERS)]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for number, tls in enumerate(holders):
                with suppress(OSError):
                    unsent[number] = unsent[number][tls.send(unsent[number][: 16 << 10]) :] or memoryview(ask * 1000)
            most = max(most, resident_mib(p.pid))
        return most - before


def waits(keys: Keys) -> list[float]:
    """Seconds to the first answer of honest peers, one after the other, beside a flood."""
    found = []
    with ExitStack() as stack:
        port = port_of(stack.enter_context(started("--serve", keys.secret)))
        stack.enter_context(started("--flood", str(port)))
        time.sleep(1.0)
        for _ in range(HONEST):
            begun = time.perf_counter()
            with contextlib.closing(Dialer(keys, max_message_bytes=REQUEST_BYTES)) as dialer:
                first_answers(dialer, [dialer.connect("127.0.0.1", port, key=keys.fingerprint)])
            found.append(time.perf_counter() - begun)
    return sorted(found)


def links(keys: Keys, count: int) -> tuple[float, int]:
    """Seconds until a D has an answer over each of so many links, and the descriptors that they take."""
    with ExitStack() as stack:
        ports = [port_of(stack.enter_context(started("--serve", keys.secret))) for _ in range(SERVERS)]
        dialer = stack.enter_context(contextlib.closing(Dialer(keys, max_message_bytes=REQUEST_BYTES)))
        before, begun = len(os.listdir("/proc/self/fd")), time.perf_counter()
        step = 100  # a listener has places for 256 handshakes of one address
        made: list[Connection] = []
        for first in range(0, count, step):
            some = [
                dialer.connect("127.0.0.1", ports[n % SERVERS], key=keys.fingerprint, timeout=600)
                for n in range(first, min(first + step, count))
            ]
            first_answers(dialer, some)
            made += some
        return time.perf_counter() - begun, len(os.listdir("/proc/self/fd")) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.flood:
        flood(args.flood)
    from benchmarks.harness import report  # it imports torch, which the other processes do not need

    raise_file_limit()
    keys = Keys(new_secret())
    grown = memory(keys)
    waited = waits(keys)
    seconds, descriptors = links(keys, args.links)
    figures = {
        "memory_mib": round(grown, 1), "first_answer_ms_p50": round(statistics.median(waited) * 1e3, 1),
        "first_answer_ms_max": round(waited[-1] * 1e3, 1), "links": args.links, "links_seconds": round(seconds, 2),
        "links_descriptors": descriptors,
    }  # fmt: skip
    print(figures)
    report.write(args.json, {"ratios": {}, "figures": figures, "rows": []})


if __name__ == "__main__":
    main()
