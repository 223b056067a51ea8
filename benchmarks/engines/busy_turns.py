"""The turns of ``busy.py``: a decoder under a steady load, quiet, then with hand-overs and local hits in pairs; and the
figures that they make."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.engine_pair import (
    Background,
    DisturbedTurnError,
    Marks,
    ProbedEngine,
    Steps,
    Words,
    body,
    gaps_between,
    prefill_leg,
    undisturbed,
    unsteady,
)
from benchmarks.harness import pages, report
from tests.support.kv_bytes import compare, in_sequence
from tests.support.pd_client import METRICS, stream
from tests.support.server import EngineError, Server, metric_sum


@dataclass(frozen=True)
class Cell:
    """What a turn varies but the connector: order of D's free blocks, and decoding sequences."""

    order: str
    sequences: int

    def __str__(self) -> str:
        return f"{self.order}, {self.sequences} sequences"


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


@dataclass
class BusyPair:
    """The engines of one connector, and what was measured on them.

    ``period``: seconds from one request to the next. ``prompts``: by length, held by P. ``longest``: tokens of a
    sequence. ``in_sequence``: by order, the share of the
    blocks of D's tables that follow one another. ``repeated``: turns that were measured again, each with the reason.
    """

    connector: str
    prefill: Server
    decode: ProbedEngine
    words: Words
    longest: int
    period: float
    prompts: dict[int, list[list[int]]] = field(default_factory=dict)
    measured: list[Sample] = field(default_factory=list)
    quiet: dict[Cell, list[float]] = field(default_factory=dict)
    failed_before: list[float] = field(default_factory=list)
    in_sequence: dict[str, float] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)

    @property
    def engines(self) -> tuple[Server, Server]:
        return self.prefill, self.decode.server

    def prefill_all(self, counts: dict[int, int]) -> None:
        """Make so many prompts of each length and have P compute them. P finds them in its prefix cache from then
        on."""
        for tokens, count in counts.items():
            self.prompts[tokens] = [self.words(tokens) for _ in range(count)]
            for prompt in self.prompts[tokens]:
                self.prefill.post("/v1/completions", body(prompt))

    def connect(self) -> None:
        """Hand a prompt over: the first hand-over pays for the handshake, which may fail on a busy machine.

        Raises:
            DisturbedTurnError: none of several came.
        """
        tokens, prompts = next(iter(self.prompts.items()))

        def once() -> None:
            self.collect("fresh")
            names = self.ask(prompts[0])
            marks, _ = self.collect("fresh")
            self.check(tokens, (marks.get(names[0], {}), marks.get(names[1], {})))

        undisturbed(once, self.repeated)
        self.failed_before = self.failures()

    def look(self, order: str, tokens: int) -> None:
        """Hand one prompt over and compare all its bytes."""
        for engine in self.engines:
            engine.rpc("kv_watch")
        request = body(self.words(tokens))
        stream(self.decode.server.url, request | {"kv_transfer_params": prefill_leg(self.prefill, request)})
        of_p, of_d = (engine.rpc("kv_records")[0] for engine in self.engines)
        for engine in self.engines:
            engine.rpc("kv_unwatch")
        differ = compare(of_d, of_p)
        if differ is not None:
            raise EngineError(f"{self.connector}, {order}: {differ}")
        self.in_sequence[order] = round(in_sequence(of_d[-1]["blocks"][0]), 3)

    def failures(self) -> list[float]:
        return [metric_sum(engine.metrics(), METRICS[self.connector].failed) or 0.0 for engine in self.engines]

    def check_failed(self) -> None:
        """No hand-over may have failed but in turns that were measured again."""
        failed = self.failures()
        if failed != self.failed_before:
            raise EngineError(f"{self.connector}: failed hand-overs of P, D: {failed}, before {self.failed_before}")

    def turn(self, cell: Cell, pairs: int, *, keep: bool = True) -> None:
        """Measure every length so often on an empty prefix cache, each time with a local hit behind the hand-over; with
        ``keep`` the samples count.

        Raises:
            DisturbedTurnError: in every attempt the load was not steady, a hand-over failed, or a prompt was computed
                that should have been loaded or found.
        """
        samples, quiet = undisturbed(lambda: self.measure_turn(cell, pairs), self.repeated)
        if keep:
            self.measured += samples
            self.quiet.setdefault(cell, []).extend(quiet)

    def measure_turn(self, cell: Cell, pairs: int) -> tuple[list[Sample], list[float]]:
        """One attempt at a turn: its samples, and the quiet gaps. Raises DisturbedTurnError."""
        self.collect(cell.order)
        asked = []
        with Background(self.decode.server, self.words, cell.sequences, self.longest) as background:
            begin, end = background.quiet(pairs * self.period)
            for number in range(pairs):
                asked += [(tokens, self.ask(of[number])) for tokens, of in self.prompts.items() if number < len(of)]
        marks, steps = self.collect(cell.order)
        before, self.failed_before = self.failed_before, self.failures()
        if before != self.failed_before:
            raise DisturbedTurnError(f"{self.connector}: failed hand-overs of P, D: {self.failed_before}, not {before}")
        samples = []
        for tokens, names in asked:
            self.check(tokens, both := (marks.get(names[0], {}), marks.get(names[1], {})))
            samples.append(sample_of(cell, tokens, both, steps, self.period))
        quiet = gaps_between(steps, begin, end)
        if cell.sequences and (why := unsteady(cell.sequences, steps, (begin, end), samples[-1].local["token"])):
            raise DisturbedTurnError(f"{self.connector}, {cell}: {why}")
        return samples, quiet

    def ask(self, prompt: list[int]) -> tuple[str, str]:
        """Hand one prompt over, and ask D for it again; the names of both requests."""
        params = prefill_leg(self.prefill, body(prompt))
        loaded, _ = self.decode.ask(body(prompt) | {"kv_transfer_params": params}, self.period)
        return loaded, self.decode.ask(body(prompt), self.period)[0]

    def collect(self, order: str) -> tuple[dict[str, Marks], Steps]:
        """As of ``ProbedEngine``, with the notes of D's worker."""
        marks, steps = self.decode.collect(order)
        for of_rank in self.decode.server.rpc("busy_take"):
            for name, values in of_rank.items():
                marks.setdefault(name, {"name": name}).update(values)
        return marks, steps

    def check(self, tokens: int, pair: tuple[Marks, Marks]) -> None:
        """That the hand-over came from P, and the local hit out of the prefix cache, all but the last token."""
        loaded, local = pair
        right = loaded.get("external", 0) >= tokens - 1 and not local.get("external")
        if not right or any("token" not in marks or marks.get("computed") != 1 for marks in pair):
            raise DisturbedTurnError(f"{self.connector}: {tokens} tokens were to be loaded and found, but {pair}")


