"""Whole hand-overs under vLLM's real scheduler: right bytes, counted as external, nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from labelled import BLOCK, prompt
from stepped import Engine, prefill, run, settle
from stepped_rank import RUNNERS
from yard import Yard

pytestmark = pytest.mark.vllm


def hand_over(p: Engine, d: Engine, ids: list[int], **kwargs: Any) -> str:
    """One prompt from P to D, both to the end; D's request id."""
    params = prefill(p, ids)
    request_id = d.add(ids, params, **kwargs)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    return request_id


@pytest.mark.parametrize("tokens", [2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 250, 400])
def test_a_prompt_of_any_length_is_handed_over(pair: tuple[Engine, Engine], tokens: int) -> None:
    p, d = pair
    request_id = hand_over(p, d, prompt(tokens), max_tokens=20)
    assert d.origins[request_id].theirs == tokens - 1, "D computes the last prompt token, no other"
    assert d.origins[request_id].ours == 0
    assert d.answers[request_id].external == tokens
    assert len(d.answers[request_id].tokens) == 20
    settle(p, d)
    assert not d.workers[0].failed


@pytest.mark.parametrize("runner", RUNNERS)
def test_under_every_model_runner(yard: Yard, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.compat.HAS_TRANSFER_RESULTS", False)
    p, d = yard.pair(runner=runner)
    for tokens in (7, 100):
        request_id = hand_over(p, d, prompt(tokens, tokens))
        assert d.origins[request_id].theirs == tokens - 1
    settle(p, d)
