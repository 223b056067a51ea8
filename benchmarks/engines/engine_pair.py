"""Engines that are measured: their models, how they start, what they are asked, and what their schedulers note."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import ServerGroup
from tests.support.served import ForkedServerGroup
from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum
from tests.support.tiny_model import ModelSpec

OURS, THEIRS = "KVFerryConnector", "NixlConnector"
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""``uni``, which vLLM has by default for one GPU, named so that vLLM does not take ``mp`` for it on the CPU."""
BACKGROUND_TOKENS = 64
"""Of a background sequence's prompt."""
SETTLE_SECONDS = 0.3
"""Before anything is measured: the first steps of a batch are none of many."""
STEADY = 0.98
"""Of the steps must have a token for each background sequence; none may end, wait or be preempted meanwhile."""
ATTEMPTS = 5
"""At a turn. Each but the first follows one that was disturbed."""
_NUMBERS = count(1)
"""Of the requests that are followed."""
T = TypeVar("T")
Marks = dict[str, Any]
Steps = list[tuple[float, int]]
"""When D told of tokens of the background, and of how many sequences."""


@dataclass(frozen=True)
class Setup:
    """What suits engines on GPUs, or on the CPU. ``nixl``: settings of NIXL's connector."""

    spec: ModelSpec
    block: int
    nixl: dict[str, Any] = field(default_factory=dict)


GPU = Setup(
    ModelSpec(
        layers=32, hidden=1024, heads=32, kv_heads=8, head_dim=128, intermediate=2816, max_tokens=32768,
        dtype="bfloat16",
    ),
    block=16,
)  # fmt: skip
"""128 KiB of KV per token, narrow beside that: a step waits for Python."""
LLAMA_8B = ModelSpec(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, max_tokens=32768, dtype="bfloat16"
)
"""But for its vocabulary."""
CPU = Setup(ModelSpec(layers=4, dtype="bfloat16"), block=32, nixl={"num_threads": 1})


def body(prompt: list[int]) -> dict[str, Any]:
    """One token, whose id is not asked for: an answer would repeat those of the prompt."""
    return {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "return_token_ids": False}


def prefill_leg(prefill: Server, request: dict[str, Any]) -> dict[str, Any]:
    """What D needs of P's answer."""
    answer = prefill.post("/v1/completions", request | {"kv_transfer_params": PREFILL_TAG})
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


class Words:
    """Prompts of random tokens."""

    def __init__(self, seed: int | str, vocabulary: int) -> None:
        self.rng, self._vocabulary = random.Random(seed), vocabulary

    def __call__(self, tokens: int) -> list[int]:
        return [self.rng.randrange(2, self._vocabulary) for _ in range(tokens)]


