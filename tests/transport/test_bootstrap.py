"""The bootstrap page: what it says, and that neither strangers nor broken pages do harm."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from kvferry.transport import bootstrap, sockets
from kvferry.transport.blocking_calls import BlockingCall
from kvferry.transport.bootstrap import FETCHES, BootstrapServer, bootstrap_page, checked_url, fetch, first_rank
from kvferry.transport.errors import ConfigError, ProtocolError
from kvferry.transport.sockets import MAX_UNAUTHENTICATED

RANKS = {(0, 0): ("10.0.0.1", 5600), (1, 0): ("10.0.0.1", 5601), (0, 1): ("fd00::2", 5600)}
REQUEST = b"GET /query HTTP/1.1\r\n\r\n"


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    with closing(BootstrapServer("127.0.0.1", 0)) as server:
        yield server


def said_to(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60.0) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_the_page_is_that_of_the_mooncake_connector() -> None:
    workers = {"0": {"0": "10.0.0.1:5600", "1": "[fd00::2]:5600"}, "1": {"0": "10.0.0.1:5601"}}
    assert json.loads(bootstrap_page("p", 3, RANKS)) == {"3": {"engine_id": "p", "worker_addr": workers}}
    assert first_rank(bootstrap_page("p", 0, RANKS), "p") == ("10.0.0.1", 5600)
    assert first_rank(bootstrap_page("p", 0, {(0, 0): ("fd00::2", 1)}), "p") == ("fd00::2", 1)


def test_a_page_is_served_once_it_is_published(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="answers 404"):
        fetch("127.0.0.1", server.port)
    server.publish(bootstrap_page("p", 0, RANKS))
    assert first_rank(fetch("127.0.0.1", server.port), "p") == ("10.0.0.1", 5600)
    assert said_to(server.port, b"GET /other HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")


def test_strangers_of_one_address_do_not_displace_a_slow_client_of_another(server: BootstrapServer) -> None:
    """Nor does each of them have a thread."""
    server.publish(b"{}")
    with ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 600.0, ("127.0.0.2", 0)))
        slow.sendall(REQUEST[:9])
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(REQUEST[:9])
        assert fetch("127.0.0.1", server.port) == b"{}", "so that all have been accepted"
        assert [thread.name for thread in threading.enumerate()].count("kvferry-bootstrap") == 1
        slow.sendall(REQUEST[9:])
        assert slow.recv(12) == b"HTTP/1.1 200"


def test_a_request_has_one_deadline_for_all_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELLO_SECONDS", 0.3)
    server = BootstrapServer("127.0.0.1", 0)
    with closing(server), socket.create_connection(("127.0.0.1", server.port), 60.0) as drip:
        drip.settimeout(0.02)
        for _ in range(500):
            try:
                drip.sendall(b"x")
                assert drip.recv(1) == b""
                return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("each byte came in time, and the request never ended")


def test_a_long_page_for_a_client_that_reads_slowly(server: BootstrapServer) -> None:
    content = bytes(range(256)) * (32 << 10)
    server.publish(content)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(REQUEST)
        assert said_to(server.port, b"GET /other HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")
        assert b"".join(iter(lambda: client.recv(1 << 16), b"")).endswith(b"\r\n\r\n" + content)


def test_what_is_no_request_has_an_end(server: BootstrapServer) -> None:
    with suppress(OSError):
        assert said_to(server.port, b"x" * 2 * bootstrap.MAX_REQUEST_BYTES) == b""


def test_a_port_that_is_taken(server: BootstrapServer) -> None:
    with pytest.raises(ConfigError, match=f"bootstrap_port: 127.0.0.1:{server.port} cannot be bound: .*; give a free"):
        BootstrapServer("127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "malformed"),
        (b'{"0": {"engine_id": 5, "worker_addr": {}}}', "malformed"),
        (b"[" * 100000, "malformed"),
        (b'{"0": {"engine_id": "q", "worker_addr": {}}}', "no engine 'p'"),
        (b'{"0": {"engine_id": "p", "worker_addr": {}}}', "no address"),
        (b'{"0": {"engine_id": "p", "worker_addr": {"0": {"0": "host:port"}}}}', "no address"),
        (b'{"0": {"engine_id": "p", "worker_addr": {"0": {"0": "host:70000"}}}}', "no address"),
    ],
)
def test_a_bad_page(content: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        first_rank(content, "p")


BAD = ["", "10.0.0.1:8998", "https://a:1", "http://a", "http://a:0", "http://a:1/x", "http://a:99999", "http://[:1"]


@pytest.mark.parametrize("text", [*BAD, "http://user:secret@a:1"])
def test_a_bad_address(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected http://HOST:PORT") as raised:
        checked_url(text)
    assert "secret" not in str(raised.value)


def test_a_good_address() -> None:
    assert checked_url("http://p.example:8998") == ("p.example", 8998)
    assert checked_url("http://[fd00::1]:8998/") == ("fd00::1", 8998)


def fetched(port: int, on_done: Callable[[], Any] | None = None) -> BlockingCall[bytes]:
    done = threading.Event()
    call = bootstrap.fetch_page(f"http://127.0.0.1:{port}", lambda address: "", on_done or done.set)
    assert on_done or done.wait(60.0)
    return call


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_that_nobody_expects_leave_room_for_other_fetches(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library, and of what is called at the end."""

    def broken(*_: object) -> bytes:
        raise ValueError("invalid literal")

    server.publish(b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(bootstrap, "fetch", broken)
        for _ in range(FETCHES.most_threads):
            assert "it failed: " in fetched(server.port).error
    for _ in range(FETCHES.most_threads):
        fetched(server.port, broken)
        while FETCHES.running:
            time.sleep(0.01)
    assert fetched(server.port).result == b"{}"


@contextmanager
def raw_server(head: bytes, ended: threading.Event | None = None) -> Iterator[int]:
    """The port of a server that answers one request so, and then sends a byte now and then until ``ended``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(head)
                while ended is not None and not ended.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CHUNKED + b"-5\r\nabc", "has a Transfer-Encoding"),
        (CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", "has a Transfer-Encoding"),
        (OK + b"x" * 11, "more than 10 bytes"),
        (b"garbage\n\n", "does not answer in HTTP|reset"),
    ],
)
def test_an_answer_that_is_no_page(answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_PAGE_BYTES", 10)
    with raw_server(answer) as port, pytest.raises(OSError, match=said):
        fetch("127.0.0.1", port)


@pytest.mark.parametrize("head", [OK, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b""])
def test_a_page_that_never_ends(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is silent for long."""
    monkeypatch.setattr(bootstrap, "FETCH_SECONDS", 0.5)
    ended = threading.Event()
    with raw_server(head, ended) as port:
        try:
            with suppress(OSError):
                assert len(fetch("127.0.0.1", port)) < 1000
        finally:
            ended.set()
