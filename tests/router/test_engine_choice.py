"""Which engine takes a request, which one had a prompt's prefix, and whether P or D prefills a prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.responses import JSONResponse

from kvferry.router.engines import Engine, EnginePool, EngineState, Role, Seat
from kvferry.router.prefill_choice import (
    ASKED,
    ENOUGH,
    KEPT,
    OLD_SECONDS,
    PrefillChoice,
    TimeLine,
)
from kvferry.router.prefix_affinity import BLOCK_TOKENS, MAX_BLOCKS, PrefixAffinity, PromptPrefix, prompt_prefix
from kvferry.router.request_bodies import members
from kvferry.transport.errors import UsageError
from tests.router.stand_ins import PUSH, Front, Scripted, answer_of_p, decode_engine, gone, prefill_engine, routed

A, B, C = "http://a:1", "http://b:1", "http://c:1"
BLOCK = "x" * 1024


def prefix_of(body: dict[str, Any]) -> PromptPrefix:
    return prompt_prefix(members(json.dumps(body).encode()) or {})


def seat_of(pool: EnginePool, tokens: float = 10, now: float = 0.0, **how: Any) -> Seat:
    best = pool.best_prefill(tokens, now, **how)
    assert best is not None
    return Seat(*best, pool)


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
        pool.leave(engine)
    assert pool.take_decode(2.0) is None


def test_health_checks_change_the_state_after_several_failures() -> None:
    pool = EnginePool([A])
    (engine,) = pool
    assert [pool.checked(engine, False, 3) for _ in range(3)] == [False, False, True]
    assert (engine.state, pool.best_prefill(1, 0.0)) == (EngineState.DOWN, None)
    engine.identity = PUSH
    assert pool.checked(engine, True, 3) and engine.state is EngineState.UP
    assert engine.identity is None, "another engine may have started there"
    assert [pool.checked(engine, passed, 3) for passed in (False, False, True, False, False)] == [False] * 5
    pool = EnginePool()
    engine = pool.add(A + "/", Role.PREFILL)
    assert engine.url == A and pool.best_prefill(1, 0.0) is None, "a new one waits for a check"
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


P, D, OTHER = "http://p:1", "http://d:1", "http://d:2"
STEP, TOKEN, LOAD = 0.01, 5e-5, 0.015
"""Seconds of a step, of each token of a prefill, and of D after P's answer."""


