"""The control plane's sockets between two ends that behave: frames, identities, queues, addresses, the waker."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

import pytest

from kvferry.transport.control import dialer as control_dialer
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control import stream
from kvferry.transport.errors import ConfigError
from kvferry.transport.sockets import Strangers
from kvferry.transport.wake import RateLimitedLog, Waker
from tests.support.fork_server import fork_server
from tests.transport.control_ends import LIMIT, MESSAGE, arrived, exchanged, listening, readable, until


def joined(listener, connect):
    """A connection that has sent ``MESSAGE``, and the listener's name of it."""
    connection = connect(listener.port)
    connection.send(MESSAGE)
    [(identity, _, _)] = arrived(listener)
    return connection, identity


def test_frames_both_ways(listener, connect):
    connection = connect(listener.port)
    assert connection.send(MESSAGE)
    [(identity, frames, _)] = arrived(listener)
    assert frames == MESSAGE
    assert listener.send(identity, [b"a", b"", bytes(range(256)) * 1000])
    assert arrived(connection) == [[b"a", b"", bytes(range(256)) * 1000]]
    assert connection.state == (True, False)
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)
    assert not listener.dropped and not connection.dropped


def test_messages_keep_their_order_and_peers_their_identity(listener, connect):
    ends = [connect(listener.port) for _ in range(5)]
    for number in range(100):
        for index, end in enumerate(ends):
            assert end.send([b"%d" % index, b"", b"%d" % number])
    found = arrived(listener, 500)
    by_identity: dict[bytes, list] = {}
    for identity, frames, _ in found:
        by_identity.setdefault(identity, []).append(frames)
    assert len(by_identity) == 5
    for history in by_identity.values():
        assert [frames[2] for frames in history] == [b"%d" % n for n in range(100)]
        assert len({frames[0] for frames in history}) == 1


def test_one_call_takes_a_bounded_number(listener, connect, monkeypatch):
    monkeypatch.setattr(control_listener, "BATCH", 10)
    ends = [connect(listener.port) for _ in range(25)]
    for end in ends:
        end.send(MESSAGE)
    assert until(lambda: all(end.connected for end in ends) and readable(listener))
    taken = []
    until(lambda: taken.append(len(listener.receive())) or sum(taken) == 25)
    assert sum(taken) == 25 and max(taken) <= 10, "the poller tells of the rest"


def test_a_reconnect_gets_a_new_identity_and_the_old_one_is_gone(listener, connect):
    first, old = joined(listener, connect)
    first.close()
    assert until(lambda: (listener.receive(), listener.peers)[1] == 0)
    second, new = joined(listener, connect)
    assert new != old
    assert not listener.send(old, MESSAGE)
    assert listener.dropped["gone"] == 1
    assert listener.send(new, MESSAGE) and arrived(second) == [MESSAGE]


def test_send_says_false_when_the_peer_does_not_read(listener, connect):
    _, identity = joined(listener, connect)
    block = [b"", b"", bytes(LIMIT // 64)]  # full long before the silence of the peer's socket counts as its death
    sent = next(n for n in range(5000) if not listener.send(identity, block))
    assert sent < 3 * stream.SEND_QUEUE
    assert listener.send(identity, block) is control_listener.Delivery.FULL
    other, free = joined(listener, connect)
    assert listener.send(free, MESSAGE) and arrived(other) == [MESSAGE], "a full queue holds up nobody else"


def test_ipv6(connect):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    listener = listening(host="::1")
    try:
        assert listener.endpoint == f"[::1]:{listener.port}"
        connection = connect(listener.port, "::1")
        connection.send(MESSAGE)
        [(identity, frames, _)] = arrived(listener)
        assert frames == MESSAGE and listener.send(identity, MESSAGE) and arrived(connection) == [MESSAGE]
    finally:
        listener.close()


def test_a_name_is_resolved_at_both_ends(connect):
    listener = listening(host="localhost")
    try:
        connection = connect(listener.port, "localhost")
        connection.send(MESSAGE)
        assert [frames for _, frames, _ in arrived(listener)] == [MESSAGE]
    finally:
        listener.close()


def test_a_slow_name_server_holds_up_nobody(listener, connect, monkeypatch):
    real, answer = socket.getaddrinfo, threading.Event()

    def slow(host, *rest, **options):
        if host == "slow.example":
            answer.wait(60)
            host = "127.0.0.1"
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    begun = time.monotonic()
    waiting = connect(listener.port, "slow.example", timeout=300)
    assert waiting.send([b"kvferry", b"\0\1", b"waited"])
    assert time.monotonic() - begun < 30, "neither waits for the answer"
    other = connect(listener.port)
    other.send(MESSAGE)
    assert [frames for _, frames, _ in arrived(listener)] == [MESSAGE]
    assert waiting.state == (False, False)
    answer.set()
    assert until(lambda: waiting.state[0]), "it connects when the answer is there"
    assert [frames[2] for _, frames, _ in arrived(listener)] == [b"waited"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "*", "", "::ffff:0.0.0.0"])
def test_all_interfaces_are_refused(host):
    with pytest.raises(ConfigError) as error:
        listening(host=host)
    assert "\n" not in str(error.value) and "side_channel_host" in str(error.value)


def test_a_port_in_use_is_one_line(listener):
    with pytest.raises(ConfigError) as error:
        listening(port=listener.port)
    text = str(error.value)
    assert "\n" not in text
    for word in ("side_channel_port", str(listener.port), "127.0.0.1", "in use", "0 to find"):
        assert word in text


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "2001:db8::1"])
def test_an_address_that_is_not_ours_is_one_line(host):
    with pytest.raises(ConfigError) as error:
        listening(host=host)
    assert "\n" not in str(error.value) and "side_channel_host" in str(error.value) and host in str(error.value)