def gpus_of(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Of each engine of a pair."""
    return [(gpu,) for gpu in args.gpus] if args.device == "cuda" else [(), ()]


def graph_sizes(sequences: Sequence[int]) -> list[int]:
    """Batches that D's steps have: its sequences, and up to eight requests beside them."""
    return sorted({1, 2, 4, 8, *(size for count in sequences if count for size in (count, count + 1, count + 8))})


@dataclass
class ProbedEngine:
    """An engine, and the file of its scheduler's notes, of which ``_read`` bytes were read."""

    server: Server
    notes: Path
    _read: int = 0

    def ask(self, request: dict[str, Any], period: float = 0.0) -> tuple[str, dict[str, Any]]:
        """The name under which the request is followed, and the answer; ``period`` seconds after the call at least."""
        name, began = f"fg-{next(_NUMBERS)}", time.monotonic()
        answer: dict[str, Any] = self.server.post("/v1/completions", request, headers={"X-Request-Id": name})
        time.sleep(max(0.0, began + period - time.monotonic()))
        return name, answer

    def collect(self, order: str = "fresh") -> tuple[dict[str, Marks], Steps]:
        """What the scheduler noted since the last call. Behind it the prefix cache is empty, and the free blocks are in
        this order.

        Raises:
            EngineError: blocks are still held after ``PATIENCE_SECONDS``.
        """
        self.notes.with_name(f"{self.notes.name}.order").write_text(order)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.server.post("/reset_prefix_cache")["success"]:
            if time.monotonic() > deadline:
                raise EngineError(f"{self.server.name}: blocks are held {PATIENCE_SECONDS:g} s after the last request")
            time.sleep(0.05)
        marks: dict[str, Marks] = {}
        steps: Steps = []
        with self.notes.open() as file:
            file.seek(self._read)
            for line in iter(file.readline, ""):
                noted = json.loads(line)
                for name, values in noted["requests"].items():
                    marks.setdefault(name, {"name": name}).update(values)
                steps += [(at, number) for at, number in noted["steps"]]
            self._read = file.tell()
        return marks, steps


def servers(args: argparse.Namespace, *folder: str) -> ServerGroup:
    """Engines with their logs in this folder of the script's; on the CPU they import nothing at their start."""
    return (ServerGroup if args.device == "cuda" else ForkedServerGroup)(args.folder.joinpath("logs", *folder))


def start(
    group: ServerGroup, name: str, model: Path, setup: Setup, *, gpus: tuple[int, ...], kv_gib: int, sequences: int,
    probed: bool = True, arguments: Sequence[str] = (), **options: Any,
) -> ProbedEngine:  # fmt: skip
    """An engine with made-up weights that decodes up to ``sequences`` beside requests. ``probed``: its scheduler notes
    the times of requests, see busy_probe.py. ``options``: as of ``ServerGroup.engine``."""
    notes = group.logs / f"{name}-notes.jsonl"
    notes.write_text("")
    environment = {"KVFERRY_BUSY_NOTES": str(notes)} | ({} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)})
    more = ["--load-format", "dummy", "--disable-uvicorn-access-log", "--max-num-seqs", str(sequences + 8), *arguments]
    if probed:
        more += ["--scheduler-cls", f"benchmarks.engines.busy_probe.Probed{'Async' if gpus else ''}Scheduler"]
    server = group.engine(
        name, model, dtype=setup.spec.dtype, block_size=setup.block, gpus=gpus, kv_cache_bytes=kv_gib << 30,
        kv_bytes=False, arguments=more, environment=environment, **options,
    )  # fmt: skip
    return ProbedEngine(server, notes)


# --- the load on a decoder --------------------------------------------------------------------------------------------


class DisturbedTurnError(EngineError):
    """A turn measured something else: the background did not decode all the while, or a hand-over failed."""


def undisturbed(attempt: Callable[[], T], repeated: list[str]) -> T:
    """A turn, measured again where it was disturbed; the reasons are added to ``repeated``.

    Raises:
        DisturbedTurnError: every attempt was.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except DisturbedTurnError as why:
            repeated.append(str(why))
            print(f"measured again: {why}", flush=True)
    return attempt()


class Background:
    """Sequences that D decodes from ``quiet`` to ``__exit__``; they are one request of a client that leaves."""

    def __init__(self, decode: Server, words: Words, sequences: int, longest: int) -> None:
        """``longest``: tokens of a sequence."""
        self._decode, self._longest = decode, longest
        self._prompts = [words(BACKGROUND_TOKENS) for _ in range(sequences)]
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def quiet(self, seconds: float) -> tuple[float, float]:
        """Decode for so long with nothing beside it, after a start; when this began and ended."""
        if self._prompts:
            self.start()
        begin = time.monotonic()
        time.sleep(seconds if self._prompts else 0.0)
        return begin, time.monotonic()

    def start(self) -> None:
        """Return when all of them decode. Where all have ended before that was seen, they begin anew.

        Raises:
            EngineError: D answers with an error, or they do not decode within ``PATIENCE_SECONDS``.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        connection = self._ask()
        while metric_sum(self._decode.metrics(), "vllm:num_requests_running") != len(self._prompts):
            if select.select([connection.sock], [], [], 0)[0]:  # an answer, or its end
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


def unsteady(sequences: int, steps: Steps, quiet: tuple[float, float], last: float) -> str | None:
    """Why a load of so many ``sequences`` was not steady; None where it was. ``quiet``: begin and end of the quiet
    time. ``last``: when the last request had its token."""
    steps = [step for step in steps if step[0] >= quiet[0]]
    counts = [number for at, number in steps if at <= last]
    if counts.count(sequences) < STEADY * len(counts):
        return f"in a step {set(counts)} of them got a token"
    if not steps or steps[-1][0] < last:
        return "they ended before the last request did"
    return None if gaps_between(steps, *quiet) else "D made no two steps before the first hand-over"


def gaps_between(steps: Steps, begin: float, end: float) -> list[float]:
    """Milliseconds between consecutive tokens of a background sequence, for tokens in this time."""
    times = [at for at, _ in steps]
    return [(after - before) * 1e3 for before, after in pairwise(times) if begin < after <= end]
