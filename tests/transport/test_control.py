"""The control plane: messages, connections and files, of 2,000 ranks too; one call takes bounded messages and bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
import tracemalloc

import pytest

from kvferry.transport import sockets
from kvferry.transport.control import dialer as control_dialer
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control import stream
from kvferry.transport.control.dialer import Dialer
from kvferry.transport.errors import ConfigError
from kvferry.transport.host import raise_file_limit
from kvferry.transport.wake import HELD_UP_SECONDS, RunningClock
from tests.support.engines import free_port
from tests.support.fork_server import fork_server
from tests.support.turns import LineCount
from tests.transport.control_ends import (
    KEYS,
    LIMIT,
    MESSAGE,
    Dialed,
    arrived,
    exchanged,
    gone,
    listening,
    readable,
    until,
)
from tests.transport.control_strangers import GREETING, holder, message, say, served, server_of


def joined(listener, connect):
    """A connection that has sent ``MESSAGE``, and the listener's name of it."""
    connection = connect(listener.port)
    connection.send(MESSAGE)
    [(identity, _, _)] = arrived(listener)
    return connection, identity


def no_thread(*args, **options):
    raise RuntimeError("can't start new thread")


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
    assert gone(listener)
    second, new = joined(listener, connect)
    assert new != old and not listener.send(old, MESSAGE) and listener.dropped["gone"] == 1
    assert listener.send(new, MESSAGE) and arrived(second) == [MESSAGE]


