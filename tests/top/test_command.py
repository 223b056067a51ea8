"""``kvferry top`` before real HTTP servers: what it prints, engines that are down, a user's mistakes."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.top import poll
from kvferry.cli.top.command import COLUMNS, table
from kvferry.cli.top.figures import EngineRow
from kvferry.cli.top.poll import EngineDownError, Engines, fetch, metrics_url
from tests.router.stand_ins import closed_port
from tests.top.pages import recorded

ONCE = ["--once", "--interval", "0.1"]


def invoke(*arguments: str):
    result = CliRunner().invoke(app, ["top", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def closed() -> str:
    return f"127.0.0.1:{closed_port()}"


def test_one_table_of_two_engines_and_one_that_is_down(serve):
    p, d = (serve(recorded(f"{side}_1"), recorded(f"{side}_2")) for side in ("prefill", "decode"))
    down = closed()
    result = invoke(p.url, d.name, down, *ONCE)
    assert result.exit_code == 0, result.output
    header, *rows = result.output.splitlines()
    assert [name for name in COLUMNS if name not in header] == []
    assert len(rows) == 4
    assert rows[0].startswith(p.name) and rows[1].startswith(d.name) and " cma " in rows[1]
    assert rows[0].split()[4:6] == ["-", "0.0%"] and rows[1].split()[4:6] == ["13/13", "99.7%"], "since their start"
    assert rows[2].split() == [down, "down"] and rows[3] == f"{down}: Connection refused"


def test_no_engine_that_answers_is_exit_status_1(serve):
    router, other = serve("kvferry_router_in_flight 0\n"), serve("x 1\n")
    result = invoke(closed(), router.url, other.url, *ONCE)
    assert result.exit_code == 1
    assert "Connection refused" in result.stdout and "no vLLM server" in result.stdout
    assert f"{router.name} is a router that has named no source of a prefix\n" in result.stdout


def test_prefixes_that_engines_have_read_and_from_whom(serve):
    """What an engine has lent is no read of its own."""
    reads = {"loaded": 12, "local": 2, "failed": 1, "lent": 50}
    counted = "".join(f'vllm:kvferry_prefix_reads_total{{result="{name}"}} {count}\n' for name, count in reads.items())
    p = serve(recorded("prefill_1") + counted + "vllm:kvferry_prefix_tokens_read_total 34816\n")
    lends = serve(recorded("decode_1") + 'vllm:kvferry_prefix_reads_total{result="lent"} 50\n')
    of = 'kvferry_router_prefix_sources_total{{reader="http://p:1",source="http://{}:1"}} {}\n'
    router = serve(of.format("e", 1) + of.format("d", 14) + "kvferry_router_in_flight 0\n")
    _, *lines = invoke(p.url, lends.url, router.url, *ONCE).stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith(p.name) and lines[1].startswith(lends.name)
    assert lines[2] == f"{p.name} has read a prefix for 12 of 15 requests that named sources: 34816 tokens"
    named = "requests to http://p:1, by the source of a prefix that they named: http://d:1 14, http://e:1 1"
    assert lines[3] == f"{router.name}: {named}"
    rows = json.loads(invoke(p.url, router.url, *ONCE, "--json").stdout)
    assert rows[0]["prefixes"] == reads | {"tokens": 34816} and not rows[0]["router"] and rows[1]["router"]
    assert rows[1]["sources"] == {"http://p:1": {"http://d:1": 14, "http://e:1": 1}}


def test_json(serve):
    d = serve(*map(recorded, ("decode_1", "decode_2")))
    result = invoke(d.url, closed(), *ONCE, "--json")
    engine, down = json.loads(result.stdout)
    assert result.exit_code == 0 and engine["planes"][0]["plane"] == "cma" and not engine["down"]
    assert engine["planes"][0]["handovers_per_second"] > 0 and down["down"]


def test_one_hand_over_is_seen_at_once_and_a_prompt_that_was_not_loaded_with_its_reason(serve):
    of = 'engine="0",model_name="model"'
    missed = f'vllm:kvferry_prompts_total{{{of},reason="other_prompt",result="local"}} 2\n'
    d = serve(recorded("decode_1") + missed)
    engine = json.loads(invoke(d.url, *ONCE, "--json").stdout)[0]
    assert engine["prompts"] == {"loaded": 1, "local": 2} and engine["not_loaded"] == {"other_prompt": 2}
    assert engine["handovers"] == 1 and engine["tokens"] == {"external_kv_transfer": 40, "local_compute": 1}
    shown = invoke(d.url, *ONCE).stdout
    assert " 1/3 " in shown and " 97.6% " in shown and "other_prompt 2" in shown


def test_an_engine_without_kvferry_and_one_whose_prompts_name_no_p_are_marked(serve):
    page = recorded("decode_1")
    without = "\n".join(line for line in page.splitlines() if "kvferry_" not in line)
    plain = page.replace('reason="no_params",result="plain"} 0', 'reason="no_params",result="plain"} 3')
    plain = plain.replace('result="loaded"} 1', 'result="loaded"} 0')
    pages = [serve(text) for text in (without, plain)]
    shown = [line.split()[4] for line in invoke(*(page.url for page in pages), *ONCE).stdout.splitlines()[1:]]
    assert shown == ["no-kvferry", "plain"]
    found = json.loads(invoke(*(page.url for page in pages), *ONCE, "--json").stdout)
    assert [engine["kvferry"] for engine in found] == [False, True]


def test_an_engine_that_comes_back_begins_anew(serve):
    server = serve(recorded("decode_2"), 503, recorded("decode_1"))
    engines = Engines([metrics_url(server.url)])
    first, second, third = (engines.poll()[0] for _ in range(3))
    engines.close()
    assert not first.down and second.down == "HTTP 503 Service Unavailable"
    assert not third.down and third.planes[0].handovers_per_second == 0


def test_a_page_that_is_none(serve, monkeypatch):
    monkeypatch.setattr(poll, "MAX_PAGE_BYTES", 1000)
    for page, words in (
        (404, "HTTP 404"), ("<html>", "no metrics page: line 1"), ("x 1\n" * 1000, "more than 0 MiB"),
        ("vllm:num_requests_running NaN", "no metrics page: cannot convert"),
        ("vllm:kvferry_bytes_transferred_sum +Inf", "no metrics page: cannot convert"),
        ('vllm:kvferry_handover_time_seconds_bucket{le="x"} 1', "no metrics page: could not convert"),
    ):  # fmt: skip
        with pytest.raises(EngineDownError, match=words):
            fetch(metrics_url(serve(page).url))


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
            fetch(f"http://127.0.0.1:{other.getsockname()[1]}/metrics", 60.0)


def test_a_page_that_drips_and_a_proxy(serve, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{closed()}")
    page = metrics_url(serve("x 1\n" * 100_000).url)
    fetch(page, 60.0)
    clock = itertools.count(0.0, 50.0)
    monkeypatch.setattr(poll, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(EngineDownError, match="no end of its page within 60 s"):
        fetch(page, 60.0)


def test_quantiles_are_of_the_last_minute(serve, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(poll, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engines, found = Engines([metrics_url(serve(recorded("decode_1"), recorded("decode_2")).url)]), []
    for now[0] in (0.0, 10.0, 30.0, 65.0, 95.0, 96.0):
        (row,) = engines.poll()
        found.append(row.planes[0].p50_ms is not None)
    engines.close()
    assert found == [True, True, True, True, True, False], "the hand-overs were before the tenth second"


def test_an_engine_that_hangs_is_down_and_the_others_are_shown(serve, monkeypatch):
    hangs, good = serve(""), serve(recorded("decode_1"))
    hangs.open.clear()
    real = poll.fetch
    monkeypatch.setattr(poll, "fetch", lambda url: real(url, 0.2 if hangs.name in url else 60.0))
    engines = Engines([metrics_url(hangs.url), metrics_url(good.url)])
    rows = engines.poll()
    engines.close()
    assert rows[0].down == "no answer within 0.2 s" and not rows[1].down


def test_the_live_table_is_drawn_until_ctrl_c(serve, monkeypatch):
    server, drawn = serve(recorded("decode_1")), []

    def sleep(seconds: float) -> None:
        drawn.append(seconds)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = invoke(server.url, "--interval", "5")
    assert result.exit_code == 0 and drawn == [5.0] * 3
    assert result.output.count(server.name) == 2, "without a terminal, each poll is printed"


def test_markup_of_an_engine_is_text():
    row = EngineRow("[bold]x[/bold]", down="[red]y")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table([row]))
    assert "[bold]x[/bold]" in captured.get() and "[red]y" in captured.get()


TEXTS = "", "foo", "http://", "ftp://h:1", "http://h:99999", "http://h:x", "a b:1", "h:0", "http://[::1"


@pytest.mark.parametrize("text", [*TEXTS, "http://user:secret@h:1"])
def test_texts_that_are_no_url(text):
    result = invoke(text, *ONCE)
    assert result.exit_code == 2 and "expected http://HOST:PORT" in result.stderr and "secret" not in result.stderr


def test_urls_and_too_many():
    assert metrics_url("10.0.0.1:8001") == "http://10.0.0.1:8001/metrics"
    assert metrics_url("https://h/prefix/metrics") == "https://h/prefix/metrics"
    assert metrics_url("http://[::1]:8001/") == "http://[::1]:8001/metrics"
    assert invoke().exit_code == 2 and invoke("h:1", "--interval", "0").exit_code == 2
    result = invoke(*(f"h{number}:1" for number in range(poll.MAX_ENGINES + 1)), *ONCE)
    assert result.exit_code == 2 and "at most 256" in result.stderr
