"""Wrong answers beside vLLM's NixlConnector: the faults that users reported of it, on engines of both connectors.

    python benchmarks/engines/wrong_answers.py [--count 1000] [--seconds 40] [--faults NAME ...] [--json FILE]

P and D are vLLM engines on the CPU with a small model in fp32; this script is their client and their router. Per fault
it has up to ``--count`` prompts handed over, for up to ``--seconds``, in batches. A right answer is the one that a
plain engine has given to the prompt, greedily. Both connectors have the same engines, prompts and faults, leases of
``LEASE_SECONDS``, ``kv_load_failure_policy`` ``recompute``, and otherwise their defaults.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines.engine_pair import EXECUTOR, OURS, THEIRS
from benchmarks.harness import report
from kvferry.router.request_bodies import prefill_body
from tests.support.engines import free_port, transfer_config
from tests.support.served import ForkedServerGroup, descendants, kill, stream_and_leave
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec, build_model

SPEC = ModelSpec(layers=2, kv_heads=4, head_dim=64, heads=4)
BLOCK, TOKENS, ANSWER_TOKENS = 32, 128, 6
"""A prompt fills its blocks."""
BATCH = 64
AT_ONCE = 16
"""Requests at a time, as many as an engine runs."""
P_BLOCKS = BATCH * TOKENS // BLOCK + 2
"""A batch of leases fits. So a batch of other prompts takes all blocks that a batch of ended leases gave back."""
D_BLOCKS = AT_ONCE * (TOKENS // BLOCK + 1) + 10
LEASE_SECONDS = 6
PATIENCE_SECONDS = 30.0
"""A request without an answer after this time is an error."""
NO_PREFIXES = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", str(D_BLOCKS))
"""D has seen no prompt before, as another D to which a router sends a request again; and it reuses its blocks soon."""
OF_ALL = ("--disable-uvicorn-access-log", "--distributed-executor-backend", EXECUTOR)
OWN, ELSEWHERE, REPLACED = "", "elsewhere", "replaced"
"""P's weights: D's; others of the same configuration, in a folder of their own; or in D's, where D's have then taken
their place, as while a new version is rolled out."""
RIGHT, WRONG, ERROR = "right", "wrong", "error"


CLEAR = 1e-3
"""How much likelier, as a logarithm, the plain engine must find its token than the next one: rounding, about 1e-6,
decides between no two tokens then."""


class Ask(NamedTuple):
    """One request to D. ``tokens``: the plain engine's."""

    prompt: list[int]
    tokens: list[int]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "model", "prompt": self.prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip


def ask_plain(plain: Server, rng: random.Random) -> Ask:
    """A prompt that a plain engine has a clear answer to."""
    while True:
        ask = Ask([rng.randrange(2, 1000) for _ in range(TOKENS)], [])
        body = ask.body | {"logprobs": 2, "return_tokens_as_token_ids": True}
        (choice,) = plain.post("/v1/completions", body)["choices"]
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        if all(first - second > CLEAR for first, second in tops):
            return ask._replace(tokens=choice["token_ids"])


class Outcome(NamedTuple):
    """Of one request. ``seconds``: of D's leg. ``error``: the first line."""

    result: str
    seconds: float
    error: str