def test_the_port_is_free_after_close(connect):
    first = listening()
    first.close()
    first.close()
    again = listening(port=first.port)
    connection = connect(again.port)
    connection.send(MESSAGE)
    assert len(arrived(again)) == 1
    again.close()
    assert again.receive() == [] and not again.send(b"\0abcd", MESSAGE), "a closed end is silent, not an exception"


def test_nobody_listens_there(connect):
    with socket.socket() as taken:  # bound, so that nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        connection = connect(port, timeout=300)
        assert until(lambda: connection.state[1]), "not at the time-out only"
        assert f"127.0.0.1:{port}" in connection.reason and "nobody listens" in connection.reason
        assert not connection.send(MESSAGE)


def test_a_name_that_does_not_exist(connect, monkeypatch):
    def unknown(host, *rest, **options):
        """Real name servers may be slow, or lie."""
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    connection = connect(1, "no-such-host.invalid", timeout=300)
    assert until(lambda: connection.state[1])
    assert "no-such-host.invalid" in connection.reason and "cannot be resolved (" in connection.reason


def test_a_server_that_never_answers(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = connect(silent.getsockname()[1], timeout=0.5)
        begun = time.monotonic()
        assert until(lambda: connection.lost)
        assert time.monotonic() - begun > 0.4 and "no answer" in connection.reason


def test_messages_that_wait_for_a_connection_are_bounded(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = connect(silent.getsockname()[1])
        assert all(connection.send(MESSAGE) for _ in range(stream.SEND_QUEUE))
        assert not connection.send(MESSAGE) and connection.connection.dropped["full"] == 1


def test_a_server_that_speaks_http(connect):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = connect(server.getsockname()[1], timeout=1)
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 20)
            assert until(lambda: (arrived(connection, seconds=0.05), connection.lost)[1])
            assert arrived(connection, seconds=0.2) == []


def test_the_listener_closes(listener, connect):
    connection = connect(listener.port)
    assert exchanged(listener, connection)
    listener.close()
    assert until(lambda: connection.state[1])
    assert not connection.connected and "gone" in connection.reason and not connection.send(MESSAGE)


def test_connections_that_close_at_any_moment_hold_up_nobody(listener, connect):
    """An event that nobody reads any more would block the one I/O thread of all connections."""
    for number in range(300):
        end = connect(listener.port)
        end.send(MESSAGE)
        if number % 3:
            time.sleep(0.0005 * (number % 7))
        end.close()
        listener.receive()
    connection = connect(listener.port)
    connection.send(MESSAGE)
    assert until(lambda: connection.state[0])
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)


COUNTED = """
import os
import time
from tests.transport.control_ends import Dialed, exchanged, listening

def use():
    listener = listening()
    connection = Dialed(listener.port)
    assert exchanged(listener, connection)
    connection.close()
    listener.close()

def usage():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

for _ in range(5):
    use()
before, now = usage(), (1 << 30, 1 << 30)
for _ in range(50):
    use()
deadline = time.monotonic() + 60
while any(n > then + 2 for n, then in zip(now, before)) and time.monotonic() < deadline:
    now = usage()
    time.sleep(0.01)
print(*before, *now)
"""


def test_open_files_and_threads_stay_flat():
    """In a process of its own: here, those of other tests come and go."""
    done = fork_server().run("-c", COUNTED, timeout=800)
    assert done.returncode == 0, done.stderr
    files, threads, files_now, threads_now = map(int, done.stdout.split())
    assert files_now <= files + 2 and threads_now <= threads + 2, done.stdout


def test_waker_wakes_a_poller_from_another_thread():
    waker, poller = Waker(), select.poll()
    poller.register(waker, select.POLLIN)
    assert not poller.poll(0) and not waker.drain()
    begun = time.monotonic()
    threading.Timer(0.1, waker.wake).start()
    assert poller.poll(60_000)
    assert 0.05 < time.monotonic() - begun < 30
    for _ in range(100):
        waker.wake()
    assert waker.drain() and not waker.drain() and not poller.poll(0)
    waker.close()
    with open("/dev/null", "rb") as taken:  # gets the number that the waker had
        waker.wake()
        waker.close()
        assert not waker.drain() and taken.read() == b""


