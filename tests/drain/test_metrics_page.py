"""Pages of servers: Prometheus' text, what is no page, servers that say something else, and URLs."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvferry.cli import metrics_page
from kvferry.cli.main import app
from kvferry.cli.metrics_page import EngineDownError, Sample, fetch_samples, metrics_url, samples
from kvferry.transport.errors import ProtocolError
from tests.router.stand_ins import closed_port

LABEL = st.text(st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8)


def escaped(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), LABEL, max_size=3), st.floats(allow_nan=False))
def test_a_sample_is_read_as_it_was_written(labels, value):
    inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    text = f"# HELP x y\n\nvllm:x_total{{{inside}}} {value!r} 1700000000\n"
    assert list(samples(text)) == [Sample("vllm:x_total", labels, value)]


def test_numbers_of_prometheus():
    values = [sample.value for sample in samples("a 1\nb 1.5e+06\nc +Inf\nd NaN")]
    assert values[:3] == [1, 1.5e6, math.inf] and math.isnan(values[3])


@pytest.mark.parametrize("line", ["<html>", "a", 'a{b="c" 1', "a{b=c} 1", "a one", 'a{b="c"x="d"} 1'])
def test_a_page_of_something_else(line):
    with pytest.raises(ProtocolError, match="line 2 is no sample"):
        list(samples(f"x 1\n{line}\n"))


def test_a_page_that_is_none(serve, monkeypatch):
    monkeypatch.setattr(metrics_page, "MAX_PAGE_BYTES", 1000)
    for page, words in (
        (404, "HTTP 404"), ("<html>", "no metrics page: line 1"), ("x 1\n" * 1000, "more than 0 MiB"),
    ):  # fmt: skip
        with pytest.raises(EngineDownError, match=words):
            fetch_samples(metrics_url(serve(page).url))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"SSH-2.0\r\n\r\n", r"^it does not answer in HTTP: 'SSH-2\.0\\r\\n'$"),
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
        with pytest.raises(EngineDownError, match=words):
            fetch_samples(f"http://127.0.0.1:{other.getsockname()[1]}/metrics", 60.0)


def test_a_page_that_drips_and_a_proxy(serve, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    page = metrics_url(serve("x 1\n" * 100_000).url)
    fetch_samples(page, 60.0)
    clock = itertools.count(0.0, 50.0)
    monkeypatch.setattr(metrics_page, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(EngineDownError, match="no end of its page within 60 s"):
        fetch_samples(page, 60.0)


def test_an_engine_that_hangs(serve):
    hangs = serve("")
    hangs.open.clear()
    with pytest.raises(EngineDownError, match=r"^no answer within 0\.2 s$"):
        fetch_samples(metrics_url(hangs.url), 0.2)


TEXTS = "", "foo", "http://", "ftp://h:1", "http://h:99999", "http://h:x", "a b:1", "h:0", "http://[::1"


@pytest.mark.parametrize("text", [*TEXTS, "http://user:secret@h:1"])
def test_texts_that_are_no_url(text):
    result = CliRunner().invoke(app, ["drain", text])
    assert result.exit_code == 2 and "expected http://HOST:PORT" in result.stderr and "secret" not in result.stderr


def test_urls_and_the_command_that_is_gone():
    assert metrics_url("10.0.0.1:8001") == "http://10.0.0.1:8001/metrics"
    assert metrics_url("https://h/prefix/metrics") == "https://h/prefix/metrics"
    assert metrics_url("http://[::1]:8001/") == "http://[::1]:8001/metrics"
    result = CliRunner().invoke(app, ["top", "--once", "h:1"])
    assert result.exit_code == 2 and "use `kvferry check`" in result.stderr and result.stderr.count("\n") == 1
