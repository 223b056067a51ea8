"""``kvferry drain`` before real HTTP servers: what counts as idle, for how long, and what it says."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from kvferry.cli import drain
from kvferry.cli.main import app
from kvferry.cli.terminal import FailedError
from tests.drain.pages import recorded


class Clock:
    """A clock that moves while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


def page(running: int = 0, waiting: int = 0, usage: float = 0.0, engine: int = 0) -> str:
    labels = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"vllm:num_requests_running{labels} {running}\n"
        f"vllm:num_requests_waiting{labels} {waiting}\n"
        f"vllm:kv_cache_usage_perc{labels} {usage}\n"
    )


def wait(url: str, quiet: float = 2.0, timeout: float = 60.0, said: list[str] | None = None) -> Clock:
    clock, lines = Clock(), [] if said is None else said
    drain.wait_until_idle(url, quiet=quiet, timeout=timeout, say=lines.append, clock=clock, sleep=clock.sleep)
    return clock


@pytest.mark.parametrize(
    "busy",
    [page(running=1), page(waiting=1), page(usage=0.01), page() + page(1, engine=1), page(usage=0.01) + page(engine=1)],
)
def test_a_request_or_a_lease_is_waited_for(serve, busy):
    clock = wait(serve(busy, busy, page()).url)
    assert clock.slept == 2 + 2.0 / drain.POLL_SECONDS


def test_the_time_without_requests_begins_anew_with_each_request_and_without_an_answer(serve):
    clock = wait(serve(page(), page(), page(running=1), page()).url)
    assert clock.slept == 3 + 2.0 / drain.POLL_SECONDS
    clock = wait(serve(500, page()).url)
    assert clock.slept == 1 + 2.0 / drain.POLL_SECONDS
    with pytest.raises(FailedError, match="not idle after 3 s: HTTP 500"):
        wait(serve(500).url, timeout=3.0)


def test_an_engine_that_is_gone_is_not_waited_for(serve):
    gone, ends = serve(page()), serve(page(running=1))
    gone.close()
    result = CliRunner().invoke(app, ["drain", gone.url])
    assert result.exit_code == 1 and "has nothing to drain: nothing listens there" in result.stderr
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.slept == 3:
            ends.close()

    with pytest.raises(FailedError, match="nothing to drain"):
        drain.wait_until_idle(ends.url, quiet=2, timeout=60, say=lambda _: None, clock=clock, sleep=sleep)
    assert clock.slept == 3


def test_without_the_figures_of_vllm_nothing_is_called_idle(serve):
    server = serve(recorded("prefill").replace("vllm:kv_cache_usage_perc", "other"))
    result = CliRunner().invoke(app, ["drain", server.url])
    assert result.exit_code == 2 and "--disable-log-stats" in result.output


def test_what_it_waits_for_is_said_every_10_seconds(serve):
    said: list[str] = []
    server = serve(*[500] * 41, page())
    wait(server.url, said=said)
    assert said == [f"waiting for {server.url}: HTTP 500 Internal Server Error"] * 3, "at 0, 10 and 20 s"


def test_a_host_that_does_not_exist_is_not_waited_for(monkeypatch):
    def unknown(name, *_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    result = CliRunner().invoke(app, ["drain", "http://no-host.invalid:8000"])
    assert result.exit_code == 2 and result.stderr.startswith("kvferry: http://no-host.invalid:8000: Name or")
    assert "expected http://HOST:PORT" in result.stderr and result.stderr.count("\n") == 1


def test_a_name_server_that_does_not_answer_is_waited_for(monkeypatch):
    def no_answer(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_answer)
    said: list[str] = []
    with pytest.raises(FailedError, match="Temporary failure"):
        wait("http://p:8000", timeout=3.0, said=said)
    assert said == ["waiting for http://p:8000: no connection: Temporary failure in name resolution"]


def test_a_timeout_that_is_too_short(serve):
    result = CliRunner().invoke(app, ["drain", serve(page()).url, "--quiet", "10", "--timeout", "5"])
    assert result.exit_code == 2
    assert result.stderr == "kvferry: --timeout 5 is shorter than --quiet 10; give a longer one\n"
    assert wait(serve(page()).url, quiet=5.0, timeout=5.0).now == 5.0


def test_the_command(serve):
    server = serve(page())
    result = CliRunner().invoke(app, ["drain", server.url, "--quiet", "0"])
    assert result.exit_code == 0, result.output
    assert result.output == f"{server.url} is idle: no request and no lease for 0 s\n"
    result = CliRunner().invoke(app, ["drain", serve(page(2, 1, 0.25)).url, "--quiet", "0", "--timeout", "0"])
    assert result.exit_code == 1
    assert "2 request(s) run, 1 wait, 25.00% of its KV blocks are held by requests and leases" in result.output
    assert CliRunner().invoke(app, ["drain", "ftp://engine"]).exit_code == 2