def test_waking_never_blocks():
    waker = Waker()
    os.eventfd_write(waker.fd, (1 << 64) - 2)  # the counter is full: one more would block
    waking = threading.Thread(target=waker.wake, daemon=True)
    waking.start()
    waking.join(30)
    assert not waking.is_alive() and waker.drain()
    waker.close()


def test_rate_limited_log(caplog):
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("test.rate"), 10, max_keys=3, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "test.rate"):
        for _ in range(5):
            limited.warning("a", "bad %s", "thing")
        limited.warning("b", "other")
        now[0] = 11
        limited.warning("a", "bad %s", "thing")
        limited.warning("a", "bad %s", "thing")
        now[0] = 22
        for number in range(100):
            limited.warning(f"key {number}", "many")
    lines = [record.getMessage() for record in caplog.records if record.name == "test.rate"]
    assert lines[:3] == ["bad thing", "other", "bad thing (and 4 more like this)"]
    assert len(limited.keys) == 3, "keys that a peer makes up are bounded"
    assert len(lines) == 3 + 100


def test_all_keys_together_are_limited(caplog):
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("test.rate"), 10, max_lines=5, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "test.rate"):
        for number in range(1000):
            limited.info(f"key {number}", "x" * 100_000)
        now[0] = 10
        limited.warning("key 999", "back %s", "again")
    lines = [record.getMessage() for record in caplog.records if record.name == "test.rate"]
    assert len(lines) == 6 and max(map(len, lines)) <= RateLimitedLog.MAX_LINE
    assert lines[-1] == "back again (and 1 more like this)"


def test_what_p_said_before_it_closed_counts_although_d_sends_in_vain(listener, connect):
    connection, identity = joined(listener, connect)
    for number in range(3):
        assert listener.send(identity, [b"last", b"", b"%d" % number])
    listener.close()
    assert until(lambda: not connection.connection.send(MESSAGE))
    assert [frames[2] for frames in connection.connection.receive()] == [b"0", b"1", b"2"]


def test_what_d_said_before_it_closed_counts_although_p_sends_in_vain(listener, connect):
    connection, identity = joined(listener, connect)
    for number in range(3):
        assert connection.send([b"last", b"", b"%d" % number])
    connection.close()
    assert until(lambda: not listener.send(identity, MESSAGE))
    assert [frames[2] for _, frames, _ in arrived(listener, 3)] == [b"0", b"1", b"2"]
    assert until(lambda: (listener.receive(), listener.peers)[1] == 0)


def test_a_peer_that_sends_without_end_holds_up_nobody(listener, connect, monkeypatch):
    monkeypatch.setattr(control_listener, "BATCH", 1)  # one message of the greedy one is a whole call
    greedy, other = connect(listener.port), connect(listener.port)
    assert until(lambda: greedy.connected and other.connected)
    heard: list[bytes] = []

    def both():
        for _ in range(20):
            greedy.send([b"greedy", b"", b""])
        heard.extend(frames[0] for _, frames, _ in listener.receive())
        return b"other" in heard

    assert not until(both, 0.05)
    other.send([b"other", b"", b""])
    assert until(both)


def test_a_gate_that_met_an_error_goes_on(listener, connect, monkeypatch):
    real = Strangers.expire
    failed: list[bool] = []

    def fails(strangers):
        if not failed:
            failed.append(True)
            raise RuntimeError("no memory")
        return real(strangers)

    monkeypatch.setattr(Strangers, "expire", fails)
    assert exchanged(listener, connect(listener.port)) and failed


@pytest.mark.parametrize("host", ["::1%\x00", "::1%\udc80", "\x00"])
def test_a_host_that_nobody_checked_is_one_line(connect, host):
    connection = connect(1, host)
    assert until(lambda: connection.lost) and connection.reason and "\n" not in connection.reason


def test_a_name_that_is_known_at_once_begins_one_connection(listener, connect, monkeypatch):
    """Its thread wakes the dialer afterwards all the same."""
    real = control_dialer.NAMES.begin

    def at_once(work, on_done):
        call = real(work, on_done)
        while not call.done:
            time.sleep(0.001)
        return call

    monkeypatch.setattr(control_dialer.NAMES, "begin", at_once)
    assert exchanged(listener, connect(listener.port, "localhost"))


def test_a_process_without_threads_looks_no_name_up(connect, monkeypatch):
    def no_thread(*args, **options):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        connection = connect(1, "name.example")
        assert connection.lost and "can't start new thread" in connection.reason


def test_a_listener_that_cannot_be_made_leaves_no_descriptor(monkeypatch):
    def no_thread(*args, **options):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="new thread"):
            listening()
    assert len(os.listdir("/proc/self/fd")) <= before
