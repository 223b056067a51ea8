"""Pages of servers: Prometheus' text, what is no page, servers that say something else, and URLs."""

from __future__ import annotations

import socket
import threading

import pytest
from typer.testing import CliRunner

from kvferry.cli import metrics_page
from kvferry.cli.main import app
from kvferry.cli.metrics_page import PageError, fetch_samples, server_url
from tests.router.stand_ins import closed_port


@pytest.mark.parametrize("line", ["<html>", "a", 'a{b="c" 1', "a one", '{"detail":"Not Found"}'])
def test_a_page_of_something_else(serve, line):
    with pytest.raises(PageError, match="no metrics page: "):
        fetch_samples(serve(f"x 1\n{line}\n").url)


def test_a_page_that_is_none(serve, monkeypatch):
    monkeypatch.setattr(metrics_page, "MAX_PAGE_BYTES", 1000)
    for page, words in (
        (404, "HTTP 404"), ("x 1\n" * 1000, "more than 0 MiB"),
    ):  # fmt: skip
        with pytest.raises(PageError, match=words):
            fetch_samples(serve(page).url)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"SSH-2.0\r\n\r\n", r"^no HTTP answer: Bad status line: .*SSH-2\.0"),
        (b"HTTP/1.1 500 \x1b[31m\r\n\r\n", r"^HTTP 500 \\x1b\[31m$"),
    ],
)
def test_a_server_that_says_something_else(said, words):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with other.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PageError, match=words):
            fetch_samples(f"http://127.0.0.1:{other.getsockname()[1]}", 60.0)


def test_no_proxy_is_asked(serve, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    assert len(fetch_samples(serve("x 1\n").url, 60.0)) == 1


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx 1\n"])
def test_an_engine_that_hangs(said):
    held: list[socket.socket] = []

    def answer():
        held.append(other.accept()[0])
        held[0].sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PageError, match=r"^no answer within 0\.2 s$"):
            fetch_samples(f"http://127.0.0.1:{other.getsockname()[1]}", 0.2)
    held[0].close()


TEXTS = "", "foo", "http://", "ftp://h:1", "http://h:99999", "http://h:x", "a b:1", "h:0", "http://[::1"


@pytest.mark.parametrize("text", [*TEXTS, "http://user:secret@h:1"])
def test_texts_that_are_no_url(text):
    result = CliRunner().invoke(app, ["drain", text])
    assert result.exit_code == 2 and "expected http://HOST:PORT" in result.stderr and "secret" not in result.stderr


def test_urls():
    assert server_url("10.0.0.1:8001") == "http://10.0.0.1:8001"
    assert server_url("https://127.0.0.1/prefix/metrics") == "https://127.0.0.1/prefix"
    assert server_url("http://[::1]:8001/v1/") == "http://[::1]:8001"