class Bench:
    """P and D of one connector."""

    def __init__(self, group: ForkedServerGroup, model: Path, connector: str, seed: int) -> None:
        self._group, self._model, self._connector = group, model, connector
        self._others = build_model(model.with_name("other"), replace(SPEC, seed=SPEC.seed + 1))
        self._weights = OWN
        self.rng = random.Random(seed)
        self.outcomes: list[Outcome] = []
        self.engine_ends = 0
        self._ports = free_port(), free_port()
        self._of_d: tuple[str, ...] = NO_PREFIXES
        self.p, self.d = self._start_p(), self._start_d()
        group.wait_ready()

    def _engine(self, name: str, model: Path, port: int, side_port: int, *arguments: str) -> Server:
        """P and D have names, and keep their ports when they are started again."""
        ours = self._connector == OURS
        extra = {"lease_seconds": LEASE_SECONDS, "side_channel_port": side_port} if ours else {
            "kv_lease_duration": LEASE_SECONDS, "num_threads": 1,
        }  # fmt: skip
        config = transfer_config(self._connector, extra) | {"engine_id": f"engine-{name}"}
        return self._group.engine(
            f"{self._connector}-{name}", model, connector=self._connector, kv_bytes=False, port=port,
            max_model_len=512, block_size=BLOCK, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)},
            arguments=["--kv-transfer-config", json.dumps(config), *OF_ALL, *arguments],
        )  # fmt: skip

    def _start_p(self) -> Server:
        model = self._folder(self._others) if self._weights else self._model
        return self._engine("p", model, *self._ports, "--num-gpu-blocks-override", str(P_BLOCKS))

    def _start_d(self) -> Server:
        return self._engine("d", self._folder(self._model), free_port(), free_port(), *self._of_d)

    def _folder(self, model: Path) -> Path:
        """Under which name an engine gets a model."""
        if self._weights != REPLACED:
            return model
        link = self._model.with_name("current")
        link.unlink(missing_ok=True)
        link.symlink_to(model)
        return link

    def begin(self, fault: Fault) -> None:
        """For another fault. After errors both engines are new."""
        failed = any(one.result == ERROR for one in self.outcomes)
        new, self._weights = failed or fault.weights != self._weights, fault.weights
        other, self._of_d = fault.of_d != self._of_d, fault.of_d
        self.restart(p=new)  # it has loaded its weights before D's take their place
        self.restart(d=new or other)
        self.outcomes, self.engine_ends = [], 0

    def mend(self) -> None:
        """Start engines that have ended again."""
        lost = [server for server in (self.p, self.d) if not (server.alive and server.healthy())]
        self.engine_ends += len(lost)
        self.restart(p=self.p in lost, d=self.d in lost)

    def restart(self, *, p: bool = False, d: bool = False) -> None:
        """Kill them, start them again and wait."""
        for server in [self.p] * p + [self.d] * d:
            kill(server)
            self._group.stop(server)
        self.p = self._start_p() if p else self.p
        self.d = self._start_d() if d else self.d
        self._group.wait_ready()

    # --- the legs -----------------------------------------------------------------------------------------------

    def all(self, act: Callable[..., Any], *items: Sequence[Any], at_once: int = AT_ONCE) -> list[Any]:
        """The results, of so many calls at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(act, *items))

    def prefill(self, ask: Ask) -> dict[str, Any]:
        """P's leg: its answer. A P that does not answer is an error of the request."""
        try:
            answer: dict[str, Any] = self.p.post("/v1/completions", prefill_body(ask.body), PATIENCE_SECONDS)
        except EngineError as error:
            answer = {"error": str(error)}
        return answer

    def params(self, ask: Ask) -> dict[str, Any] | None:
        """P's leg: what D gets."""
        return self.prefill(ask).get("kv_transfer_params")

    def decode(self, ask: Ask, params: dict[str, Any] | None, first: Sequence[int] = ()) -> Outcome:
        """D's leg, and its answer. ``first``: tokens of P that D's prompt ends with."""
        body = ask.body | {"prompt": [*ask.prompt, *first], "max_tokens": ANSWER_TOKENS - len(first)}
        began = time.monotonic()
        try:
            if params is None:
                raise EngineError("P did not answer")
            answer = self.d.post("/v1/completions", body | {"kv_transfer_params": params}, PATIENCE_SECONDS)
            (choice,) = answer["choices"]
            if choice["finish_reason"] == "error":
                raise EngineError("finish_reason error")
            result, error = RIGHT if [*first, *choice["token_ids"]] == ask.tokens else WRONG, ""
        except EngineError as failure:
            result, error = ERROR, str(failure).partition("\n")[0][:120]
        return Outcome(result, time.monotonic() - began, error)

    def answer(self, ask: Ask, params: dict[str, Any] | None, first: Sequence[int] = ()) -> None:
        """As ``decode``, for an answer that counts."""
        self.outcomes.append(self.decode(ask, params, first))

    def others(self) -> None:
        """P computes other prompts, which take all blocks that are free."""
        body = {"model": "model", "max_tokens": 1}
        prompts = [[self.rng.randrange(2, 1000) for _ in range(TOKENS)] for _ in range(BATCH)]
        with suppress(EngineError):
            self.all(lambda ids: self.p.post("/v1/completions", body | {"prompt": ids}, PATIENCE_SECONDS), prompts)

    def signal_d(self, number: signal.Signals) -> None:
        for pid in descendants(self.d.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


# --- the faults: each has a batch of prompts answered ----------------------------------------------------------------


def each(act: Callable[..., None]) -> Callable[..., None]:
    """A fault that meets every request by itself."""
    return lambda bench, asks, **how: bench.all(lambda ask: act(bench, ask, **how), asks)


@each
def no_fault(bench: Bench, ask: Ask) -> None:
    bench.answer(ask, bench.params(ask))


@each
def changed(bench: Bench, ask: Ask, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """D gets another reference than P gave."""
    params = bench.params(ask)
    bench.answer(ask, params and params | change(params))


def unknown_request(params: dict[str, Any]) -> dict[str, Any]:
    """KVFerry's D goes by the lease's token."""
    unknown = "0" * 32
    inner = {"kvferry": params["kvferry"] | {"token": unknown}} if "kvferry" in params else {}
    return {"remote_request_id": unknown} | inner


def blocks_out_of_range(params: dict[str, Any]) -> dict[str, Any]:
    """KVFerry's reference has no block ids: D gets these all the same."""
    return {"remote_block_ids": [[10 * P_BLOCKS + n for n in range(TOKENS // BLOCK)]]}


@each
def used_reference(bench: Bench, ask: Ask) -> None:
    """The request is sent again with the same reference, as by a router that tries again."""
    params = bench.params(ask)
    bench.decode(ask, params)
    bench.answer(ask, params)


def used_reference_later(bench: Bench, asks: Sequence[Ask]) -> None:
    params = bench.all(bench.params, asks)
    bench.all(bench.decode, asks, params)
    bench.others()
    bench.all(bench.answer, asks, params)


def lease_over(bench: Bench, asks: Sequence[Ask], *, others: bool = False) -> None:
    """The router sends D's leg when the lease is over."""
    params = bench.all(bench.params, asks)
    time.sleep(LEASE_SECONDS + 1.5)
    if others:
        bench.others()
    bench.all(bench.answer, asks, params)


def d_stands_still(bench: Bench, asks: Sequence[Ask]) -> None:
    """D's processes stop for longer than the lease, soon after the requests have come; P serves others meanwhile."""
    params = bench.all(bench.params, asks)
    with ThreadPoolExecutor(1) as pool:
        legs = pool.submit(bench.all, bench.answer, asks, params, at_once=BATCH)
        try:
            time.sleep(bench.rng.uniform(0, 0.3))
            bench.signal_d(signal.SIGSTOP)
            time.sleep(LEASE_SECONDS + 1.5)
            bench.others()
        finally:
            bench.signal_d(signal.SIGCONT)
        legs.result()


@each
def appended_token(bench: Bench, ask: Ask) -> None:
    """The router ends D's prompt with the token that P sampled, which then begins a block. D has computed the prompt
    before, without its last block."""
    begin = {"prompt": ask.prompt[: TOKENS - BLOCK + 1], "max_tokens": 1}
    with suppress(EngineError):
        bench.d.post("/v1/completions", ask.body | begin, PATIENCE_SECONDS)
    answer = bench.prefill(ask)
    first = answer["choices"][0]["token_ids"] if "choices" in answer else []
    bench.answer(ask, answer.get("kv_transfer_params"), first)


def p_restarted(bench: Bench, asks: Sequence[Ask]) -> None:
    """P is killed with leases open and comes again with its name and ports. Of each batch one half has references of
    before, the other half those of the new P."""
    half = len(asks) // 2
    old = bench.all(bench.params, asks[:half])
    bench.restart(p=True)
    bench.others()
    bench.all(bench.answer, asks, old + bench.all(bench.params, asks[half:]))


@each
def d_aborts(bench: Bench, ask: Ask) -> None:
    """Beside each request another one is handed over whose client leaves soon, so that D uses its blocks for others."""
    given_up = Ask([bench.rng.randrange(2, 1000) for _ in range(TOKENS)], [])
    params = bench.params(given_up)
    stream_and_leave(bench.d, given_up.prompt, 1 << 20, bench.rng.uniform(1e-3, 0.05), kv_transfer_params=params)
    bench.answer(ask, bench.params(ask))


@dataclass(frozen=True)
class Fault:
    source: str
    act: Callable[[Bench, Sequence[Ask]], None]
    of_d: tuple[str, ...] = NO_PREFIXES
    """Arguments of D."""
    weights: str = OWN
    """Of P."""


REFERENCES = "vllm#52234"
FAULTS = {
    "none": Fault("", no_fault),
    "reference to an unknown request": Fault(REFERENCES, partial(changed, change=unknown_request)),
    "reference to blocks out of range": Fault(REFERENCES, partial(changed, change=blocks_out_of_range)),
    "used reference, at once": Fault(REFERENCES, used_reference),
    "used reference, blocks used again": Fault(REFERENCES, used_reference_later),
    "lease over": Fault(REFERENCES, lease_over),
    "lease over, blocks used again": Fault("aws-do-eks#84", partial(lease_over, others=True)),
    "D stands still, blocks used again": Fault("", d_stands_still),
    "P's token appended": Fault("vllm#50558", appended_token, of_d=()),
    "P restarted under its name": Fault("vllm#49238", p_restarted),
    "D aborts": Fault("", d_aborts),
    "other weights on P": Fault("", no_fault, weights=ELSEWHERE),
    "other weights on P, under D's path": Fault("", no_fault, weights=REPLACED),
}


def measure(bench: Bench, name: str, asks: Sequence[Ask], seconds: float) -> dict[str, Any]:
    """One row: all batches that begin within this time."""
    fault = FAULTS[name]
    bench.begin(fault)
    began = time.monotonic()
    for start in range(0, len(asks), BATCH):
        if start and time.monotonic() > began + seconds:
            break
        fault.act(bench, asks[start : start + BATCH])
        bench.mend()
    results = Counter(one.result for one in bench.outcomes)
    times = [one.seconds for one in bench.outcomes]
    return {
        "fault": name, "source": fault.source, "asked": len(times),
        **{result: results[result] for result in (RIGHT, ERROR, WRONG)}, "engine_ends": bench.engine_ends,
        "seconds_p50": round(statistics.median(times), 3), "seconds_max": round(max(times), 3),
        "errors": dict(Counter(one.error for one in bench.outcomes if one.error).most_common(3)),
    }  # fmt: skip


def main() -> int:
    parser = report.options(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="prompts per fault and connector, at most")
    parser.add_argument("--seconds", type=float, default=40.0, help="per fault and connector, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--connectors", nargs="+", choices=(OURS, THEIRS), default=[OURS, THEIRS])
    parser.add_argument("--folder", type=Path, default=report.ROOT / ".bench" / "wrong_answers", help="model and logs")
    args = parser.parse_args()
    model, rows = build_model(args.folder / "model", SPEC), []
    with ForkedServerGroup(args.folder / "logs") as group:
        plain = group.engine("plain", model, connector=None, kv_bytes=False, max_model_len=512, arguments=list(OF_ALL))
        group.wait_ready()
        seeds = (random.Random(f"{args.seed} {number}") for number in range(args.count))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asks = list(pool.map(partial(ask_plain, plain), seeds))
        group.stop(plain)
        for connector in args.connectors:
            bench = Bench(group, model, connector, args.seed)
            for name in args.faults:
                rows.append({"connector": connector} | measure(bench, name, asks, args.seconds))
                report.line(rows[-1])
            for server in (bench.p, bench.d):
                group.stop(server)
    report.write(args.json, {
        "rows": rows, "policy": "recompute", "count": args.count, "seconds": args.seconds, "seed": args.seed,
        "lease_seconds": LEASE_SECONDS, "distinct_answers": len({tuple(ask.tokens) for ask in asks}),
        "blocks": {"P": P_BLOCKS, "D": D_BLOCKS},
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
