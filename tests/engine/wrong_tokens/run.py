"""Whether every token of a decoder is right while hand-overs into it fail: all answers against a plain engine's.

    python tests/engine/wrong_tokens/run.py [--count 1000] [--seed 1] [--json FILE]
    python tests/engine/wrong_tokens/run.py --selftest           # that wrong KV is seen

Three vLLM engines on the CPU with a small model in fp32. A plain engine without a connector answers all prompts first,
greedily; prompts whose answer rounding could change are drawn anew. Then P and D answer them: plane ``cma``,
``kv_load_failure_policy`` ``recompute``. D decodes other sequences all the time, and its loads go inside its steps.
Several requests come at once; half of them in groups of prompts that begin alike, so that one finds the blocks of
another's load in the prefix cache. In one hand-over of ten a failure is planted, see ``planted.py``.

Compared are the tokens of each answer, also of the sequences that D decodes and of requests without a hand-over, and
the KV that each answer was made from, within ``KV_TOLERANCE``. At the end, no block may be held on either engine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / ".typing"))

import numpy as np

from benchmarks.harness import report
from kvferry.connector.step_loads.step_hold import PATIENCE_SECONDS
from tests.engine.wrong_tokens.asks import KILLED, KINDS, WRONG_BYTE, Actor, Ask, Draw, Prefill, ask_plain, digest_of
from tests.support.engines import python_path
from tests.support.served import PatientServerGroup, eventually, usage
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec, build_model

ROOT = Path(__file__).resolve().parents[3]
SPEC = ModelSpec(layers=2, kv_heads=4, head_dim=64, heads=4)
LEASE_SECONDS = 20.0
EXTRA = {
    "plane": "cma", "lease_seconds": LEASE_SECONDS, "step_hold_seconds": 0.5, "handover_timeout_seconds": 120.0,
}  # fmt: skip
"""Two cores that engines, tests and this process share: copies take longer than on a machine that serves. A prompt that
P never had, because its client left, D awaits until the last of these is over."""
HERE = "tests.engine.wrong_tokens"
PROBE = ("--worker-extension-cls", f"{HERE}.planted.FaultProbe")
AHEAD = ("--worker-extension-cls", f"{HERE}.ahead_faults.FaultProbe", "--scheduler-cls", f"{HERE}.ahead.AheadScheduler")
AT_ONCE = 3
"""Groups of requests."""
DECODING = 4
"""Sequences that D decodes beside them."""
DECODING_TOKENS = 160
ANSWER_SECONDS = 400.0
"""A request without an answer after this time hangs."""
KV_TOLERANCE = 1e-3
"""Of the digests' root mean square. Rounding makes 1e-6 of it; one wrong byte of a sign and exponent, 1e-2 and more."""
DURING = {
    "lease ended during the copy": lambda p, name: p.end_lease(name),
    "P's pages reused during the copy": lambda p, name: p.end_lease(name, reuse=True),
    "connection cut during the copy": lambda p, name: p.cut(),
    KILLED: lambda p, name: p.kill(),
}
UNSEEN = ("P's pages reused during the copy", WRONG_BYTE)
"""Faults that end in wrong KV where D does not check what it has read, or where nothing can check it."""
SELFTEST_COUNT = 24
MUST_BE_0 = ("wrong_tokens", "wrong_kv", "hung", "errors", "held_at_the_end")
SHORT = {"given up by the engine": "given up"}
DONE = re.compile(r"kvferry: hand-over of \S*?(wt\d+-\d+)\S* done: .*?(, inside the step)?$", re.MULTILINE)
FAILED = re.compile(r"kvferry: hand-over of \S*?(wt\d+-\d+)\S* failed, ")
RECOVERED = re.compile(r"kvferry: the hand-over of (.*) failed inside its step: (\d+) request")
NAMES = re.compile(r"wt\d+-\d+")


@dataclass
class Outcome:
    """What became of the requests."""

    wrong_tokens: list[str] = field(default_factory=list)
    wrong_kv: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0


