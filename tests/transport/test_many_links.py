"""A D with more P ranks than libzmq has sockets, and names that no server knows."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from kvferry.transport.control import framing, lookup
from kvferry.transport.control.dialer import make_dialer
from kvferry.transport.host import raise_file_limit
from tests.support.fork_server import fork_server
from tests.support.lines import LineCount
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, until

RANKS, PROCESSES = 2000, 4
SERVERS = f"""
import sys, zmq
from tests.transport.control_ends import KEYS
context = zmq.Context()
context.max_sockets = 4000
poller, ports = zmq.Poller(), []
for _ in range({RANKS // PROCESSES}):
    server = context.socket(zmq.ROUTER)
    server.linger = server.handshake_ivl = 0  # no time-out
    server.curve_server = True
    server.curve_publickey, server.curve_secretkey = (key.encode() for key in sys.argv[1:])
    ports.append(server.bind_to_random_port("tcp://127.0.0.1"))
    poller.register(server, zmq.POLLIN)
print(*ports, flush=True)
while True:
    for server, _ in poller.poll():
        server.send_multipart(server.recv_multipart())
"""


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(900)
def test_links_to_two_thousand_ranks_and_their_descriptors(monkeypatch):
    monkeypatch.setattr(framing, "HANDSHAKE_SECONDS", 3600.0)  # of all of them at once, on a busy host
    if raise_file_limit() < 2 * RANKS:
        pytest.skip("this machine's limit of open files is too low")
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for child in [
            stack.enter_context(fork_server().start("-c", SERVERS, KEYS.public, KEYS.secret, text=True))
            for _ in range(PROCESSES)
        ]:
            ports += map(int, child.stdout.readline().split())
        assert len(set(ports)) == RANKS
        before, threads = open_files(), threading.active_count()
        dialer = make_dialer(KEYS, max_message_bytes=LIMIT)
        stack.callback(dialer.close)
        links = [dialer.connect("127.0.0.1", port, key=KEYS.fingerprint, timeout=3600) for port in ports]
        assert all(link.send(MESSAGE) for link in links)
        answered: set[int] = set()

        def all_answered():
            dialer.progress()
            answered.update(n for n, link in enumerate(links) if link.news and link.receive())
            return len(answered) == RANKS

        assert until(all_answered, 800), [link.reason for link in links if link.lost][:1]
        assert open_files() - before < RANKS + 30 and threading.active_count() == threads
        turns = []
        for _ in range(100):
            with LineCount() as lines:
                dialer.progress()
            turns.append(lines.count)
        assert min(turns) < RANKS / 10, "a turn does not grow with the links"
        again = dialer.connect("127.0.0.1", ports[0], key=KEYS.fingerprint)  # while the first one stands
        assert again.send(MESSAGE) and until(lambda: (dialer.progress(), again.receive())[1]) == [MESSAGE]
        for link in links:
            link.close()
        assert until(lambda: (dialer.progress(), open_files() - before)[1] < 40)
        assert again.send(MESSAGE) and until(lambda: (dialer.progress(), again.receive())[1]) == [MESSAGE]


@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "insecure"])
def test_many_names_hold_up_nobody_and_start_few_threads(keys, monkeypatch):
    answer = threading.Event()

    def silent(host, *rest, **options):
        answer.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    dialer = make_dialer(keys, max_message_bytes=LIMIT)
    key = "" if keys is None else keys.fingerprint
    threads, begun = threading.active_count(), time.monotonic()
    links = [dialer.connect(f"name-{n}.example", 1, key=key, timeout=300) for n in range(300)]
    assert time.monotonic() - begun < 30, "one name is looked up for up to a minute"
    assert threading.active_count() <= threads + lookup.MAX_THREADS
    assert all(link.send(MESSAGE) for link in links)
    monkeypatch.setattr(lookup._lookups, "_most_waiting", 300)
    for _ in range(9):
        links.append(dialer.connect("one-more.example", 1, key=key, timeout=300))
    assert links[-1].lost and f"{lookup.MAX_WAITING} names wait to be looked up" in links[-1].reason
    answer.set()
    assert until(lambda: (dialer.progress(), all(link.lost for link in links))[1])
    assert "cannot be resolved (" in links[0].reason
    dialer.close()
