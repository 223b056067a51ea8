"""One turn of ``busy.py``: a decoder under a steady load, quiet, then with hand-overs and local hits in pairs."""

from __future__ import annotations

import http.client
import json
import random
import re
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engines.engine_pair import body, prefill_leg
from tests.support.fragment import in_sequence
from tests.support.kv_bytes import compare
from tests.support.pd_client import METRICS, stream
from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum

BACKGROUND_TOKENS = 64
"""Of a background sequence's prompt."""
SETTLE_SECONDS = 0.3
"""Before anything is measured: the first steps of a batch are none of many."""
STEADY = 0.98
"""Of the steps must have a token for each background sequence; none may end, wait or be preempted meanwhile."""
ATTEMPTS = 5
"""At a turn. Each but the first follows one that was disturbed."""
DONE = re.compile(r"hand-over of \S*?(fg-\d+)\S* done: \d+ tokens, \d+ bytes in ([\d.]+) ms over (\S+) from")
Marks = dict[str, Any]
Steps = list[tuple[float, int]]
"""When D told of tokens of the background, and of how many sequences."""


@dataclass(frozen=True)
class Cell:
    """What a turn varies but the connector: order of D's free blocks, decoding sequences."""

    order: str
    sequences: int


@dataclass(frozen=True)
class Pace:
    """``pairs``: hand-overs of each length in a turn, each with a local hit behind it. ``period``: seconds from one
    request to the next."""

    pairs: int
    period: float


@dataclass
class Sample:
    """One hand-over and the local hit of the same prompt behind it. ``gaps``: milliseconds between the tokens of the
    background, from the hand-over's arrival on, for a period; ``local_gaps``: of the local hit, likewise."""

    cell: Cell
    tokens: int
    loaded: Marks
    local: Marks
    gaps: list[float]
    local_gaps: list[float]

    def ttft(self, which: str) -> float:
        marks: Marks = getattr(self, which)
        return float(marks["token"] - marks["arrived"]) * 1e3


class DisturbedTurnError(EngineError):
    """A turn measured something else: the background did not decode all the while, or a hand-over failed."""


