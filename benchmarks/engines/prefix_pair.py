"""Two engines of ``prefix_reads.py``: the source, which computes prefixes, and the reader, which is asked for the next
turn; and what is measured on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    undisturbed,
    unsteady,
)
from benchmarks.router.loads import Turns
from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum

WAYS = ("computed", "own", "read")
"""Where the prefix of a turn comes from: the engine computes it, has it in its prefix cache, or reads it."""
ALTERNATE, P_AND_D = "turns alternate", "P and D"
"""Who computes a conversation: both engines in turn; or the source as P, while the reader as D decodes all answers."""


@dataclass
class Sample:
    """One prefix. ``ttft``: milliseconds by way, in the engine's process; without ``read`` where nothing was read.
    ``gaps``: of the source's ``sequences``, in ms, from the arrival of the read on, for a period."""

    sequences: int
    tokens: int
    ttft: dict[str, float]
    gaps: list[float] = field(default_factory=list)


@dataclass
class Turn:
    """A turn of a conversation but its first. ``new``: tokens whose KV no engine has; ``computed``: by the engine that
    computes the turn, as vLLM counts them. ``named``: the engine of the last answer was named as a source."""

    form: str
    named: bool
    load: str
    prompt: int
    new: int
    computed: int
    ttft: float


@dataclass
class PrefixPair:
    """``new``: tokens of a turn behind its prefix. ``chunk``: the most that a step computes of a prompt. ``settle``:
    seconds after an answer, before another engine is asked to read."""

    source: ProbedEngine
    reader: ProbedEngine
    words: Words
    longest: int
    new: int
    chunk: int
    settle: float
    addresses: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    quiet: dict[int, list[float]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def introduce(self) -> None:
        """Have both engines say how they are named as a source."""
        for engine in (self.source, self.reader):
            _, answer = engine.ask(body(self.words(64)) | {"kv_transfer_params": {"sources": []}})
            self.addresses[engine.server.name] = answer["kv_transfer_params"]["source"]

    def turn(self, engine: ProbedEngine, prefix: list[int], *, read: bool = False, period: float = 0.0) -> str:
        """Ask for a turn behind this prefix, each time with other tokens, and name the source where the prefix is to be
        ``read``; the name of the request."""
        request = body([*prefix, *self.words(self.new)]) | {"ignore_eos": True}
        if read:
            request["kv_transfer_params"] = {"sources": [self.addresses[self.source.server.name]]}
        return engine.ask(request, period)[0]

    def collect(self) -> tuple[dict[str, Marks], Steps]:
        """What both engines noted of requests, and the steps of the source. Prefix caches are empty behind it."""
        (marks, steps), (of_reader, _) = self.source.collect(), self.reader.collect()
        return marks | of_reader, steps

    # --- turns by length ----------------------------------------------------------------------------------------

    def idle(self, lengths: list[int], count: int, *, keep: bool = True) -> None:
        """For each prefix: the source computes it, the reader reads it, and has it then."""
        self.collect()
        asked: list[tuple[int, dict[str, str]]] = []
        for tokens in [tokens for _ in range(count) for tokens in lengths]:
            prefix = self.words(tokens)
            names = {"computed": self.turn(self.source, prefix)}
            time.sleep(self.settle)
            names |= {way: self.turn(self.reader, prefix, read=way == "read") for way in ("read", "own")}
            asked.append((tokens, names))
        marks, _ = self.collect()
        if keep:
            self.samples += [Sample(0, tokens, self.times_of(tokens, names, marks)) for tokens, names in asked]

    def busy(self, lengths: list[int], count: int, sequences: int, period: float) -> None:
        """The source has computed the prefixes, and decodes ``sequences``. The reader reads each, and has it then.

        Raises:
            EngineError: the source did not decode all the while, in each attempt.
        """
        samples, quiet = undisturbed(lambda: self._busy(lengths, count, sequences, period), self.repeated)
        self.samples += samples
        self.quiet.setdefault(sequences, []).extend(quiet)

    def _busy(self, lengths: list[int], count: int, sequences: int, period: float) -> tuple[list[Sample], list[float]]:
        """One attempt: samples, and quiet gaps."""
        self.collect()
        prefixes = [self.words(tokens) for _ in range(count) for tokens in lengths]
        for prefix in prefixes:
            self.turn(self.source, prefix)
        asked: list[tuple[int, dict[str, str]]] = []
        with Background(self.source.server, self.words, sequences, self.longest) as background:
            quiet = background.quiet(len(prefixes) * period)
            for prefix in prefixes:
                names = {
                    way: self.turn(self.reader, prefix, read=way == "read", period=period) for way in ("read", "own")
                }
                asked.append((len(prefix), names))
        marks, steps = self.collect()
        samples = []
        for tokens, names in asked:
            times, arrived = self.times_of(tokens, names, marks), marks[names["read"]]["arrived"]
            window = max(period, times.get("read", 0.0) / 1e3)
            samples.append(Sample(sequences, tokens, times, gaps_between(steps, arrived, arrived + window)))
        last = max(marks[name]["token"] for _, names in asked for name in names.values())
        if why := unsteady(sequences, steps, quiet, last):
            raise DisturbedTurnError(f"the source does not decode {sequences} sequences steadily: {why}")
        return samples, gaps_between(steps, *quiet)

    def times_of(self, tokens: int, names: dict[str, str], marks: dict[str, Marks]) -> dict[str, float]:
        """Times to first token by way, in ms; without a read of which not all came.

        Raises:
            EngineError: the prefix came from elsewhere than it should.
        """
        times = {}
        for way, name in names.items():
            of_one = marks.get(name, {})
            whole = tokens + self.new
            expected = (0, min(whole, self.chunk)) if way == "computed" else (tokens * (way == "read"), self.new)
            found = of_one.get("external", 0), of_one.get("computed")
            if "token" in of_one and found == expected:
                times[way] = (of_one["token"] - of_one["arrived"]) * 1e3
            elif way != "read" or "token" not in of_one:
                raise EngineError(f"{tokens} tokens, {way}: {expected} were to be loaded and computed, but {of_one}")
            else:
                print(f"nothing read: {tokens} tokens, {of_one}", flush=True)
        return times

    # --- conversations ------------------------------------------------------------------------------------------

    def replay(self, form: str, named: bool, load: str, conversations: Sequence[Turns]) -> None:
        """Conversations, one after the other. A prompt that is shorter than all that was said before has the beginning
        of it."""
        for conversation in conversations:
            self.collect()
            history: list[int] = []
            known, turns, serial = 0, [], form == P_AND_D
            for number, (tokens, most) in enumerate(conversation):
                history = [*history[:tokens], *self.words(tokens - len(history))]
                engines = (self.source, self.reader)
                engine, last = engines if serial or number % 2 == 0 else engines[::-1]
                sources = {"sources": [self.addresses[last.server.name]]} if named and number else {}
                before = by_source(engine.server)
                whole = body(history) | {"max_tokens": most, "ignore_eos": True, "return_token_ids": True}
                first = body(history) | {"kv_transfer_params": PREFILL_TAG | sources}
                name, answer = engine.ask(first if serial else whole | {"kv_transfer_params": sources or None})
                computed = int(grown(engine.server, before, tokens)["local_compute"])
                if serial:
                    _, answer = self.reader.ask(whole | {"kv_transfer_params": answer["kv_transfer_params"]})
                turns.append((name, tokens, max(1, tokens - known), computed))  # the last token is computed in any case
                history += answer["choices"][0]["token_ids"]
                known = len(history) - 1  # the KV of the last token is not computed
                time.sleep(self.settle)
            marks, _ = self.collect()
            for name, tokens, new, computed in turns[1:]:
                ttft = (marks[name]["token"] - marks[name]["arrived"]) * 1e3
                self.turns.append(Turn(form, named, load, tokens, new, computed, ttft))


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def by_source(engine: Server) -> dict[str, float]:
    """Prompt tokens that an engine has counted, by where their KV came from."""
    samples = engine.metrics()
    return {name: metric_sum(samples, "vllm:prompt_tokens_by_source_total", source=name) or 0.0 for name in SOURCES}


def grown(engine: Server, before: dict[str, float], tokens: int) -> dict[str, float]:
    """By how much ``by_source`` grew with a prompt of ``tokens``, which the engine may count after its answer.

    Raises:
        EngineError: another number of tokens was counted.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        after = by_source(engine)
        found = {name: after[name] - before[name] for name in SOURCES}
        if sum(found.values()) == tokens:
            return found
        if sum(found.values()) > tokens or time.monotonic() > deadline:
            raise EngineError(f"{engine.name} counted {found} of a prompt of {tokens} tokens")
        time.sleep(0.02)
