"""What an engine reports of leases, blocks and waiting requests, under vLLM's real scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.wire import metrics
from tests.support.inside import scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import Engine, Pair, settle

pytestmark = pytest.mark.vllm


def watch(engine: Engine) -> list[dict[str, int]]:
    """The levels that the engine reports, one dictionary for each step with a report."""
    seen: list[dict[str, int]] = []
    real = engine.scheduler.update_from_output

    def update(*arguments: Any) -> Any:
        outputs = real(*arguments)
        for each in outputs.values():
            figures = each.scheduler_stats and each.scheduler_stats.kv_connector_stats
            if figures and figures["levels"]:
                seen.append(metrics.levels(figures))
        return outputs

    engine.scheduler.update_from_output = update
    return seen


def watch_loads(engine: Engine) -> list[int]:
    """The level ``loading`` after each step was scheduled. A load may end before the engine reports its levels."""
    seen: list[int] = []
    real, half = engine.scheduler.schedule, scheduler_half(engine.scheduler)

    def schedule(*arguments: Any) -> Any:
        plan = real(*arguments)
        seen.append(half.stats.levels["loading"])
        return plan

    engine.scheduler.schedule = schedule
    return seen


def test_levels_follow_leases_and_loads_and_end_with_zeros(pair: Pair) -> None:
    p, d = pair
    of_p, of_d, loading = watch(p), watch(d), watch_loads(d)
    tokens = 3 * BLOCK + 1
    params = p.prefill(prompt(tokens))
    assert of_p[-1]["leases"] == 1 and of_p[-1]["lease_blocks"] == 4, "reported in the step that ends the request"
    d.finish(d.add(prompt(tokens), params), beside=[p])
    settle(p, d)
    assert max(loading) == 1
    assert not any(of_p[-1].values()) and not (of_d and any(of_d[-1].values()))
    reports = len(of_p), len(of_d)
    for engine in (p, d):
        engine.finish(engine.add(prompt(20, 3)))
    assert (len(of_p), len(of_d)) == reports, "zeros are reported once"
