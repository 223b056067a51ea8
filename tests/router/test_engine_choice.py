"""Which engine takes a request, and which one had a prompt's prefix. Pure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.router.engines import EnginePool, EngineState, Role, Seat
from kvferry.router.prefix_affinity import BLOCK_TOKENS, MAX_BLOCKS, PrefixAffinity, PromptPrefix, prompt_prefix
from kvferry.router.request_bodies import members
from kvferry.transport.errors import UsageError
from tests.router.stand_ins import PUSH

A, B, C = "http://a:1", "http://b:1", "http://c:1"
BLOCK = "x" * 1024


def prefix_of(body: dict[str, Any]) -> PromptPrefix:
    return prompt_prefix(members(json.dumps(body).encode()) or {})


def seat_of(pool: EnginePool, tokens: float = 10, now: float = 0.0, **how: Any) -> Seat:
    seat = pool.take_prefill(tokens, now, **how)
    assert seat is not None
    return seat


def taken(pool: EnginePool, tokens: float = 10, **how: Any) -> str:
    return seat_of(pool, tokens, **how).engine.url


def test_p_with_the_fewest_tokens_takes_the_prompt_and_equal_ones_take_turns() -> None:
    pool = EnginePool([A, B])
    assert [taken(pool, 100), taken(pool, 10), taken(pool, 10), taken(pool, 10)] == [A, B, B, B]
    pool = EnginePool([A, B, C])
    for url in [A, B, C] * 2:
        seat = seat_of(pool)
        assert seat.engine.url == url
        seat.release()


def test_a_prefix_is_followed_until_it_costs_more_than_it_saves() -> None:
    pool = EnginePool([A, B])
    cached = {"cached_on": A, "cached": 900.0}
    assert [taken(pool, 1000, **cached) for _ in range(9)] == [A] * 9  # 100 tokens each
    assert taken(pool, 1000, **cached) == B, "A has 900 tokens to compute, B none"


def test_d_with_the_fewest_requests() -> None:
    pool = EnginePool([], [A, B])
    first, second = (pool.take_decode(0.0) for _ in range(2))
    assert first is not None and second is not None and {first.engine.url, second.engine.url} == {A, B}
    first.release()
    again = pool.take_decode(0.0)
    assert again is not None and again.engine is first.engine


def test_a_d_that_failed_is_asked_where_there_is_no_other() -> None:
    pool = EnginePool([], [A, B])
    for number, engine in enumerate(pool):
        pool.failed(engine, float(number))
    seat = pool.take_decode(2.0)
    assert seat is not None and seat.engine.url == A, "the one that failed first"
    for engine in pool:
        pool.move(engine, EngineState.LEAVING)
    assert pool.take_decode(2.0) is None


def test_health_checks_change_the_state_after_several_failures() -> None:
    pool = EnginePool([A])
    (engine,) = pool
    assert [pool.checked(engine, False, 3) for _ in range(3)] == [False, False, True]
    assert (engine.state, pool.take_prefill(1, 0.0)) == (EngineState.DOWN, None)
    engine.identity.learn(PUSH)
    assert pool.checked(engine, True, 3) and engine.state is EngineState.UP
    assert engine.identity.get() is None, "another engine may have started there"
    assert [pool.checked(engine, passed, 3) for passed in (False, False, True, False, False)] == [False] * 5
    pool = EnginePool()
    engine = pool.add(A + "/", Role.PREFILL)
    assert engine.url == A and pool.take_prefill(1, 0.0) is None, "a new one waits for a check"
    assert pool.checked(engine, True, 3) and taken(pool) == A


def test_what_is_no_url_and_an_engine_of_two_roles_are_refused() -> None:
    long = f"http://{'a' * 60_000}:1", f"http://{'a.' * 200}:1"
    paths = "http://a/?x", "http://a:1/v1", "http://a:1/v1/", "http://a b", "http://a..b:1"
    for url in ("10.0.0.1:8000", "ftp://a:1", "http://", "http://a:99999", "http://a:0", *paths, *long):
        with pytest.raises(UsageError, match="expected http://HOST:PORT"):
            EnginePool([url])
    with pytest.raises(UsageError, match="name it once"):
        EnginePool([A], [A + "/"])


PREFIXED: list[dict[str, Any]] = [
    {"prompt": BLOCK * 3 + "tail"},
    {"prompt": [BLOCK * 3]},
    {"prompt": list(range(750))},
    {"messages": [{"role": "system", "content": BLOCK * 3}, {"role": "user", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": BLOCK * 3}]}]},
]


@pytest.mark.parametrize("body", PREFIXED)
def test_prompts_with_one_beginning_share_blocks(body: dict[str, Any]) -> None:
    affinity = PrefixAffinity()
    prefix = prefix_of(body)
    assert len(prefix.blocks) == 3 and len(set(prefix.blocks)) == 3
    affinity.note(prefix, A)
    assert affinity.find(prefix, {A, B}) == (A, 3.0 * BLOCK_TOKENS)
    assert affinity.find(prefix, {B}) == (None, 0.0), "A is not there"
    for other in ({"model": "other"}, {"cache_salt": "other"}):
        assert affinity.find(prefix_of(body | other), {A}) == (None, 0.0)


def test_the_longest_part_counts_and_the_last_p() -> None:
    affinity = PrefixAffinity()
    affinity.note(prefix_of({"prompt": BLOCK + "y" * 1024}), A)
    affinity.note(prefix_of({"prompt": BLOCK}), B)
    assert affinity.find(prefix_of({"prompt": BLOCK + "y" * 2048}), {A, B}) == (A, 2.0 * BLOCK_TOKENS)
    assert affinity.find(prefix_of({"prompt": BLOCK + "z" * 1024}), {A, B}) == (B, 1.0 * BLOCK_TOKENS)


def test_a_body_of_any_form_has_a_prefix() -> None:
    for prompt in ({}, {"prompt": None}, {"prompt": 3}, {"messages": [3, {"role": 1}]}, {"prompt": "\ud800" * 2000}):
        assert prefix_of(prompt).tokens >= 0


def test_memory_is_bounded() -> None:
    affinity = PrefixAffinity(remembered=10)
    first = prefix_of({"prompt": BLOCK})
    affinity.note(first, A)
    assert len(prefix_of({"prompt": BLOCK * 1000}).blocks) == MAX_BLOCKS
    later = [prefix_of({"prompt": f"{number:04}" + BLOCK}) for number in range(20)]
    for prefix in later:
        affinity.note(prefix, B)
    known = [affinity.find(prefix, {A, B})[0] for prefix in (first, *later)]
    assert known == [None] * 11 + [B] * 10