def sample_of(cell: Cell, tokens: int, pair: tuple[Marks, Marks], steps: Steps, period: float) -> Sample:
    loaded, local = pair
    gaps, local_gaps = (
        gaps_between(steps, marks["arrived"], marks["arrived"] + max(period, marks["token"] - marks["arrived"]))
        for marks in pair
    )
    return Sample(cell, tokens, loaded, local, gaps, local_gaps)


# --- rows -----------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def copy_ms(marks: Marks) -> float | None:
    """From the first copy's begin to the last one's end: on the GPU where that is known, else for the host."""
    begin, end = marks["on_gpu"] if "on_gpu" in marks else (marks.get("begun"), marks.get("ended"))
    return None if begin is None or end is None else (end - begin) * 1e3


def rows_of(pair: BusyPair) -> list[Row]:
    """One row for each cell and prompt length."""
    cells = dict.fromkeys((sample.cell, sample.tokens) for sample in pair.measured)
    return [row_of(pair, [s for s in pair.measured if (s.cell, s.tokens) == key]) for key in cells]


def row_of(pair: BusyPair, samples: list[Sample]) -> Row:
    cell = samples[0].cell
    gaps, local_gaps = ([gap for s in samples for gap in getattr(s, name)] for name in ("gaps", "local_gaps"))
    quiet = pair.quiet.get(cell, [])
    loaded, local = ([round(sample.ttft(which), 3) for sample in samples] for which in ("loaded", "local"))
    copies = [ms for sample in samples if (ms := copy_ms(sample.loaded)) is not None]
    return {
        "connector": pair.connector, "order": cell.order, "sequences": cell.sequences, "tokens": samples[0].tokens,
        "samples": len(samples),
        "ttft_ms": report.percentile(loaded, 50), "local_ttft_ms": report.percentile(local, 50),
        "over_local_ms": report.percentile([a - b for a, b in zip(loaded, local, strict=True)], 50),
        "copy_ms": report.percentile(copies, 50),
        "ways": dict(sorted(Counter(sample.loaded["way"] for sample in samples).items())),
        "in_sequence": pair.in_sequence[cell.order], "gaps": len(gaps), "quiet_gaps": len(quiet),
        **report.spread("gap", gaps), **report.spread("local_gap", local_gaps), **report.spread("quiet", quiet),
        "all_ttft_ms": loaded, "all_local_ttft_ms": local,
    }  # fmt: skip


def show(result: Row) -> None:
    """Print the table, and what is not in it."""
    print(pages.table(pages.by_load(result["rows"]), pages.OF["gpu-busy"].columns))
    for name, why in result["left_out"].items():
        print(f"left out: {name}: {why}")