@dataclass
class BusyPair:
    """The engines of one connector, and what was measured on them.

    ``notes``: what D's scheduler writes. ``prompts``: by length, held by P. ``longest``: tokens of a sequence.
    ``in_sequence``: by order, the share of blocks in sequence in P's and in D's table of one prompt. ``repeated``:
    turns that were measured again, each with the reason.
    """

    connector: str
    prefill: Server
    decode: Server
    rng: random.Random
    vocabulary: int
    notes: Path = Path()
    in_sequence: dict[str, tuple[float, float]] = field(default_factory=dict)
    prompts: dict[int, list[list[int]]] = field(default_factory=dict)
    measured: list[Sample] = field(default_factory=list)
    quiet: dict[Cell, list[float]] = field(default_factory=dict)
    followed: int = 0
    read: int = 0
    longest: int = 4096
    failed_before: list[float] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def engines(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def words(self, tokens: int) -> list[int]:
        return [self.rng.randrange(2, self.vocabulary) for _ in range(tokens)]

    def prefill_all(self, lengths: list[int], count: int) -> None:
        """Make the prompts and have P compute them. P finds them in its prefix cache from then on."""
        for tokens in lengths:
            self.prompts[tokens] = [self.words(tokens) for _ in range(count)]
            for prompt in self.prompts[tokens]:
                self.prefill.post("/v1/completions", body(prompt))

    def connect(self, pace: Pace) -> None:
        """Hand prompts over until one comes: the first pays for the handshake, which may fail on a busy machine.

        Raises:
            EngineError: none of them came.
        """
        tokens, prompts = next(iter(self.prompts.items()))
        for last in [False] * 4 + [True]:
            self.collect("fresh")
            names = self.ask(prompts[0], pace)
            marks, _ = self.collect("fresh")
            try:
                self.check(tokens, (marks.get(names[0], {}), marks.get(names[1], {})))
                break
            except EngineError:
                if last:
                    raise
        self.failed_before = self.failures()

    def look(self, order: str, tokens: int) -> None:
        """Hand one prompt over, compare all its bytes, and see how both block tables lie."""
        for engine in self.engines:
            engine.rpc("kv_watch")
        request = body(self.words(tokens))
        stream(self.decode.url, request | {"kv_transfer_params": prefill_leg(self.prefill, request)})
        of_p, of_d = (engine.rpc("kv_records")[0] for engine in self.engines)
        for engine in self.engines:
            engine.rpc("kv_unwatch")
        differ = compare(of_d, of_p)
        if differ is not None:
            raise EngineError(f"{self.connector}, {order}: {differ}")
        self.in_sequence[order] = (in_sequence(of_p[-1]["blocks"][0]), in_sequence(of_d[-1]["blocks"][0]))

    def failures(self) -> list[float]:
        return [metric_sum(engine.metrics(), METRICS[self.connector].failed) or 0.0 for engine in self.engines]

    def check_failed(self) -> None:
        """No hand-over may have failed but in turns that were measured again."""
        failed = self.failures()
        if failed != self.failed_before:
            raise EngineError(f"{self.connector}: failed hand-overs of P, D: {failed}, before {self.failed_before}")

    def turn(self, cell: Cell, pace: Pace, *, keep: bool = True) -> None:
        """Measure every length on an empty prefix cache; with ``keep`` the samples count. A disturbed turn is
        measured again.

        Raises:
            EngineError: a prompt was computed that should have been loaded or found, or every attempt was disturbed.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                samples, quiet = self.measure_turn(cell, pace)
                break
            except DisturbedTurnError as why:
                if attempt == ATTEMPTS:
                    raise
                self.repeated.append(str(why))
                print(f"measured again: {why}", flush=True)
        if keep:
            self.measured += samples
            self.quiet.setdefault(cell, []).extend(quiet)

    def measure_turn(self, cell: Cell, pace: Pace) -> tuple[list[Sample], list[float]]:
        """One attempt at a turn: its samples, and the quiet gaps.

        Raises:
            DisturbedTurnError: the load was not steady, or a hand-over failed.
            EngineError: a prompt was computed that should have been loaded or found.
        """
        self.collect(cell.order)
        prompts = [self.words(BACKGROUND_TOKENS) for _ in range(cell.sequences)]
        background = Background(self.decode, prompts, self.longest)
        begin = end = time.monotonic()
        asked = []
        try:
            if cell.sequences:
                background.start()
                begin = time.monotonic()
                time.sleep(pace.pairs * pace.period)
                end = time.monotonic()
            for number in range(pace.pairs):
                asked += [(tokens, self.ask(self.prompts[tokens][number], pace)) for tokens in self.prompts]
        finally:
            background.stop()
        marks, steps = self.collect(cell.order)
        samples = []
        for tokens, names in asked:
            self.check(tokens, both := (marks.get(names[0], {}), marks.get(names[1], {})))
            samples.append(sample_of(cell, tokens, both, steps, pace.period))
        quiet = gaps_between(steps, begin, end)
        why = None
        if cell.sequences:
            why = unsteady(
                cell.sequences, [step for step in steps if step[0] >= begin], end, samples[-1].local["token"]
            )
        if (failed := self.failures()) != self.failed_before:
            why = f"failed hand-overs of P, D: {failed}, before {self.failed_before}"
            self.failed_before = failed
        if why is not None:
            raise DisturbedTurnError(f"{self.connector}, {cell.order}, {cell.sequences} sequences: {why}")
        return samples, quiet

    def ask(self, prompt: list[int], pace: Pace) -> tuple[str, str]:
        """Hand one prompt over, and ask D for it again; the names of both requests."""
        params = prefill_leg(self.prefill, body(prompt))
        return self._ask(body(prompt) | {"kv_transfer_params": params}, pace), self._ask(body(prompt), pace)

    def _ask(self, request: dict[str, Any], pace: Pace) -> str:
        self.followed += 1
        name, began = f"fg-{self.followed}", time.monotonic()
        self.decode.post("/v1/completions", request, headers={"X-Request-Id": name})
        time.sleep(max(0.0, began + pace.period - time.monotonic()))
        return name

    def collect(self, order: str) -> tuple[dict[str, Marks], Steps]:
        """What D noted since the last call, its worker's notes too. As ``collect_notes``."""
        marks, steps, self.read = collect_notes(self.decode, self.notes, self.read, order)
        for of_rank in self.decode.rpc("busy_take"):
            for name, values in of_rank.items():
                marks.setdefault(name, {"name": name}).update(values)
        return marks, steps

    def check(self, tokens: int, pair: tuple[Marks, Marks]) -> None:
        """That the hand-over came from P, and the local hit out of the prefix cache, all but the last token."""
        loaded, local = pair
        right = loaded.get("external", 0) >= tokens - 1 and not local.get("external")
        if not right or any("token" not in marks or marks.get("computed") != 1 for marks in pair):
            raise EngineError(f"{self.connector}: {tokens} tokens were to be loaded and found, but {pair}")

    def add_logged(self) -> None:
        """Add to the samples what KVFerry wrote to D's log of each hand-over: its milliseconds and its data plane."""
        found = {name: (float(ms), plane) for name, ms, plane in DONE.findall(self.decode.log_text())}
        for sample in self.measured:
            if (said := found.get(sample.loaded["name"])) is not None:
                sample.loaded["logged_ms"], sample.loaded["plane"] = said


def collect_notes(server: Server, notes: Path, read: int, order: str) -> tuple[dict[str, Marks], Steps, int]:
    """What an engine's scheduler noted behind byte ``read`` of its notes, and their end. Behind it the engine's prefix
    cache is empty, and its free blocks are in order.

    Raises:
        EngineError: blocks are still held after ``PATIENCE_SECONDS``.
    """
    notes.with_name(f"{notes.name}.order").write_text(order)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not server.post("/reset_prefix_cache")["success"]:
        if time.monotonic() > deadline:
            raise EngineError(f"{server.name}: blocks are still held {PATIENCE_SECONDS:g} s after the last request")
        time.sleep(0.05)
    marks: dict[str, Marks] = {}
    steps: Steps = []
    with notes.open() as file:
        file.seek(read)
        for line in iter(file.readline, ""):
            noted = json.loads(line)
            for name, values in noted["requests"].items():
                marks.setdefault(name, {"name": name}).update(values)
            steps += [(at, count) for at, count in noted["steps"]]
        return marks, steps, file.tell()


class Background:
    """Sequences that D decodes until they are stopped; they are one request of a client that leaves."""

    def __init__(self, decode: Server, prompts: list[list[int]], longest: int) -> None:
        self._decode, self._prompts, self._longest = decode, prompts, longest
        self._connection: http.client.HTTPConnection | None = None

    def start(self) -> None:
        """Return when all of them decode. Where all have ended before that was seen, they begin anew.

        Raises:
            EngineError: D answers with an error, or they do not decode within ``PATIENCE_SECONDS``.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        connection = self._ask()
        while metric_sum(self._decode.metrics(), "vllm:num_requests_running") != len(self._prompts):
            if answered(connection):
                self._check_answer(connection)
                self.stop()
                connection = self._ask()
            elif time.monotonic() > deadline:
                raise EngineError(
                    f"{self._decode.name} does not decode {len(self._prompts)} sequences after {PATIENCE_SECONDS:g} s"
                )
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)

    def _ask(self) -> http.client.HTTPConnection:
        request = {
            "model": "model", "prompt": self._prompts, "max_tokens": self._longest - BACKGROUND_TOKENS - 1,
            "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": "bg-0"}
        self._connection = http.client.HTTPConnection(self._decode.host, self._decode.port, timeout=PATIENCE_SECONDS)
        self._connection.request("POST", "/v1/completions", json.dumps(request), headers)
        return self._connection

    def _check_answer(self, connection: http.client.HTTPConnection) -> None:
        try:
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self._decode.name}: {error!r}\n{self._decode.log_tail()}") from None
        if answer.status != 200:
            raise EngineError(f"{self._decode.name}: HTTP {answer.status}: {text[:500]!r}")

    def stop(self) -> None:
        if self._connection is not None:
            if self._connection.sock is not None:  # else the server has closed it
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)  # vLLM aborts what nobody waits for
            self._connection.close()
            self._connection = None


def answered(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has sent anything, or has closed the connection."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def unsteady(sequences: int, steps: Steps, quiet_end: float, last: float) -> str | None:
    """Why a load of so many ``sequences`` was not steady; None where it was.

    Args:
        sequences: how many were to decode.
        steps: D's, from the begin of the quiet time.
        quiet_end: the end of the quiet time.
        last: when the last request had its token.
    """
    counts = [count for at, count in steps if at <= last]
    if counts.count(sequences) < STEADY * len(counts):
        return f"in a step {set(counts)} of them got a token"
    if not steps or steps[-1][0] < last:
        return "they ended before the last request did"
    return None if gaps_between(steps, 0.0, quiet_end) else "D made no two steps before the first hand-over"


def sample_of(cell: Cell, tokens: int, pair: tuple[Marks, Marks], steps: Steps, period: float) -> Sample:
    loaded, local = pair
    gaps, local_gaps = (
        gaps_between(steps, marks["arrived"], marks["arrived"] + max(period, marks["token"] - marks["arrived"]))
        for marks in pair
    )
    return Sample(cell, tokens, loaded, local, gaps, local_gaps)


def gaps_between(steps: Steps, begin: float, end: float) -> list[float]:
    """Milliseconds between consecutive tokens of a background sequence, for tokens in this time."""
    times = [at for at, _ in steps]
    return [(after - before) * 1e3 for before, after in pairwise(times) if begin < after <= end]
