"""No token is wrong while hand-overs of real engines fail inside steps behind which others are scheduled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.connector.step_loads.step_hold import PATIENCE_SECONDS
from tests.support.served import (
    PatientServerGroup,
    complete,
    eventually,
    kill,
    no_block_held,
    prefill_leg,
    prompt,
    tokens_of,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
FAULTS = {
    "lease ended": lambda p: p.rpc("end_leases", "0"), "pages reused": lambda p: p.rpc("end_leases", "1"),
    "copy error": None, "given up": None, "connection cut": lambda p: p.rpc("cut"), "P killed": kill,
}  # fmt: skip
"""In the middle of a copy, and what P does then."""
TRIES = 40
"""Speed decides whether a load goes inside a step, and whether D has it in its prefix cache by then: one that was slow
on a host that stood still is followed by one beside the steps."""


def test_no_token_is_wrong_where_hand_overs_fail(group: PatientServerGroup, model: Path, tmp_path: Path) -> None:
    """Two prompts that begin alike are handed over, a third one is not, and D decodes a fourth one. All tokens are
    those of a D that computes alone, under each fault, as often as it takes until a load failed inside its step."""
    group.step_patience = PATIENCE_SECONDS  # as it is in use: some of the faults are that it ends
    worker = "--worker-extension-cls", "tests.engine.ahead.Faults"
    extra = {"plane": "cma", "step_hold_seconds": 0.5, "lease_seconds": 20.0, "handover_timeout_seconds": 120.0}
    of_p = [*worker, "--no-enable-prefix-caching"]
    of_d = [*worker, "--scheduler-cls", "tests.engine.ahead.AheadScheduler"]
    p, d = (
        group.engine(name, model, extra=extra, kv_bytes=False, arguments=arguments)
        for name, arguments in (("prefill", of_p), ("decode", of_d))
    )
    group.wait_ready()
    halfway, seeds = tmp_path / "halfway", iter(range(1000))
    for fault, act in FAULTS.items():
        for _ in range(TRIES if fault != "P killed" else 1):
            begin, before = prompt(300, next(seeds)), d.log_text().count(" failed inside its step")
            prompts = [begin + prompt(n, next(seeds)) for n in (1, 40, 20)] + [prompt(40, next(seeds))]
            lengths = (8, 8, 8, 60)
            alone = [complete(d, ids, cache_salt="a", max_tokens=n) for ids, n in zip(prompts, lengths, strict=True)]
            good = begin[::-1]  # so that D knows how long a load takes: a load of unknown length goes beside its steps
            complete(d, good, kv_transfer_params=prefill_leg(p, good))
            legs = [prefill_leg(p, prompts[0]), prefill_leg(p, prompts[1]), None, None]
            d.rpc("plant", fault, str(halfway))
            with ThreadPoolExecutor(len(prompts)) as pool:
                asked = {
                    n: pool.submit(complete, d, prompts[n], kv_transfer_params=legs[n], max_tokens=lengths[n])
                    for n in (3, 0, 1, 2)
                }
                if act is not None:
                    eventually(
                        lambda asked=asked: halfway.exists() or (asked[0].done() and asked[1].done()), "half is copied"
                    )
                    try:
                        act(p)
                    finally:
                        halfway.unlink(missing_ok=True)
            answers = [tokens_of(asked[n].result()) for n in range(4)]
            assert answers == [tokens_of(answer) for answer in alone], fault
            no_block_held(d, *([] if act is kill else [p]))
            if d.log_text().count(" failed inside its step") > before:
                break
        else:
            assert fault == "P killed", f"no load failed inside its step: {fault}"
    assert d.alive and "ahead: 2 steps in flight" in d.log_text()