def test_a_peer_that_does_not_read_gets_all_of_it_later(listener, connect):
    connection, identity = joined(listener, connect)
    blocks = [[b"", number.to_bytes(2, "big"), bytes(LIMIT // 256)] for number in range(3000)]  # 12 MB
    assert all(listener.send(identity, block) for block in blocks)
    other, free = joined(listener, connect)
    assert listener.send(free, MESSAGE) and arrived(other) == [MESSAGE], "a full socket holds up nobody else"
    found = []
    assert until(lambda: listener.receive() or found.extend(connection.receive()) or len(found) == len(blocks))
    assert found == blocks


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_ipv6_and_a_name_at_both_ends(connect, host):
    try:
        listener = listening(host=host)
    except ConfigError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    with contextlib.closing(listener):
        assert host != "::1" or listener.endpoint == f"[::1]:{listener.port}"
        connection = connect(listener.port, host)
        connection.send(MESSAGE)
        [(identity, frames, _)] = arrived(listener)
        assert frames == MESSAGE and listener.send(identity, MESSAGE) and arrived(connection) == [MESSAGE]


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "0", "*", "", "::ffff:0.0.0.0", "203.0.113.7", "no-such-host.invalid", "2001:db8::1", "in use"],
)
def test_where_a_listener_cannot_listen_is_one_line(host, listener):
    taken = {"host": "127.0.0.1", "port": listener.port} if host == "in use" else {"host": host}
    with pytest.raises(ConfigError) as error:
        listening(**taken)
    text = str(error.value)
    words = ("side_channel_port", f"port {listener.port} of 127.0.0.1 is in use", "0 to find")
    assert "\n" not in text and all(
        word in text for word in (words if host == "in use" else ("side_channel_host", host))
    )


def test_the_port_is_free_after_close(connect):
    first = listening(port=free_port())
    first.close()
    first.close()
    again = listening(port=first.port)
    assert exchanged(again, connect(again.port))
    again.close()
    assert again.receive() == [] and not again.send(b"\0abcd", MESSAGE), "a closed end is silent, not an exception"


def test_nobody_listens_there(connect):
    with socket.socket() as taken:  # bound, so that nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        connection = connect(taken.getsockname()[1])
        assert until(lambda: connection.lost), "not at the time-out only"
        assert "nobody listens" in connection.reason and connection.failure == "unreachable"
        assert not connection.send(MESSAGE)


def test_names_that_lead_nowhere_are_one_line(connect, monkeypatch):
    def unknown(host, *rest, **options):
        """Real name servers may be slow, or lie."""
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for host in ("::1%\x00", "::1%\udc80", "\x00"):
        unchecked = connect(1, host)
        assert until(lambda unchecked=unchecked: unchecked.lost) and unchecked.reason and "\n" not in unchecked.reason
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    connection = connect(1, "no-such-host.invalid")
    assert until(lambda: connection.lost)
    assert connection.reason == "host 'no-such-host.invalid' does not resolve: Name or service not known"
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    connection = connect(1, "name.example")
    assert connection.lost and "can't start new thread" in connection.reason


def test_a_server_that_never_answers(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        connection = connect(silent.getsockname()[1], timeout=0.5)
        assert all(connection.send(MESSAGE) for _ in range(control_dialer.SEND_QUEUE))
        assert not connection.send(MESSAGE), "what waits is bounded"
        assert until(lambda: connection.lost) and "no answer" in connection.reason
        assert time.monotonic() - begun > 0.4 and not connection.failure, "it was reached"


COUNTED = """
import os, time
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
assert all(n <= then + 2 for n, then in zip(now, before)), (before, now)
"""


def test_open_files_and_threads_stay_flat():
    """In a process of its own: here, those of other tests come and go."""
    done = fork_server().run("-c", COUNTED, timeout=800)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closing", ["p", "d"])
def test_what_an_end_said_before_it_closed_counts_although_the_other_sends_in_vain(listener, connect, closing):
    connection, identity = joined(listener, connect)
    for number in range(3):
        last = [b"last", b"", b"%d" % number]
        assert listener.send(identity, last) if closing == "p" else connection.send(last)
    (listener if closing == "p" else connection).close()
    if closing == "p":
        assert until(lambda: not connection.send(MESSAGE))
        found = connection.connection.receive()
    else:
        assert until(lambda: not listener.send(identity, MESSAGE))
        found = [frames for _, frames, _ in arrived(listener, 3)]
        assert gone(listener)
    assert [frames[2] for frames in found] == [b"0", b"1", b"2"]


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
    real, failed = sockets.Strangers.expire, threading.Event()

    def fails(strangers):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no memory")
        return real(strangers)

    monkeypatch.setattr(sockets.Strangers, "expire", fails)
    assert exchanged(listener, connect(listener.port)) and failed.is_set()


def test_a_thread_that_was_held_up_closes_no_connection_for_it(monkeypatch):
    """It has heard nobody meanwhile. Turns that were not held up count."""
    moment = [0.0]
    monkeypatch.setattr(sockets, "RunningClock", lambda: RunningClock(lambda: moment[0]))
    monkeypatch.setattr(sockets, "HELLO_SECONDS", 10.0)
    with contextlib.closing(sockets.Sockets()) as watched, contextlib.closing(socket.socket()) as port:
        port.setblocking(False)
        port.bind(("127.0.0.1", 0))
        strangers = sockets.Strangers(watched, port, lambda stranger: True)
        with contextlib.closing(socket.create_connection(port.getsockname())) as slow:
            slow.send(b"a part")
            assert until(lambda: watched.progress() and len(strangers) == 1)
            for held_up in (0.0, 13.6, 60.0):
                moment[0] += held_up
                assert strangers.expire() <= HELD_UP_SECONDS and len(strangers) == 1
            turns: list[float] = []
            while len(strangers) and len(turns) < 20:
                turns.append(strangers.expire())
                moment[0] += turns[-1]
            assert 5 < len(turns) < 12
        strangers.close()


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


def test_a_listener_that_cannot_be_made_leaves_no_descriptor(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="new thread"):
            listening()
    assert len(os.listdir("/proc/self/fd")) <= before


BOUND = (stream.MAX_HELD_BYTES + LIMIT) * 5 // 4 + 4 * LIMIT
"""With the room that a growing ``bytearray`` takes beyond its end, and with the bytes of the tests themselves."""
FEW_FILES = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from tests.transport.control_ends import listening
listener = listening()
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.002)
"""


@contextlib.contextmanager
def traced():
    """Python counts the bytes that it holds."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("said", [b"", GREETING], ids=["nothing", "greeting"])
def test_slow_connections_take_no_descriptor_from_good_peers(said):
    """480 of them at a process that may open 512 files: the oldest are ended."""
    with fork_server().start("-c", FEW_FILES, text=True) as process, contextlib.ExitStack() as stack:
        port = int(process.stdout.readline())
        for _ in range(480):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with contextlib.suppress(OSError):
                slow.sendall(said)
        good = [stack.enter_context(contextlib.closing(Dialed(port))) for _ in range(20)]
        for end in good:
            assert end.send(MESSAGE) and until(end.receive) == [MESSAGE], end.reason
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 350


def test_messages_without_end_are_cut(listener, good):
    """100 holders of the key claim a message of a MiB each, and send all but its end."""
    served(listener, good)
    with contextlib.ExitStack() as stack, traced():
        for _ in range(100):
            say(listener, stack.enter_context(holder(listener)), message(third=bytes(LIMIT - 100))[:-1])
        assert until(lambda: (listener.receive(), listener.dropped["flood"] >= 100 - 17)[1])
        assert set(listener.dropped) == {"flood"}
        assert tracemalloc.get_traced_memory()[1] < BOUND, "at its peak"
    served(listener, good)


@pytest.mark.parametrize("size", [LIMIT // 2, 1])
def test_answers_that_nobody_reads_are_bounded(listener, good, size):
    """The holder of the key that reads nothing is ended."""
    served(listener, good)
    with holder(listener, message()), traced():
        [(identity, _, _)] = until(listener.receive)
        assert next(n for n in range(500_000) if not listener.send(identity, [b"x", b"x", bytes(size)])) > 1
        assert listener.dropped == {"flood": 1} and listener.peers == 1
        assert tracemalloc.get_traced_memory()[1] < BOUND, "at its peak"
        assert not listener.send(identity, MESSAGE) and listener.dropped["gone"] == 1
    served(listener, good)


def test_a_p_that_floods_d_is_given_up(listener, monkeypatch):
    """It holds the key, and sends a message without end on each connection; another P is heard."""
    monkeypatch.setattr(stream, "MAX_HELD_BYTES", 4 * LIMIT)
    unfinished = message(third=bytes(LIMIT - 100))[:-1]
    with server_of(KEYS.of_p, unfinished) as (port, _), contextlib.closing(Dialed(listener.port)) as good:
        served(listener, good)
        bad = [good.dialer.connect("127.0.0.1", port, key=KEYS.fingerprint, timeout=300) for _ in range(8)]
        assert until(lambda: sum(connection.lost for connection in bad) >= 3)
        assert all("no whole message" in connection.reason for connection in bad if connection.lost)
        served(listener, good)


def test_one_call_takes_bounded_bytes(listener, monkeypatch):
    """Two peers that sent messages of a MiB without a pause took 350 MiB, and held the serving thread for 270 ms."""
    monkeypatch.setattr(control_listener, "BATCH_BYTES", LIMIT)
    ends = [Dialed(listener.port) for _ in range(4)]
    large, taken = [b"x", b"x", bytes(LIMIT // 2)], []

    def calls():
        for end in ends:
            end.send(large)
        taken.append(len(listener.receive()))
        return len(taken) > 20 and sum(taken) >= 60

    assert until(calls)
    assert max(taken) == 2, "half of the bytes is less than a call may take, and twice the half is not"
    for end in ends:
        end.close()


def test_many_keep_alives_have_few_answers(listener, good):
    """One for each read: an answer costs a call of the system."""
    keep_alive = message(b"", b"", b"")
    with holder(listener) as peer:
        say(listener, peer, keep_alive * 2000)
        served(listener, good)
        answers = bytearray()

        def answered():
            listener.receive()
            with contextlib.suppress(ssl.SSLWantReadError):
                answers.extend(peer.recv(65536))
            return answers

        assert until(answered)
        assert len(answers) <= 10 * len(keep_alive)


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
