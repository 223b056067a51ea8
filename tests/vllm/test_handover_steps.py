"""Whole hand-overs under vLLM's real scheduler: right bytes, counted as external, nothing left behind."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from kvferry.connector.decode_side import renew
from kvferry.connector.decode_side.report import FinishedLoad
from kvferry.connector.wire.step_plan import Load, PeerEngine
from tests.support.inside import leases_of
from tests.vllm.engine_group import EngineGroup
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import (
    PREFILL,
    Engine,
    eventually,
    let_time_pass,
    prefill,
    renew_after,
    run,
    settle,
    transfer_thread_of,
)
from tests.vllm.stepped_rank import RUNNERS

pytestmark = pytest.mark.vllm
Pair = tuple[Engine, Engine]


def hand_over(p: Engine, d: Engine, ids: list[int], **kwargs: Any) -> str:
    """One prompt from P to D, both to the end; D's request id."""
    params = prefill(p, ids)
    request_id = d.add(ids, params, **kwargs)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    return request_id


@pytest.mark.parametrize("tokens", [2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 250, 400])
def test_a_prompt_of_any_length_is_handed_over(pair: Pair, tokens: int) -> None:
    p, d = pair
    request_id = hand_over(p, d, prompt(tokens), max_tokens=20)
    assert d.origins[request_id].theirs == tokens - 1, "D computes the last prompt token, no other"
    assert d.origins[request_id].ours == 0
    assert d.answers[request_id].external == tokens
    assert len(d.answers[request_id].tokens) == 20
    settle(p, d)
    assert not d.workers[0].failed


def test_a_client_is_told_of_no_more_cached_tokens_than_by_d_alone(pair: Pair) -> None:
    p, d = pair
    ids = prompt(10 * BLOCK)
    first, second = hand_over(p, d, ids), hand_over(p, d, ids)
    assert d.answers[first].cached == 0
    assert d.answers[second].cached == 9 * BLOCK
    settle(p, d)


@pytest.mark.parametrize("ranks", ["alone", "data parallel", "pipeline"])
def test_a_step_is_idle_that_computes_nothing_and_holds_up_nobody(pair: Pair, ranks: str) -> None:
    p, d = pair
    connector = d.scheduler.connector
    real, seen = connector.build_connector_meta, []

    def build(output: Any) -> Any:
        meta = real(output)
        seen.append((output.total_num_scheduled_tokens == 0, meta.plan.idle))
        return meta

    connector.build_connector_meta = build
    if ranks != "alone":  # as the constructor decides
        connector.alone = connector.stepping_alone(
            ParallelConfig(data_parallel_size=2 if "data" in ranks else 1, pipeline_parallel_size=1 + ("pipe" in ranks))
        )
    hand_over(p, d, prompt(100))
    assert {empty for empty, _ in seen} == {True, False}
    assert all(idle == (empty and ranks == "alone") for empty, idle in seen)


