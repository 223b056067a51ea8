"""The simulation of a fleet: no request is lost, no engine idles beside work, more engines help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.fleet import (  # fmt: skip
    EngineModel,
    Fleet,
    FleetPlanner,
    PrefixCache,
    RequestRecord,
    StepClock,
    Targets,
    fleet_report,
)
from kvferry.cli.plan.trace import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    TracedRequest,
    parsed_trace,
    synthetic_trace,
    trace_lines,
)
from kvferry.transport.errors import ConfigError

MODEL = EngineModel(5000.0, 0.02, 0.001, 600.0, 8)


def link(tokens: int) -> tuple[float, float]:
    return tokens * 1e-5, 0.002


def request(at: float, tokens: int, output: int = 2, first_hash: int = 0) -> TracedRequest:
    return TracedRequest(at, tokens, output, tuple(range(first_hash, first_hash + -(-tokens // BLOCK_TOKENS))))


TRACES = st.builds(
    synthetic_trace, st.integers(1, 60), st.sampled_from([0.1, 10.0, 300.0]), st.integers(0, 1 << 20)
)  # fmt: skip
ROOM = 256 << 10
MODELS = st.builds(
    EngineModel,
    st.sampled_from([2000.0, 50000.0]), st.sampled_from([0.005, 0.05]), st.sampled_from([0.0, 0.002]),
    st.sampled_from([5.0, 600.0]), st.integers(1, 16), st.sampled_from([None, ROOM]), st.sampled_from([None, ROOM]),
)  # fmt: skip


@given(trace=TRACES, model=MODELS, num_p=st.integers(1, 5), num_d=st.integers(1, 5))
@settings(deadline=None)
def test_every_request_ends_once_and_in_order(
    trace: list[TracedRequest], model: EngineModel, num_p: int, num_d: int
) -> None:
    records = Fleet(num_p, num_d, model, link).run(trace)
    assert [record.request for record in records] == trace
    for r in records:
        times = [r.arrived, r.prefill_began, r.prefill_ended, r.admitted, r.loaded, r.first_token, r.ended]
        assert times == sorted(times) and times[-1] < inf
        assert 0 <= r.p < num_p and 0 <= r.d < num_d and 0 <= r.reused < r.request.input_length
        steps = r.request.output_length - 1
        assert r.ended - r.first_token >= steps * model.step_seconds - 1e-6
        if not r.expired:
            assert r.loaded - r.admitted >= sum(link(r.request.input_length)) - 1e-9
            assert r.loaded <= r.prefill_ended + model.lease_cap_seconds + 1e-9
    check_prefills(records, model)
    check_places(records, model)
    assert Fleet(num_p, num_d, model, link).run(trace) == records, "the same for the same arguments"


def check_prefills(records: Sequence[RequestRecord], model: EngineModel) -> None:
    """A P engine computes one prompt at a time, in order of arrival; without a bound on its cache it never waits."""
    by_p = defaultdict(list)
    for record in records:
        by_p[record.p].append(record)
    for served in by_p.values():
        free = 0.0
        for record in served:
            earliest = max(free, record.arrived)
            assert record.prefill_began >= earliest
            if model.p_cache_tokens is None:
                assert record.prefill_began == earliest, "work waits, and the engine idles"
            computed = record.request.input_length - record.reused
            assert isclose(record.prefill_ended - record.prefill_began, computed / model.prefill_tokens_per_second,
                           abs_tol=1e-6)  # fmt: skip
            free = record.prefill_ended


def check_places(records: Sequence[RequestRecord], model: EngineModel) -> None:
    """A D engine has at most so many requests and tokens; a request waits only while it has no place."""
    for d in {record.d for record in records}:
        mine = [record for record in records if record.d == d]
        for one in mine:
            beside = [other for other in mine if other.admitted <= one.admitted < other.ended]
            assert len(beside) <= model.d_sequences
            if model.d_cache_tokens is not None:
                used = sum(other.request.input_length + other.request.output_length for other in beside)
                assert used <= model.d_cache_tokens
            if one.admitted > one.prefill_ended:
                assert any(isclose(other.ended, one.admitted, abs_tol=1e-9) for other in mine), "a place was free"


def test_a_prefix_is_computed_once_and_the_engine_that_has_it_is_chosen() -> None:
    first, second = request(0, 5 * BLOCK_TOKENS), request(10_000, 5 * BLOCK_TOKENS + 10)
    again = Fleet(3, 1, MODEL, link).run([first, second])
    assert again[0].p == again[1].p and again[1].reused == 5 * BLOCK_TOKENS
    busy = Fleet(3, 1, MODEL, link).run([first, request(0, 400 * BLOCK_TOKENS, first_hash=100), second])
    assert busy[2].p == busy[0].p
    same = Fleet(1, 1, MODEL, link).run([first, request(9000, 5 * BLOCK_TOKENS)])
    assert same[1].reused == 5 * BLOCK_TOKENS - 1, "the last token is computed for its logits"


def test_the_time_of_one_request() -> None:
    (record,) = Fleet(1, 1, MODEL, link).run([request(500, 1000, 11)])
    assert isclose(record.ttft, 1000 / 5000 + 0.01 + 0.002 + 0.021)
    assert isclose(record.tpot, 0.021)


def test_requests_wait_for_room_in_the_caches_of_p_and_d() -> None:
    model = replace(MODEL, p_cache_tokens=3 * BLOCK_TOKENS)
    one, two = Fleet(1, 1, model, link).run([request(0, 1500), request(0, 1500, first_hash=50)])
    assert isclose(two.prefill_began, one.loaded), "until the bytes of the first one have moved"
    model = replace(MODEL, d_cache_tokens=2048)
    one, two = Fleet(2, 1, model, link).run([request(0, 1000, 50), request(0, 1000, 50, first_hash=50)])
    assert one.admitted == one.prefill_ended and two.admitted == one.ended > two.prefill_ended


def test_a_lease_that_expires_makes_d_compute() -> None:
    model = replace(MODEL, d_sequences=1, lease_cap_seconds=1.0)
    long, late = Fleet(2, 1, model, link).run([request(0, 1000, 200), request(0, 1000, 2, first_hash=9)])
    assert not long.expired and late.expired and late.admitted == long.ended
    assert late.first_token >= late.loaded + 1000 / 5000


def test_a_request_that_no_cache_holds_is_refused() -> None:
    for side in ("p", "d"):
        with pytest.raises(ConfigError, match=f"of {side.upper()}'s KV cache.*--{side}-cache-tokens"):
            Fleet(1, 1, replace(MODEL, **{f"{side}_cache_tokens": 1024}), link).run([request(0, 2000)])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=60), st.integers(5, 12))
def test_leased_blocks_stay_and_the_bound_holds(work: list[tuple[int, int]], capacity: int) -> None:
    """Prompts of three trees take and return leases; a model of sets says what must be there."""
    cache = PrefixCache(capacity)
    leases: list[tuple[list[int], int]] = []
    for tree, length in work:
        blocks = [100 * (tree % 3) + n for n in range(length)]
        if tree > 3 and leases:
            cache.release(*leases.pop(0))
        elif cache.lease(blocks, tree % 2):
            leases.append((blocks, tree % 2))
        else:
            held = {block for others, _ in leases for block in others}
            assert len(held | set(blocks)) + sum(private for _, private in leases) + tree % 2 > capacity
        held = {block for others, _ in leases for block in others}
        assert cache.num_leased == len(held) + sum(private for _, private in leases) <= capacity
        assert all(cache.matched(others) == len(others) for others, _ in leases)


def test_a_block_that_is_leased_again_takes_no_second_place() -> None:
    cache = PrefixCache(2)
    for block in (5, 1):
        assert cache.lease([block], 0)
        cache.release([block], 0)
    assert cache.lease([1], 0) and cache.matched([5]) == 1


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 30)), min_size=1, max_size=20), st.sampled_from([0.0, 0.003]))
def test_steps_are_those_of_a_loop_over_steps(joins: list[tuple[float, int]], per_sequence: float) -> None:
    joins.sort()
    clock, ends = StepClock(0.01, per_sequence), {}
    for number, (at, tokens) in enumerate(joins):
        while clock.next_end <= at:
            now = clock.next_end
            ends.update(dict.fromkeys(clock.ended(now), now))
        clock.join(number, tokens, at)
    while len(clock):
        now = clock.next_end
        ends.update(dict.fromkeys(clock.ended(now), now))
    expected: dict[int, float] = {}
    first: dict[int, float] = {}
    left: dict[int, int] = {}
    waiting, now = list(enumerate(joins)), 0.0
    while waiting or left:
        if not left:
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now:
            number, (_, tokens) = waiting.pop(0)
            left[number] = tokens
        now += 0.01 + per_sequence * len(left)
        for number in list(left):
            first.setdefault(number, now)
            left[number] -= 1
            if not left[number]:
                expected[number] = now
                del left[number]
    assert ends == pytest.approx(expected) or close_to_a_boundary(joins)
    assert clock.first_tokens == pytest.approx(first) or close_to_a_boundary(joins)


def close_to_a_boundary(joins: list[tuple[float, int]]) -> bool:
    """A request that arrives at the end of a step, but for rounding, may miss it."""
    return any(isclose(at * 1000, round(at * 1000), abs_tol=1e-6) for at, _ in joins)


def test_the_fewest_engines() -> None:
    trace = synthetic_trace(400, 60.0, 1)
    planner = FleetPlanner(trace, MODEL, link, 90.0)
    targets = Targets(3.0, 0.03, 90.0)
    best = planner.fewest(targets)
    assert best.meets(targets) and best.p_engines > 1 and best.d_engines > 1
    assert not planner.report(best.p_engines - 1, 400).meets(targets)
    assert not planner.report(best.p_engines, best.d_engines - 1).meets(targets)
    with pytest.raises(ConfigError, match="no fleet of up to 400 P and 400 D engines meets the targets"):
        planner.fewest(Targets(3.0, 0.001, 90.0))


def test_the_report_adds_up() -> None:
    records = Fleet(2, 2, MODEL, link).run(synthetic_trace(200, 60.0, 1))
    report = fleet_report(records, 2, 2, 95.0)
    parts = report.p_queue + report.prefill + report.d_queue + report.handover + report.first_step
    assert isclose(parts, sum(record.ttft for record in records) / 200)
    assert 0 < report.p_busy <= 1 and 0 < report.reused_tokens < 1 and report.ttft_p50 <= report.ttft


def test_a_trace_is_read_as_it_is_written() -> None:
    trace = synthetic_trace(50, 10.0, 7)
    assert parsed_trace(trace_lines(trace)) == trace == synthetic_trace(50, 10.0, 7) != synthetic_trace(50, 10.0, 8)
    assert parsed_trace([b'{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [1], "more": 2}', b""])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "the trace has no requests"),
        (b"{", "line 1 is no request of a trace"),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 1 .*input_length"),
        (b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "line 1: 1 hash_ids for 513"),
        (b'{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": [1]}' % (MAX_TOKENS + 1), "line 1"),
    ],
)
def test_what_is_no_trace(line: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed_trace([line])
