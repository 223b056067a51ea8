"""A D with thousands of P ranks, and names that no server knows."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from kvferry.transport.control import dialer as control_dialer
from kvferry.transport.control.dialer import Dialer
from kvferry.transport.host import raise_file_limit
from tests.support.fork_server import fork_server
from tests.support.lines import LineCount
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, until

RANKS, PROCESSES = 2000, 4
SERVERS = f"""
import selectors, socket, ssl
from kvferry.transport.control.keys import GREETING_BYTES
from kvferry.transport.control.stream import ADMITTED
from kvferry.transport.host import raise_file_limit
from tests.transport.control_ends import KEYS
raise_file_limit()
selector, ports = selectors.DefaultSelector(), []
for _ in range({RANKS // PROCESSES}):
    server = socket.create_server(("127.0.0.1", 0))
    ports.append(server.getsockname()[1])
    selector.register(server, selectors.EVENT_READ)
print(*ports, flush=True)
while True:
    for ready, _ in selector.select():
        sock = ready.fileobj
        if not isinstance(sock, ssl.SSLSocket):
            peer = sock.accept()[0]
            peer.settimeout(60)
            try:
                peer.recv(GREETING_BYTES, socket.MSG_WAITALL)
                peer = KEYS.of_p.wrap_socket(peer, server_side=True)
                peer.send(ADMITTED)
            except OSError:  # a client of another test, for whose engine this port was
                peer.close()
                continue
            selector.register(peer, selectors.EVENT_READ)
        elif data := sock.recv(1 << 16):
            sock.send(data)
        else:
            selector.unregister(sock)
            sock.close()
"""


@pytest.mark.timeout(900)
def test_links_to_two_thousand_ranks_and_their_descriptors():
    if raise_file_limit() < 2 * RANKS:
        pytest.skip("this machine's limit of open files is too low")
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for child in [stack.enter_context(fork_server().start("-c", SERVERS, text=True)) for _ in range(PROCESSES)]:
            ports += map(int, child.stdout.readline().split())
        assert len(set(ports)) == RANKS
        before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()

        def more_files():
            return len(os.listdir("/proc/self/fd")) - before

        dialer = Dialer(KEYS, max_message_bytes=LIMIT)
        stack.callback(dialer.close)
        links = [dialer.connect("127.0.0.1", port, key=KEYS.fingerprint, timeout=3600) for port in ports]
        assert all(link.send(MESSAGE) for link in links)
        answered: set[int] = set()

        def all_answered():
            dialer.progress()
            answered.update(n for n, link in enumerate(links) if link.news and link.receive())
            return len(answered) == RANKS

        assert until(all_answered, 800), [link.reason for link in links if link.lost][:1]
        assert more_files() < RANKS + 10
        assert threading.active_count() <= threads  # one of another test may end meanwhile
        turns = []
        for _ in range(100):
            with LineCount() as lines:
                dialer.progress()
            turns.append(lines.count)
        assert min(turns) < RANKS / 10, "a turn does not grow with the links"
        for link in links:
            link.close()
        assert more_files() < 10


def test_many_names_hold_up_nobody_and_start_few_threads(monkeypatch):
    answer = threading.Event()

    def silent(host, *rest, **options):
        answer.wait(900)  # the test sets it
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    dialer, names = Dialer(KEYS, max_message_bytes=LIMIT), control_dialer.NAMES
    threads = threading.active_count()
    links = [dialer.connect(f"name-{n}.example", 1, key=KEYS.fingerprint, timeout=300) for n in range(300)]
    assert threading.active_count() <= threads + names.most_threads
    assert all(link.send(MESSAGE) for link in links)
    monkeypatch.setattr(names, "most_waiting", 300)
    for _ in range(names.most_threads + 1):
        links.append(dialer.connect("one-more.example", 1, key=KEYS.fingerprint, timeout=300))
    assert links[-1].lost and "300 calls of kvferry-dns wait already" in links[-1].reason
    answer.set()
    assert until(lambda: (dialer.progress(), all(link.lost for link in links))[1])
    assert "host 'name-0.example' does not resolve: " in links[0].reason
    dialer.close()