@pytest.mark.parametrize("runner", RUNNERS)
def test_under_every_model_runner(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    p, d = group.pair(runner=runner)
    for tokens in (7, 100):
        request_id = hand_over(p, d, prompt(tokens, tokens))
        assert d.origins[request_id].theirs == tokens - 1
    settle(p, d)


def test_one_token_is_not_worth_a_transfer(pair: Pair) -> None:
    """D computes the last prompt token in any case: P is released, nothing is loaded."""
    p, d = pair
    request_id = hand_over(p, d, prompt(1))
    settle(p, d)
    assert not d.loads and d.computed[request_id] == 1
    assert p.workers[0].sent


def test_a_prefix_hit_loads_only_the_rest(pair: Pair) -> None:
    p, d = pair
    ids = prompt(100)
    local = d.add(ids[:50])
    run([d], lambda: d.answers[local].finish is not None)
    request_id = hand_over(p, d, ids)
    hit = 3 * BLOCK
    assert d.answers[request_id].external == 100 - hit
    assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (hit, 99 - hit)
    settle(p, d)


@pytest.mark.parametrize("tokens", [70, 64, 65])
def test_the_same_prompt_again_and_again(pair: Pair, tokens: int) -> None:
    p, d = pair
    ids = prompt(tokens)
    answers = []
    for _ in range(3):
        request_id = hand_over(p, d, ids, max_tokens=4)
        answers.append(d.answers[request_id].tokens)
        settle(p, d)
    assert answers[0] == answers[1] == answers[2]
    assert d.computed.total() == 3 * 4, "D computes nothing but the last prompt token and what it decodes"


def test_prompt_logprobs_load_nothing_and_release_p(pair: Pair) -> None:
    """They need a forward over the whole prompt: vLLM asks, is told what could be loaded, and takes nothing."""
    p, d = pair
    ids = prompt(100)
    request_id = hand_over(p, d, ids, prompt_logprobs=1)
    assert d.computed[request_id] == 100 and not d.loads
    settle(p, d)


def test_several_prompts_at_once(pair: Pair) -> None:
    p, d = pair
    lengths = (3, 17, 40, 64, 90, 33)
    on_p = [p.add(prompt(n, seed=n), PREFILL) for n in lengths]
    run([p, d], lambda: all(p.answers[name].finish is not None for name in on_p))
    on_d = [
        d.add(prompt(n, seed=n), p.answers[name].params, max_tokens=8) for n, name in zip(lengths, on_p, strict=True)
    ]
    run([p, d], lambda: all(d.answers[name].finish is not None for name in on_d))
    assert [d.origins[name].theirs for name in on_d] == [n - 1 for n in lengths]
    settle(p, d)


def test_a_prompt_prefilled_in_chunks(group: EngineGroup) -> None:
    p, d = group.pair(max_batched=64)
    ids = prompt(300)
    other = d.add(prompt(200, seed=5), max_tokens=40)  # D is busy meanwhile
    request_id = hand_over(p, d, ids)
    assert d.origins[request_id].theirs == 299
    run([d], lambda: d.answers[other].finish is not None)
    settle(p, d)


def vllms_ids(given: str, samples: int = 1) -> list[str]:
    """Of the engine's requests that vLLM makes of one. ``given``: by its server."""
    request: Any = SimpleNamespace(request_id=given, external_req_id=None, params=SamplingParams(n=samples))
    InputProcessor.assign_request_id(request)
    parent = ParentRequest(request)
    return [parent.get_child_info(n)[0] for n in range(samples)] if samples > 1 else [request.request_id]


@pytest.mark.parametrize("server", ["cmpl-{}-0", "chatcmpl-{}"])
def test_a_client_that_chooses_an_id_like_that_of_a_sample_delays_no_release(
    pair: Pair, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renew, "SIBLING_SECONDS", 600.0)
    p, d = pair
    ids = prompt(100)
    (name,) = vllms_ids(server.format("7_abc"))
    d.add(ids, prefill(p, ids), request_id=name, max_tokens=5)
    run([p, d], lambda: d.answers[name].finish is not None)
    settle(p, d)


@pytest.mark.parametrize("gap", [0.0, 0.2])
def test_three_samples_of_one_prompt_read_under_one_lease(
    pair: Pair, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``n=3`` vLLM makes three requests with the same parameters; P may free after the last one only."""
    monkeypatch.setattr(renew, "SIBLING_SECONDS", 600.0)
    p, d = pair
    ids = prompt(100)
    params = prefill(p, ids)
    names = vllms_ids("cmpl-parent-0", samples=3)
    for name in names:
        d.add(ids, params, request_id=name, max_tokens=5)
        end = time.monotonic() + gap
        run([p, d], lambda end=end: time.monotonic() >= end)
    run([p, d], lambda: all(d.answers[name].finish is not None for name in names))
    assert not d.workers[0].failed
    assert d.computed.total() == 3 * 5
    assert not p.idle, "a fourth one may still come"
    let_time_pass(d, 601)
    settle(p, d)


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_between_different_numbers_of_ranks(group: EngineGroup, p_ranks: int, d_ranks: int) -> None:
    p, d = group.engine(0, tp=p_ranks), group.engine(1, tp=d_ranks)
    for tokens in (30, 200):
        request_id = hand_over(p, d, prompt(tokens, tokens), max_tokens=3)
        assert d.origins[request_id].theirs == tokens - 1
    aborted = d.add(prompt(120), prefill(p, prompt(120)))
    d.step()
    d.abort(aborted)
    settle(p, d)


@pytest.mark.parametrize("roles", [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")])
def test_with_every_role_that_fits(group: EngineGroup, roles: tuple[str, str]) -> None:
    p, d = group.engine(0, role=roles[0]), group.engine(1, role=roles[1])
    request_id = hand_over(p, d, prompt(50))
    assert d.origins[request_id].theirs == 49
    settle(p, d)


def test_back_and_forth(pair: Pair) -> None:
    """With kv_both every engine may be P of one request and D of another at the same time."""
    a, b = pair
    first, second = prompt(60, 1), prompt(80, 2)
    on_a, on_b = a.add(first, PREFILL), b.add(second, PREFILL)
    run([a, b], lambda: a.answers[on_a].finish is not None and b.answers[on_b].finish is not None)
    to_b, to_a = b.add(first, a.answers[on_a].params), a.add(second, b.answers[on_b].params)
    run([a, b], lambda: b.answers[to_b].finish is not None and a.answers[to_a].finish is not None)
    assert (b.origins[to_b].theirs, a.origins[to_a].theirs) == (59, 79)
    settle(a, b)


def test_preempted_on_d_after_its_load(pair: Pair) -> None:
    """Asked again, the connector offers nothing: the lease is over, and the same answer would loop for ever."""
    p, d = pair
    request_id = d.add(prompt(100), prefill(p, prompt(100)), max_tokens=20)
    run([p, d], lambda: len(d.answers[request_id].tokens) >= 3)
    d.preempt(request_id)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert len(d.answers[request_id].tokens) == 20
    assert d.loads[request_id] == 1
    settle(p, d)


def test_preempted_on_d_and_its_blocks_overwritten(group: EngineGroup) -> None:
    p, d = group.pair()
    request_id = d.add(prompt(100), prefill(p, prompt(100)), max_tokens=20)
    run([p, d], lambda: len(d.answers[request_id].tokens) >= 3)
    d.preempt(request_id)
    assert d.scheduler.reset_prefix_cache()
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.computed[request_id] >= 100 + 20, "the prompt is computed anew"
    settle(p, d)


def test_out_of_blocks_on_both_sides(pair: Pair) -> None:
    """More prompts than either pool holds: they queue on P for leases to end and on D for blocks."""
    p, d = pair
    lengths = [150 + 7 * n for n in range(8)]
    on_p = [p.add(prompt(n, seed=n), PREFILL) for n in lengths]
    on_d: dict[str, str] = {}

    def pass_on() -> bool:
        for name, n in zip(on_p, lengths, strict=True):
            if name not in on_d and p.answers[name].finish is not None:
                on_d[name] = d.add(prompt(n, seed=n), p.answers[name].params, max_tokens=30)
        return len(on_d) == len(on_p) and all(d.answers[name].finish is not None for name in on_d.values())

    run([p, d], pass_on)
    settle(p, d)
    assert not d.workers[0].failed


def test_the_lease_is_renewed_while_d_has_no_room(group: EngineGroup) -> None:
    p, d = group.pair(extra={"lease_seconds": 600.0, "lease_cap_seconds": 3600.0})
    running = d.add(prompt(450, seed=3), max_tokens=60)
    d.step()
    request_id = d.add(prompt(400), prefill(p, prompt(400)))
    d.step()
    p.step()
    eventually(lambda: bool(leases_of(transfer_thread_of(p))))
    for seconds in (500, 1000, 1500):
        renew_after(p, d, seconds)
        p.step()
    d.abort(running)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.origins[request_id].theirs == 399
    settle(p, d)


def test_what_vllm_does_not_know_never_reaches_it(pair: Pair) -> None:
    """Its scheduler asserts on unknown ids and on ids told twice, and the engine dies."""
    p, d = pair
    request_id = hand_over(p, d, prompt(40))
    settle(p, d)
    engine = PeerEngine("P", 1, 1, 30.0, ())
    for name, ok in (("unknown", True), (request_id, True), (request_id, False)):
        transfer_thread_of(d).results.loads.append(FinishedLoad(Load(name, b"t" * 16, engine, (), ()), ok))
    transfer_thread_of(p).results.leases.extend(["unknown", *p.leases])
    settle(p, d)