class Run:
    """P, D, and all requests of one run."""

    def __init__(self, p: Prefill, d: Server, group: PatientServerGroup, seed: int) -> None:
        self.p, self.d = p, d
        self.outcome = Outcome()
        self.path = group.logs / "act"
        self.actor = Actor(self.path, self.act)
        self._answers: list[Ask] = []
        self._lock = threading.Lock()
        self._rng_of_leaving = Draw(seed + 1).rng
        self._stop = threading.Event()

    def prepare(self, *, broken: bool) -> None:
        """Have D plant faults; ``broken``: and trust all that it reads."""
        self.d.rpc("wt_plant_here", str(self.path))
        if broken:
            self.d.rpc("wt_trust_all")

    def act(self, name: str, kind: str) -> None:
        """What D's worker asks for in the middle of a copy."""
        DURING[kind](self.p, name)

    # --- requests -----------------------------------------------------------------------------------------------

    def hand_over(self, asks: list[Ask]) -> None:
        """A group of requests: P computes, then D gets all of them together."""
        with ThreadPoolExecutor(len(asks)) as pool:
            params = list(pool.map(self._prepare, asks))
            for _ in pool.map(self._ask, asks, params):
                pass

    def _prepare(self, ask: Ask) -> dict[str, Any] | None:
        if not ask.handed_over:
            return None
        params = self.p.leg(ask.body, ask.name)
        if ask.fault == "lease ended before the load":
            self.p.end_lease(ask.name)
        elif ask.fault == WRONG_BYTE:
            self.d.rpc("wt_wrong_byte", ask.name)
        elif ask.fault in DURING or ask.fault in ("copy error", *SHORT):
            self.d.rpc("wt_plant", ask.name, SHORT.get(ask.fault, ask.fault))
        return params

    def _ask(self, ask: Ask, params: dict[str, Any] | None) -> None:
        body = ask.body | ({} if params is None else {"kv_transfer_params": params})
        if ask.fault == "client left":
            leave(self.d, body, ask.name, self.soon(0.05))
        else:
            self.compare(ask, body)

    def soon(self, seconds: float) -> float:
        """A time up to so many seconds."""
        with self._lock:
            return self._rng_of_leaving.uniform(0.0, seconds)

    def compare(self, ask: Ask, body: dict[str, Any]) -> None:
        try:
            answer = self.d.post("/v1/completions", body, ANSWER_SECONDS, {"X-Request-Id": ask.name})
        except EngineError as error:
            with self._lock:
                (self.outcome.hung if "timed out" in str(error) else self.outcome.errors).append(f"{ask.name}: {error}")
            return
        tokens = answer["choices"][0]["token_ids"]
        with self._lock:
            self._answers.append(ask)
            kind = "handed over" if ask.handed_over else "not handed over"
            self.outcome.answered[kind if ask.max_tokens != DECODING_TOKENS else "decoded beside"] += 1
            if tokens != ask.tokens:
                self.outcome.wrong_tokens.append(ask.name)
                print(f"  WRONG {ask.name} ({ask.fault}): {tokens}, expected {ask.tokens}", flush=True)

    def decode(self, asks: list[Ask]) -> None:
        """Have D decode these sequences, again and again, until ``stop``."""
        while not self._stop.is_set():
            for ask in asks:
                if not self._stop.is_set():
                    self.compare(ask, ask.body)

    def check_kv(self) -> None:
        """Compare the KV of all answers since the last call."""
        with self._lock:
            asks, self._answers = self._answers, []
        digests = self.d.rpc("wt_take")[0]
        for name, ask in {ask.name: ask for ask in asks}.items():
            if name not in digests:
                self.outcome.errors.append(f"{name}: D digested no KV")
                continue
            assert ask.digest is not None
            scale = float(np.sqrt(np.mean(ask.digest**2)))
            differs = float(np.max(np.abs(digest_of(digests[name], ask) - ask.digest))) / scale
            self.outcome.largest = max(self.outcome.largest, differs)
            if not differs <= KV_TOLERANCE:  # also where it is no number
                self.outcome.wrong_kv.append(name)
                print(f"  WRONG KV {name} ({ask.fault}): differs by {differs:.1e} of {scale:.1f}", flush=True)

    def all(self, groups: list[list[Ask]], beside: list[Ask]) -> None:
        """All groups, ``AT_ONCE`` of them at a time, beside sequences that D decodes."""
        began, done = time.monotonic(), 0
        shares = [beside[n::DECODING] for n in range(DECODING)]
        decoders = [threading.Thread(target=self.decode, args=(share,)) for share in shares]
        for decoder in decoders:
            decoder.start()
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for number, _ in enumerate(pool.map(self.hand_over, groups), 1):
                    done += sum(ask.handed_over for ask in groups[number - 1])
                    if number % 100 == 0:
                        seconds = time.monotonic() - began
                        print(f"{seconds:4.0f} s: {done} hand-overs, P killed {self.p.killed}", flush=True)
        finally:
            self._stop.set()
            for decoder in decoders:
                decoder.join()
        self.check_kv()
        self.p.wait()

    # --- the end ------------------------------------------------------------------------------------------------

    def figures(self, groups: list[list[Ask]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What became of the hand-overs, in all and by kind of fault; "nothing" are those in which none was planted."""
        log = self.d.log_text()
        done = {name: bool(inside) for name, inside in DONE.findall(log)}
        recovered = [(set(NAMES.findall(names)), int(count)) for names, count in RECOVERED.findall(log)]
        inside_failed = set[str]().union(*(names for names, _ in recovered))
        failed = inside_failed | set(FAILED.findall(log))
        fired = set(self.d.rpc("wt_fired")[0])
        handed = [ask for asks in groups for ask in asks if ask.handed_over]
        rows: list[dict[str, Any]] = []
        for kind in dict.fromkeys((None, *KINDS, KILLED, *(ask.fault for ask in handed))):
            names = {ask.name for ask in handed if ask.fault == kind}
            rows.append({
                "planted": kind or "nothing", "handovers": len(names), "fired": len(names & fired),
                "failed": len(names & failed),
                "failed_inside_step": len(names & inside_failed),
                "loaded_inside_step": sum(done.get(name, False) for name in names - failed),
                "loaded_beside": sum(not done[name] for name in names - failed if name in done),
                "nothing_to_load": len(names - failed - done.keys()),
                "wrong_tokens": len(names & set(self.outcome.wrong_tokens)),
                "wrong_kv": len(names & set(self.outcome.wrong_kv)),
            })  # fmt: skip
        summed = ("handovers", "failed", "failed_inside_step", "loaded_inside_step", "loaded_beside")
        figures: dict[str, float] = {name: sum(row[name] for row in rows) for name in summed}
        figures["planted"] = figures["handovers"] - rows[0]["handovers"]
        # The requests that were computed anew because a load of another one had failed.
        figures["others_on_failed_blocks"] = sum(count - len(names) for names, count in recovered)
        return figures, rows

    def left(self) -> dict[str, float]:
        """What is still held when all leases have ended: blocks, in parts of the cache, and hand-overs."""

        def held() -> dict[str, float]:
            p = self.p.wait()
            found = {"blocks of P": usage(p), "blocks of D": usage(self.d)}
            for server in (p, self.d):
                for what, count in server.rpc("wt_left")[0].items():
                    found[what] = found.get(what, 0) + count
            return found

        with suppress(AssertionError):
            eventually(lambda: not any(held().values()), "nothing is held")
        return held()


def leave(server: Server, body: dict[str, Any], name: str, seconds: float) -> None:
    """A client that goes away soon."""
    connection = http.client.HTTPConnection(server.host, server.port)
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    with suppress(OSError):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        time.sleep(seconds)
    connection.close()


def start(group: PatientServerGroup, name: str, model: Path, connector: str | None, *arguments: str) -> Server:
    return group.engine(
        name, model, connector=connector, extra=EXTRA if connector else None, kv_bytes=False,
        environment={"PYTHONPATH": python_path(), "VLLM_LOGGING_LEVEL": "DEBUG"}, max_model_len=1024,
        arguments=["--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--disable-uvicorn-access-log",
                   *arguments],
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s: {what}", flush=True)

    model = build_model(args.folder / "model", SPEC)
    draw = Draw(args.seed)
    groups = draw.groups(args.count)
    kills = args.kills if args.kills is not None else -(-args.count // 300)
    draw.plant(groups, args.share, kills, UNSEEN if args.selftest else KINDS)
    beside = [draw.ask(draw.words(40), DECODING_TOKENS, handed_over=False) for _ in range(3 * DECODING)]
    with PatientServerGroup(args.folder / "logs") as group:
        group.step_patience = PATIENCE_SECONDS  # as it is in use: some of the faults are that it ends
        plain = start(group, "plain", model, None, *PROBE)
        d = start(group, "decode", model, "KVFerryConnector", *AHEAD)
        of_p = *PROBE, "--no-enable-prefix-caching"
        p = Prefill(group, lambda: start(group, "prefill", model, "KVFerryConnector", *of_p))
        p.ready()
        group.wait_ready(servers=[plain, d])
        plain.rpc("wt_watch"), d.rpc("wt_watch")
        say("three engines answer")
        redrawn = ask_plain(plain, [*(ask for asks in groups for ask in asks), *beside], draw)
        group.stop(plain)
        say(f"answers of the plain engine; {redrawn} redrawn")
        run = Run(p, d, group, args.seed)
        try:
            run.prepare(broken=args.selftest)
            run.all(groups, beside)
            held = run.left()
            figures, rows = run.figures(groups)
        finally:
            run.actor.close()
        if not d.alive:
            raise EngineError(f"D has ended\n{d.log_tail()}")
        if "ahead: 2 steps in flight" not in d.log_text():
            raise EngineError("D was to schedule a step while another one runs, and never did")
    outcome = run.outcome
    figures |= {
        "answers": outcome.answered.total(), "wrong_tokens": len(outcome.wrong_tokens),
        "wrong_kv": len(outcome.wrong_kv), "hung": len(outcome.hung), "errors": len(outcome.errors),
        "p_killed": p.killed, "held_at_the_end": round(sum(held.values()), 6),
        "largest_kv_difference": outcome.largest,
    }  # fmt: skip
    return {
        "ratios": {}, "figures": figures, "rows": rows, "answered": dict(outcome.answered), "held": held,
        "errors": outcome.errors + outcome.hung + run.actor.errors, "policy": "recompute",
        "scheduling": "ahead", "seed": args.seed, "count": args.count, "share": args.share, "settings": EXTRA,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="hand-overs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.1, help="of hand-overs in which a failure is planted")
    parser.add_argument("--kills", type=int, help="how often P is killed; by default once for 300 hand-overs")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "wrong_tokens", help="model and logs")
    parser.add_argument("--selftest", action="store_true", help="break D so that wrong KV is used, which must be seen")
    args = parser.parse_args()
    if args.selftest:
        args.count, args.share, args.kills = min(args.count, SELFTEST_COUNT), 0.5, 0
    try:
        result = measure(args)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    for row in result["rows"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    for name, value in (result["figures"] | result["answered"]).items():
        print(f"{name:30}{value:>12.6g}")
    report.write(args.json, result)
    bad = unseen(result["rows"]) if args.selftest else [name for name in MUST_BE_0 if result["figures"][name]]
    for what in (*bad, *result["errors"]):
        print(f"FAILED  {what}", file=sys.stderr)
    return int(bool(bad or result["errors"]))


def unseen(rows: list[dict[str, Any]]) -> list[str]:
    """What the comparison of a broken D has missed."""
    by_kind = {row["planted"]: row for row in rows}
    reused, byte = (by_kind[kind] for kind in UNSEEN)
    seen = {
        "reused pages under a fence that holds nothing: no wrong token": reused["wrong_tokens"] > 0,
        "reused pages under a fence that holds nothing: no wrong KV": reused["wrong_kv"] > 0,
        "one wrong byte: not each was seen": byte["wrong_kv"] == byte["handovers"] - byte["failed"] > 0,
    }
    return [text for text, was_seen in seen.items() if not was_seen]


if __name__ == "__main__":
    sys.exit(main())