def prompt(tokens: int, name: int = 1) -> PromptPrefix:
    return PromptPrefix(float(tokens), tuple(range(name << 20, (name << 20) + tokens // 256)))


def ask(choice: PrefillChoice, d: Engine, now: float, rate: float) -> None:
    for number in range(ASKED):
        choice.asked(d, prompt(1), now - (ASKED - number) / rate, alone=False)


class Chosen:
    """What is chosen for one P and its Ds, and a clock."""

    def __init__(self, *decode: str, learned: bool = True) -> None:
        self.engines = EnginePool([P], decode or [D])
        self.choice, self.now = PrefillChoice(self.engines), 1000.0
        self.p, self.d = self.engine(P), self.engine((*decode, D)[0])
        if learned:
            self.learn()

    def engine(self, url: str) -> Engine:
        found = self.engines.get(url)
        assert found is not None
        return found

    def learn(self, count: int = ENOUGH) -> None:
        for number in range(count):
            tokens = 100.0 * 2 ** (number % ENOUGH)
            self.choice.prefilled(self.p, tokens, STEP + TOKEN * tokens, self.now)
            for d in self.engines.of(Role.DECODE):
                self.choice.began(d, tokens, LOAD, self.now, alone=False)

    def load(self, engine: Engine, count: int, weight: float = 1.0) -> None:
        for _ in range(count):
            Seat(engine, weight, self.engines)

    def busy(self, rate: float) -> None:
        """The D gets so many requests per second, until it is chosen."""
        ask(self.choice, self.d, self.now + 1, rate)

    def choose(self, tokens: int, cached: int = 0) -> Engine | None:
        """``cached``: of the prompt on P."""
        self.now += 1
        return self.choice.decode_engine(prompt(tokens), self.p, float(tokens - cached), self.now)


@pytest.mark.parametrize(
    ("tokens", "rate", "queued", "on_p", "on_d", "by_d"),
    [
        (200, 0, 0, 0, 0, True),
        (8000, 0, 0, 0, 0, True),
        (200, 6, 0, 0, 0, True),
        (200, 70, 0, 0, 0, True),
        (200, 80, 0, 0, 0, False),
        (8000, 1, 0, 0, 0, False),
        (8000, 0, 0, 7680, 0, False),
        (8000, 0, 0, 0, 7680, True),
        (8000, 32, 0, 0, 7936, True),
        (4000, 1, 20_000, 0, 0, True),
    ],
    ids=[
        "a short prompt, D idle", "a long one, D idle", "a short one, D answers a few",
        "a short one, D's answers lose 70 % and this one gains 75 %", "and where they lose 80 %",
        "a long one, D answers a few", "P has nearly all", "D has nearly all", "D has nearly all, and answers many",
        "P's queue is long",
    ],
)  # fmt: skip
def test_who_prefills(tokens: int, rate: int, queued: int, on_p: int, on_d: int, by_d: bool) -> None:
    """Of 200 tokens D would answer after 20 ms, P and D after 35 ms; of that, D's others wait 10 ms."""
    pair = Chosen()
    if rate:
        pair.busy(rate)
    pair.load(pair.p, 1, queued)
    pair.choice.on_d.note(PromptPrefix(on_d, prompt(tokens).blocks[: on_d // 256]), D)
    assert (pair.choose(tokens, on_p) is pair.d) is by_d


def test_a_d_that_gets_few_requests_again_prefills_again() -> None:
    pair = Chosen()
    pair.busy(1000)
    assert pair.choose(200) is None
    pair.now += 10
    assert pair.choose(200) is pair.d


def test_a_prompt_is_handed_over_until_p_is_known_and_when_all_is_old() -> None:
    pair = Chosen(learned=False)
    assert pair.choose(200) is None
    pair.learn(ENOUGH - 1)
    assert pair.choose(200) is None
    pair.learn(1)
    assert pair.choose(200) is pair.d
    pair.now += OLD_SECONDS
    assert pair.choose(200) is None


def test_of_several_d_the_one_that_has_the_prompt_prefills_unless_it_is_busy() -> None:
    pair = Chosen(D, OTHER)
    other = pair.engine(OTHER)
    pair.load(pair.d, 1)
    pair.load(other, 2)
    pair.choice.on_d.note(prompt(7680), OTHER)
    pair.busy(1)
    assert pair.choose(8000) is other
    pair.load(other, 1)
    assert pair.choose(8000) is None


def test_prompts_before_it_count_and_a_burst_does_not_all_go_to_d() -> None:
    pair = Chosen()
    chosen = []
    for number in range(6):
        d = pair.choice.decode_engine(prompt(4000, number), pair.p, 4000.0, pair.now)
        chosen.append(d is pair.d)
        if d is not None:
            pair.choice.asked(d, prompt(4000, number), pair.now, alone=True)
    assert chosen == [True] + [False] * 5


# --- what is learned


def test_a_line_is_found_among_wrong_times_and_only_the_last_are_kept() -> None:
    rng, line = random.Random(1), TimeLine()

    def add(count: int, times: float) -> None:
        for number in range(count):
            tokens = 2.0 ** (number % 20) * rng.uniform(1, 2)
            wrong = rng.choice((1e-6, 1e4)) if number // 20 % 3 == 0 else times
            line.add(tokens, (STEP + TOKEN * tokens) * wrong, 0.0)

    add(20 * 200, 1.0)
    add(20 * KEPT, 2.0)
    found = line.get(0.0)
    assert found is not None and found[1] == pytest.approx(2 * TOKEN, rel=0.3)


def test_equal_prompts_show_no_slope_but_their_own_time() -> None:
    line = TimeLine()
    for _ in range(ENOUGH):
        line.add(100.0, 0.02, 0.0)
    assert line.get(0.0) == (0.0, 0.02 / 100)
    line = TimeLine()
    for number in range(ENOUGH):
        line.add(100.0 * (1 + number % 2), 0.02, 0.0)
    start, slope = line.get(0.0, TOKEN) or (0.0, 0.0)
    assert start == pytest.approx(0.02 - 150 * TOKEN) and slope == TOKEN


def test_a_slow_d_is_learned_and_one_too_fast_to_be_true_is_not() -> None:
    pair = Chosen()
    assert pair.choose(2000) is pair.d
    for number in range(ENOUGH):
        pair.choice.began(pair.d, 2000.0, 3.0, pair.now, alone=True)
        pair.choice.began(pair.d, 2.0 ** (15 + number % 4), 0.01, pair.now, alone=True)  # an image
    pair.now += 1
    assert pair.choose(2000) is None


# --- in the router


@contextmanager
def learned(p: Any, d: Any, **options: Any) -> Iterator[Front]:
    """A router that knows its engines."""
    with routed(p, d, always=False, **options) as front:
        choice, engines, now = front.router.choice, front.router.engines, front.router.clock()
        assert choice is not None
        for number in range(24 * KEPT):
            tokens = 2.0 ** (number % 24)
            for engine in engines.of(Role.PREFILL):
                choice.prefilled(engine, tokens, STEP + TOKEN * tokens, now)
            for engine in engines.of(Role.DECODE):
                choice.began(engine, tokens, LOAD, now, alone=False)
        yield front


@pytest.mark.parametrize("stream", [False, True])
def test_d_prefills_a_short_prompt_and_the_answer_is_whole(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine()
    with learned(p, d) as front:
        said = front.ask({"prompt": "x" * 50, "stream": stream})
        assert said.status_code == 200
        assert said.text.endswith("data: [DONE]\n\n") if stream else said.json() == {"text": "from D"}
        assert front.counts("decode_legs") == {"left_to_d": 1} and not p.seen
        assert "kv_transfer_params" not in d.seen[0][0]
        front.ask({"prompt": "x" * 50}, **{"X-KVFerry-Check": "1"})
        assert front.counts("decode_legs") == {"left_to_d": 1, "serial": 1} and len(p.seen) == 1


def test_what_the_router_sees_is_enough_to_choose() -> None:
    """After so many prompts of one idle P and D, D prefills."""
    p = Scripted(lambda body: answer_of_p({"do_remote_prefill": True, "remote_engine_id": "p-0"}))
    d = decode_engine()
    with routed(p.engine, d, always=False) as front:
        for _ in range(ENOUGH):
            front.ask({"prompt": "x" * 50, "stream": True})
        assert front.counts("decode_legs") == {"serial": ENOUGH}
        clock = front.router.clock
        front.router.clock = lambda: clock() + 50  # few requests a second: the stand-ins answer in some milliseconds
        front.ask({"prompt": "x" * 50, "stream": True})
        assert front.counts("decode_legs") == {"serial": ENOUGH, "left_to_d": 1}


def test_a_p_that_is_down_and_a_d_that_fails_lose_nothing() -> None:
    d = decode_engine()
    with learned(gone(), d, cool_down=600) as front:
        (p,) = front.router.engines.of(Role.PREFILL)
        front.router.engines.failed(p, now=front.router.clock())
        assert front.ask({"prompt": "x" * 50}).json() == {"text": "from D"}
        assert front.counts("decode_legs") == {"decode_only": 1}
    failing = Scripted(lambda body: JSONResponse({"error": "planted"}, 500))
    for bad in (gone(), failing.engine):
        with learned(prefill_engine(), [bad, d]) as front:
            for _ in range(2):
                assert front.ask({"prompt": "x" * 50}).json() == {"text": "from D"}
            assert front.counts("decode_legs") == {"left_to_d": 2}
            front.idle()
            assert all(not engine.requests for engine in front.router.engines)
    assert failing.engine.seen
