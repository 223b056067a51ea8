"""Whether every token of a decoder is right where both legs of a request are sent at once: against a plain engine's.

    python tests/engine/wrong_tokens/both_legs.py [--count 300] [--seed 1] [--plane tcp] [--json FILE]

As ``run.py``, whose prompts, comparison and engines these are; but the KV cache leaves while P computes it. P
computes a prompt in steps of few tokens, several prompts at a time, and has so few blocks that it preempts requests and
uses their blocks for others. Half of the requests come in groups that begin alike, so both engines find tokens in their
prefix caches. At times D's client leaves, P's client leaves, or P is killed while it computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / ".typing"))

from benchmarks.harness import report
from kvferry.router.identities import IDENTITY, IDENTITY_ALSO
from kvferry.router.request_bodies import PREFILL_TAG
from tests.engine.wrong_tokens.asks import KILLED, Ask, Draw, ask_plain
from tests.engine.wrong_tokens.pair import Prefill
from tests.engine.wrong_tokens.run import (
    DECODING,
    DECODING_TOKENS,
    DONE,
    EXTRA,
    FAILED,
    MUST_BE_0,
    PROBE,
    ROOT,
    SPEC,
    Run,
    leave,
    start,
)
from tests.support.served import PatientServerGroup
from tests.support.server import EngineError, Server, metric_sum
from tests.support.tiny_model import build_model

P_LEFT = "P's client left"
KINDS = ("client left", P_LEFT)
SMALL = (
    "--num-gpu-blocks-override", "36", "--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "24",
)  # fmt: skip
"""P: one request of the longest length fits, steps are short, and several prompts are computed at a time."""


class BothLegs(Run):
    """A run whose router sends both legs at once."""

    def __init__(self, p: Prefill, d: Server, group: PatientServerGroup, seed: int) -> None:
        super().__init__(p, d, group, seed)
        self._identities: dict[int, dict[str, Any]] = {}  # of each life of P

    def identity(self) -> dict[str, Any]:
        """What the router knows of the present P: one answer of it is enough."""
        self.p.wait()
        life = self.p.killed
        if life not in self._identities:
            body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
            params = self.p.leg(body, f"identity-{life}")
            self._identities[life] = {key: params[key] for key in (*IDENTITY, *IDENTITY_ALSO) if key in params}
        return self._identities[life]

    def hand_over(self, asks: list[Ask]) -> None:
        """A group of requests, both legs of all of them at once."""
        known = self.identity()
        with ThreadPoolExecutor(2 * len(asks)) as pool:
            legs = [pool.submit(self._p_leg, ask) for ask in asks if ask.handed_over]
            legs += [pool.submit(self._d_leg, ask, known) for ask in asks]
            for leg in legs:
                leg.result()

    def _p_leg(self, ask: Ask) -> None:
        """P's leg; a router that gets no answer has nothing to do, because P or its absence tells D."""
        params = PREFILL_TAG | {"transfer_id": ask.name}
        body = ask.body | {"max_tokens": 1, "kv_transfer_params": params}
        server = self.p.wait()
        if ask.fault == P_LEFT:
            leave(server, body, ask.name, self._soon())
            return
        if ask.fault == KILLED:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._kill_soon)
        with suppress(EngineError):  # P is killed: D computes the prompt
            server.post("/v1/completions", body, headers={"X-Request-Id": ask.name})

    def _kill_soon(self) -> None:
        time.sleep(self._soon())
        self.p.kill()

    def _d_leg(self, ask: Ask, known: dict[str, Any]) -> None:
        params = {"do_remote_prefill": True, "do_remote_decode": False, **known, "transfer_id": ask.name}
        body = ask.body | ({"kv_transfer_params": params} if ask.handed_over else {})
        if ask.fault == "client left":
            leave(self.d, body, ask.name, self._soon())
        else:
            self.compare(ask, body)

    def _soon(self) -> float:
        with self._lock:
            return self._rng_of_leaving.uniform(0.0, 0.2)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    model = build_model(args.folder / "model", SPEC)
    draw = Draw(args.seed)
    groups = draw.groups(args.count)
    draw.plant(groups, args.share, args.kills, KINDS)
    beside = [draw.ask(draw.words(40), DECODING_TOKENS, handed_over=False) for _ in range(3 * DECODING)]
    extra = EXTRA | {"plane": args.plane}
    with PatientServerGroup(args.folder / "logs") as group:
        plain = start(group, "plain", model, None, *PROBE)
        d = start(group, "decode", model, "KVFerryConnector", *PROBE, extra=extra)
        p = Prefill(group, lambda: start(group, "prefill", model, "KVFerryConnector", *PROBE, *SMALL, extra=extra))
        p.ready()
        group.wait_ready(servers=[plain, d])
        plain.rpc("wt_watch"), d.rpc("wt_watch")
        redrawn = ask_plain(plain, [*(ask for asks in groups for ask in asks), *beside], draw)
        group.stop(plain)
        print(f"{time.monotonic() - began:4.0f} s: answers of the plain engine; {redrawn} redrawn", flush=True)
        run = BothLegs(p, d, group, args.seed)
        try:
            run.all(groups, beside)
            held = run.left()
        finally:
            run.actor.close()
        figures = figures_of(run, groups, d, p.wait()) | {"held_at_the_end": round(sum(held.values()), 6)}
    outcome = run.outcome
    return {
        "ratios": {}, "figures": figures, "answered": dict(outcome.answered), "held": held,
        "errors": outcome.errors + outcome.hung, "policy": "recompute", "seed": args.seed, "count": args.count,
        "share": args.share, "settings": extra, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def figures_of(run: BothLegs, groups: list[list[Ask]], d: Server, p: Server) -> dict[str, float]:
    """``p``: its last life, whose counters begin with it."""
    handed = {ask.name: ask.fault for asks in groups for ask in asks if ask.handed_over}
    failed = {name for name in FAILED.findall(d.log_text()) if name in handed}
    loaded = {name for name, _ in DONE.findall(d.log_text()) if name in handed} - failed
    of_p, of_d = p.metrics(), d.metrics()

    def counted(samples: Any, name: str, **labels: str) -> float:
        return metric_sum(samples, name, **labels) or 0

    return {
        "handovers": len(handed), "loaded": len(loaded), "failed": len(failed),
        "computed_by_d": len(handed) - len(loaded) - len(failed),
        "loads_while_p_computes": counted(of_d, "vllm:kvferry_num_streamed_handovers_total"),
        "mib_while_p_computes": counted(of_p, "vllm:kvferry_bytes_sent_total", when="computes") / (1 << 20),
        "preemptions_of_p": counted(of_p, "vllm:num_preemptions_total"),
        "tokens_p_found": counted(of_p, "vllm:prefix_cache_hits_total"),
        "tokens_d_found": counted(of_d, "vllm:prefix_cache_hits_total"),
        "p_killed": run.p.killed, "answers": run.outcome.answered.total(),
        "wrong_tokens": len(run.outcome.wrong_tokens), "wrong_kv": len(run.outcome.wrong_kv),
        "hung": len(run.outcome.hung), "errors": len(run.outcome.errors),
        "largest_kv_difference": run.outcome.largest,
        **{kind: sum(fault == kind for fault in handed.values()) for kind in KINDS},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=300, help="hand-overs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plane", default="tcp", help="one on which P sends")
    parser.add_argument("--share", type=float, default=0.1, help="of hand-overs that a client leaves, or a kill ends")
    parser.add_argument("--kills", type=int, default=1, help="how often P is killed")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "both_legs", help="model and logs")
    args = parser.parse_args()
    try:
        result = measure(args)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    for name, value in (result["figures"] | result["answered"]).items():
        print(f"{name:30}{value:>12.6g}")
    report.write(args.json, result)
    bad = [name for name in MUST_BE_0 if result["figures"][name]] + result["errors"]
    for what in bad:
        print(f"FAILED  {what}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
