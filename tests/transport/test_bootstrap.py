"""The bootstrap page: what it says, and that neither strangers nor broken pages do harm."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from kvferry.transport import sockets
from kvferry.transport.blocking_calls import BlockingCall
from kvferry.transport.bootstrap import fetch as bootstrap_fetch
from kvferry.transport.bootstrap.fetch import MAX_FETCHES, fetch
from kvferry.transport.bootstrap.page import checked_url, first_rank, page
from kvferry.transport.bootstrap.server import MAX_REQUEST_BYTES, BootstrapServer
from kvferry.transport.errors import ConfigError, ProtocolError
from kvferry.transport.sockets import MAX_UNAUTHENTICATED

RANKS = {(0, 0): ("10.0.0.1", 5600), (1, 0): ("10.0.0.1", 5601), (0, 1): ("fd00::2", 5600)}


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()


def test_the_page_is_that_of_the_mooncake_connector() -> None:
    workers = {"0": {"0": "10.0.0.1:5600", "1": "[fd00::2]:5600"}, "1": {"0": "10.0.0.1:5601"}}
    assert json.loads(page("p", 3, RANKS)) == {"3": {"engine_id": "p", "worker_addr": workers}}
    assert first_rank(page("p", 0, RANKS), "p") == ("10.0.0.1", 5600)
    assert first_rank(page("p", 0, {(0, 0): ("fd00::2", 1)}), "p") == ("fd00::2", 1)


def test_a_page_is_served_once_it_is_published(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="answers 404"):
        fetch("127.0.0.1", server.port)
    server.publish(page("p", 0, RANKS))
    assert first_rank(fetch("127.0.0.1", server.port), "p") == ("10.0.0.1", 5600)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/other", timeout=30)


REQUEST = b"GET /query HTTP/1.1\r\n\r\n"


@contextmanager
def strangers(port: int, said: bytes, count: int) -> Iterator[None]:
    """So many connections that have said this, and stay open."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(said)
        yield


@pytest.mark.parametrize("said", [b"", REQUEST[:9]], ids=["nothing", "half a request"])
def test_strangers_shut_out_nobody(server: BootstrapServer, said: bytes) -> None:
    """Sixteen connections did, each with a thread."""
    server.publish(b"{}")
    with strangers(server.port, said, 2 * MAX_UNAUTHENTICATED):
        for _ in range(3):
            assert fetch("127.0.0.1", server.port) == b"{}"
        assert [thread.name for thread in threading.enumerate()].count("kvferry-bootstrap") == 1


def test_strangers_of_one_address_do_not_displace_a_slow_client_of_another(server: BootstrapServer) -> None:
    server.publish(b"{}")
    with socket.create_connection(("127.0.0.1", server.port), 30.0, ("127.0.0.2", 0)) as slow:
        slow.sendall(REQUEST[:9])
        with strangers(server.port, REQUEST[:9], 2 * MAX_UNAUTHENTICATED):
            assert fetch("127.0.0.1", server.port) == b"{}", "so that all have been accepted"
            slow.sendall(REQUEST[9:])
            assert slow.recv(12) == b"HTTP/1.1 200"


def test_a_request_has_one_deadline_for_all_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELLO_SECONDS", 0.3)
    server = BootstrapServer("127.0.0.1", 0)
    with closing(server), socket.create_connection(("127.0.0.1", server.port), 0.02) as drip:
        for _ in range(500):
            try:
                drip.sendall(b"x")
                assert drip.recv(1) == b""
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("each byte came in time, and the request never ended")


def test_a_long_page_for_a_client_that_reads_slowly(server: BootstrapServer) -> None:
    content = bytes(range(256)) * (32 << 10)
    server.publish(content)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(REQUEST)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/other", timeout=30)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.endswith(b"\r\n\r\n" + content)


def test_what_is_no_request_has_an_end(server: BootstrapServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30.0) as stranger, suppress(OSError):
        stranger.sendall(b"x" * 2 * MAX_REQUEST_BYTES)
        assert stranger.recv(1) == b""


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:8998",
        "https://a:1",
        "http://a",
        "http://a:0",
        "http://a:1/x",
        "http://a:99999",
        "http://[:1",
        "http://user:secret@a:1",
    ],
)
def test_a_bad_address(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected http://HOST:PORT") as raised:
        checked_url(text)
    assert "secret" not in str(raised.value)


def test_a_good_address() -> None:
    assert checked_url("http://p.example:8998") == ("p.example", 8998)
    assert checked_url("http://[fd00::1]:8998/") == ("fd00::1", 8998)


def test_a_page_that_is_too_large(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_fetch, "MAX_PAGE_BYTES", 10)
    server.publish(b"x" * 11)
    with pytest.raises(OSError, match="more than 10 bytes"):
        fetch("127.0.0.1", server.port)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def raw_server(*answers: bytes) -> Iterator[int]:
    """The port of a server that gives one of the answers to each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection = listener.accept()[0]
                with connection, suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def fetched(port: int) -> BlockingCall[bytes]:
    done = threading.Event()
    page_fetch = bootstrap_fetch.fetch_page(f"http://127.0.0.1:{port}", lambda address: "", done.set)
    assert done.wait(60.0)
    return page_fetch


@pytest.mark.parametrize("chunk", [b"-5\r\nabc", b"-1\r\n" + b"x" * (2 << 20), b"2\r\n{}\r\n0\r\n\r\n"])
def test_a_page_in_chunks_is_refused(chunk: bytes) -> None:
    with raw_server(CHUNKED + chunk) as port, pytest.raises(OSError, match="has a Transfer-Encoding"):
        fetch("127.0.0.1", port)


def test_pages_that_the_library_cannot_read_end_no_thread(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(address: str, port: int) -> bytes:
        raise ValueError("invalid literal")

    with monkeypatch.context() as patched:
        patched.setattr(bootstrap_fetch, "fetch", broken)
        for _ in range(MAX_FETCHES):
            assert "it failed: " in fetched(server.port).error
    server.publish(b"{}")
    assert fetched(server.port).result == b"{}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_an_error_ends_makes_room_for_another(server: BootstrapServer) -> None:
    def broken() -> None:
        raise RuntimeError("the waker is gone")

    server.publish(b"{}")
    for _ in range(MAX_FETCHES):
        bootstrap_fetch.fetch_page(f"http://127.0.0.1:{server.port}", lambda address: "", broken)
        while bootstrap_fetch.FETCHES.running:
            time.sleep(0.01)
    assert fetched(server.port).result == b"{}"


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b""]
)
def test_a_page_that_never_ends(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends a byte now and then, so that no read is silent for long."""
    monkeypatch.setattr(bootstrap_fetch, "FETCH_SECONDS", 0.5)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection = listener.accept()[0]
            with connection, suppress(OSError):
                connection.sendall(head)
                while not ended.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with suppress(OSError):
                assert len(fetch("127.0.0.1", listener.getsockname()[1])) < 1000
        finally:
            ended.set()
            thread.join()


def test_what_listens_is_no_web_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = socket.create_connection(listener.getsockname())
        answer.close()

        def garbage() -> None:
            listener.accept()[0].close()
            connection = listener.accept()[0]
            connection.sendall(b"garbage\n\n")
            connection.close()

        thread = threading.Thread(target=garbage)
        thread.start()
        with pytest.raises(OSError, match=r"does not answer in HTTP|reset"):
            fetch("127.0.0.1", listener.getsockname()[1])
        thread.join()
