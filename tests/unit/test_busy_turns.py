"""``busy_turns.py`` on a host that stands still: what has ended begins anew, what was disturbed too."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import busy_turns as turns
from tests.support.server import EngineError, Server

SEQUENCES = 4


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0.0)


class Decoder:
    """An engine that decodes: the first ``ended`` of its requests end before anybody looks at its metrics."""

    def __init__(self, ended: int, status: int = 200) -> None:
        self.ended, self.status, self.asked = ended, status, 0
        self.over = threading.Event()
        decoder = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert len(body["prompt"]) == SEQUENCES
                decoder.asked += 1
                if decoder.asked > decoder.ended:
                    decoder.over.wait(120)
                self.send_response(decoder.status)
                self.end_headers()
                self.wfile.write(b"planted")

            def do_GET(self) -> None:
                running = SEQUENCES if decoder.asked > decoder.ended else 0
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"vllm:num_requests_running {running}\n".encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()

    def background(self) -> turns.Background:
        server = Server("stand-in", None, -1, Path("none"), *self.server.server_address)  # type: ignore[arg-type]
        return turns.Background(server, [[2] * 64] * SEQUENCES, 8192)


@pytest.fixture
def pair() -> Any:
    return turns.BusyPair("KVFerryConnector", None, None, random.Random(1), 1000)  # type: ignore[arg-type]


def test_a_background_that_has_ended_begins_anew() -> None:
    with Decoder(ended=2) as decoder:
        background = decoder.background()
        background.start()
        background.stop()
        assert decoder.asked == 3


def test_a_background_that_is_refused_is_told() -> None:
    with Decoder(ended=9, status=400) as decoder, pytest.raises(EngineError, match="HTTP 400: b'planted'"):
        decoder.background().start()


def test_a_disturbed_turn_is_measured_again(
    pair: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Any] = [turns.DisturbedTurnError("planted one"), turns.DisturbedTurnError("planted two"), None]

    def measure_turn(cell: Any, pace: Any) -> Any:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return ["a sample"], [5.0]

    monkeypatch.setattr(pair, "measure_turn", measure_turn)
    cell = turns.Cell("fresh", SEQUENCES)
    pair.turn(cell, turns.Pace(1, 0.1))
    assert pair.measured == ["a sample"] and pair.quiet == {cell: [5.0]}
    assert pair.repeated == ["planted one", "planted two"] and "again: planted two" in capsys.readouterr().out


def test_a_turn_that_is_disturbed_each_time_ends_the_run(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_turn(cell: Any, pace: Any) -> Any:
        raise turns.DisturbedTurnError("planted")

    monkeypatch.setattr(pair, "measure_turn", measure_turn)
    with pytest.raises(EngineError, match="planted"):
        pair.turn(turns.Cell("fresh", SEQUENCES), turns.Pace(1, 0.1))
    assert len(pair.repeated) == turns.ATTEMPTS - 1


def why(*load: Any) -> str:
    return str(turns.unsteady(*load))


def test_what_is_steady() -> None:
    """Steps every 10 ms from 1 s to 2 s; the first 0.3 s are quiet, the last token comes after 0.9 s."""
    steps = [(1 + n / 100, 4) for n in range(101)]
    assert turns.unsteady(4, steps, 1.3, 1.9) is None
    assert turns.unsteady(4, [(at, 3 if at > 1.95 else 4) for at, _ in steps], 1.3, 1.9) is None
    assert "{3, 4}" in why(4, [(at, 3 if at < 1.1 else 4) for at, _ in steps], 1.3, 1.9)
    assert "ended" in why(4, [step for step in steps if step[0] < 1.5], 1.3, 1.9)
    assert "ended" in why(4, [], 1.3, 1.9)
    assert "no two steps" in why(4, [step for step in steps if step[0] > 1.4], 1.3, 1.9)
