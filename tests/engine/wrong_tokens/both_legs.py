"""Whether every token of a decoder is right where both legs of a request are sent at once: against a plain engine's.

    python tests/engine/wrong_tokens/both_legs.py [--count 300] [--seed 1] [--plane tcp] [--json FILE]

As ``run.py``, whose prompts, comparison and engines these are; but the KV cache leaves while P computes it. P
computes a prompt in steps of few tokens, several prompts at a time, and has so few blocks that it preempts requests and
uses their blocks for others. Half of the requests come in groups that begin alike, so both engines find tokens in their
prefix caches. At times D's client leaves, P's client leaves, or P is killed while it computes.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / ".typing"))

from kvferry.router.identities import IDENTITY, IDENTITY_ALSO
from kvferry.router.request_bodies import PREFILL_TAG
from tests.engine.wrong_tokens.asks import KILLED, Ask
from tests.engine.wrong_tokens.pair import Prefill
from tests.engine.wrong_tokens.run import DONE, FAILED, PROBE, Run, leave, parser_of, run_all
from tests.support.served import PatientServerGroup
from tests.support.server import EngineError, Server, metric_sum

P_LEFT = "P's client left"
KINDS = ("client left", P_LEFT)
SMALL = (
    "--num-gpu-blocks-override", "36", "--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "24",
)  # fmt: skip
"""P: one request of the longest length fits, steps are short, and several prompts are computed at a time."""


class BothLegs(Run):
    """A run whose router sends both legs at once."""

    kinds, of_p, step_patience = KINDS, (*PROBE, *SMALL), None

    def __init__(self, p: Prefill, d: Server, group: PatientServerGroup, seed: int) -> None:
        super().__init__(p, d, group, seed)
        self._identities: dict[int, dict[str, Any]] = {}  # of each life of P

    def prepare(self, *, broken: bool) -> None:
        """Nothing is planted in D."""

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
            leave(server, body, ask.name, self.soon(0.2))
            return
        if ask.fault == KILLED:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._kill_soon)
        with suppress(EngineError):  # P is killed: D computes the prompt
            server.post("/v1/completions", body, headers={"X-Request-Id": ask.name})

    def _kill_soon(self) -> None:
        time.sleep(self.soon(0.2))
        self.p.kill()

    def _d_leg(self, ask: Ask, known: dict[str, Any]) -> None:
        params = {"do_remote_prefill": True, "do_remote_decode": False, **known, "transfer_id": ask.name}
        body = ask.body | ({"kv_transfer_params": params} if ask.handed_over else {})
        if ask.fault == "client left":
            leave(self.d, body, ask.name, self.soon(0.2))
        else:
            self.compare(ask, body)

    def figures(self, groups: list[list[Ask]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        handed = {ask.name: ask.fault for asks in groups for ask in asks if ask.handed_over}
        log = self.d.log_text()
        failed = {name for name in FAILED.findall(log) if name in handed}
        loaded = {name for name, _ in DONE.findall(log) if name in handed} - failed
        of_p, of_d = self.p.wait().metrics(), self.d.metrics()  # of P's last life, whose counters begin with it

        def counted(samples: Any, name: str, **labels: str) -> float:
            return metric_sum(samples, f"vllm:{name}", **labels) or 0

        return {
            "handovers": len(handed), "loaded": len(loaded), "failed": len(failed),
            "computed_by_d": len(handed) - len(loaded) - len(failed),
            "loads_while_p_computes": counted(of_d, "kvferry_num_streamed_handovers_total"),
            "mib_while_p_computes": counted(of_p, "kvferry_bytes_sent_total", when="computes") / (1 << 20),
            "preemptions_of_p": counted(of_p, "num_preemptions_total"),
            "tokens_p_found": counted(of_p, "prefix_cache_hits_total"),
            "tokens_d_found": counted(of_d, "prefix_cache_hits_total"),
            **{kind: sum(fault == kind for fault in handed.values()) for kind in KINDS},
        }, []  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, "both_legs", count=300, plane="tcp", kills=1)  # a plane on which P sends
    return run_all(parser.parse_args(), BothLegs)


if __name__ == "__main__":
    sys.exit(main())
