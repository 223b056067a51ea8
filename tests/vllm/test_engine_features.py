"""What engines do beside plain prefill and decode: prefix hits, chunks, preemption, priorities, drafts, DP ranks.

All under vLLM's real schedulers, with and without async scheduling; every forward checks all KV that it reads.
"""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvferry.transport.errors import ConfigError
from tests.support.inside import leases_of, scheduler_half
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import PREFILL, Engine, eventually, prefill, run, settle, transfer_thread_of
from tests.vllm.stepped_model import next_token
from tests.vllm.stepped_rank import RUNNERS

pytestmark = pytest.mark.vllm
Pair = tuple[Engine, Engine]
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])
"""With async scheduling, vLLM's default on GPUs, or without."""
FEW_BLOCKS = 1 + 18
"""Of 16 tokens each, one of which vLLM keeps to itself."""


def hand_over(p: Engine, d: Engine, ids: list[int], **kwargs: Any) -> str:
    """One prompt from P to D, both to the end; D's request id."""
    request_id = d.add(ids, prefill(p, ids), **kwargs)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    return request_id


def tokens_after(ids: list[int], count: int) -> list[int]:
    """What the model says, without any engine."""
    known = [*ids]
    for _ in range(count):
        known.append(next_token(known))
    return known[len(ids) :]


def hand_all_over(p: Engine, d: Engine, prompts: list[list[int]], on_p: int, on_d: int) -> list[tuple[str, str]]:
    """All at once on P, each passed on to D when P is done with it, so many tokens decoded on either; their ids."""
    names = [p.add(ids, PREFILL, max_tokens=on_p) for ids in prompts]
    passed: dict[str, str] = {}

    def over() -> bool:
        for name, ids in zip(names, prompts, strict=True):
            if name not in passed and p.answers[name].finish is not None:
                passed[name] = d.add(ids, p.answers[name].params, max_tokens=on_d)
        return len(passed) == len(names) and all(d.answers[name].finish is not None for name in passed.values())

    run([p, d], over)
    for name, ids in zip(names, prompts, strict=True):
        assert p.answers[name].tokens == tokens_after(ids, on_p)
        assert d.answers[passed[name]].tokens == tokens_after(ids, on_d)
        assert d.origins[passed[name]].theirs == len(ids) - 1 and d.all_loads[passed[name]] == 1
    return [(name, passed[name]) for name in names]


class Preempted:
    """How often vLLM preempted each request of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.times: Counter[str] = Counter()
        self._real = engine.scheduler._preempt_request
        engine.scheduler._preempt_request = self._preempt

    def _preempt(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.times[request.request_id] += 1
        self._real(request, *args, **kwargs)


@AHEAD
def test_the_scheduler_is_vllms_own(group: EngineGroup, ahead: int) -> None:
    assert isinstance(group.engine(1, ahead=ahead).scheduler, AsyncScheduler) == bool(ahead)


# --- prefix hits on D -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4 * BLOCK + 1, 1])
def test_nothing_left_to_load_releases_p_at_once(pair: Pair, lines: Lines, tokens: int) -> None:
    """D has all but the last token, which it computes in any case: P must not hold its blocks until the lease ends."""
    p, d = pair
    ids = prompt(tokens)
    local = d.add(ids)
    run([d], lambda: d.answers[local].finish is not None)
    params = prefill(p, ids)
    p.step()
    eventually(lambda: len(leases_of(transfer_thread_of(p))) == 1)
    request_id = d.add(ids, params, max_tokens=3)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.answers[request_id].tokens == tokens_after(ids, 3)
    assert d.computed[request_id] == 3 and d.answers[request_id].external == 0 and not d.loads
    settle(p, d)
    assert not lines("expired")


@pytest.mark.parametrize("shared", [BLOCK - 1, BLOCK, 5 * BLOCK, 99])
def test_a_prefix_hit_of_any_length(pair: Pair, shared: int) -> None:
    """Only whole blocks are hits; the rest of the last one is loaded over what another prompt left in a copy of it."""
    p, d = pair
    ids = prompt(100)
    local = d.add([*ids[:shared], 7, 7, 7], max_tokens=4)
    run([d], lambda: d.answers[local].finish is not None)
    request_id = hand_over(p, d, ids, max_tokens=5)
    hit = shared // BLOCK * BLOCK
    assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (hit, 99 - hit)
    assert d.answers[request_id].external == 100 - hit
    assert d.answers[request_id].tokens == tokens_after(ids, 5)
    settle(p, d)


def test_a_prefix_hit_on_p(pair: Pair) -> None:
    """Blocks that P computed for another prompt belong to this lease as well."""
    p, d = pair
    first = hand_over(p, d, prompt(100))
    settle(p, d)
    d.scheduler.reset_prefix_cache()
    longer = prompt(100) + prompt(60, 1)
    request_id = hand_over(p, d, longer)
    assert p.computed.total() == 100 + 160 - 6 * BLOCK
    assert d.origins[first].theirs == 99 and d.origins[request_id].theirs == 159
    settle(p, d)


# --- chunked prefill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_nothing_is_handed_over_before_the_last_chunk(group: EngineGroup, ahead: int) -> None:
    p, d = group.pair(max_batched=64, ahead=ahead)
    ids = prompt(300)
    on_p = p.add(ids, PREFILL)
    for chunk in range(1, 5):
        p.step()
        assert p.computed[on_p] == 64 * chunk and not p.leases
    run([p], lambda: p.answers[on_p].finish is not None)
    request_id = d.add(ids, p.answers[on_p].params)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.origins[request_id].theirs == 299
    settle(p, d)


# --- preemption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [False, True], ids=["blocks-kept", "blocks-taken"])
@pytest.mark.parametrize("chunks", [2, 4, 5])
@AHEAD
def test_preempted_on_p(group: EngineGroup, ahead: int, chunks: int, fill: bool) -> None:
    """In the middle of its prompt, at its last chunk, and after it, when (running ahead) its answer is under way.

    The blocks of then are not those of the lease.
    """
    p, d = group.pair(max_batched=64, ahead=ahead, num_blocks=31)
    ids = prompt(300)
    on_p = p.add(ids, PREFILL, max_tokens=3)
    for _ in range(chunks):
        p.step()
    p.preempt(on_p)
    if fill:  # another has all blocks meanwhile
        waiting = p.scheduler.requests[on_p]
        p.scheduler.waiting.remove_requests([waiting])
        other = p.add(prompt(450, 1), max_tokens=2)
        run([p], lambda: p.answers[other].finish is not None)
        assert p.scheduler.reset_prefix_cache()
        p.scheduler.waiting.add_request(waiting)
    run([p], lambda: p.answers[on_p].finish is not None)
    assert p.answers[on_p].tokens == tokens_after(ids, 3)
    assert not fill or p.computed[on_p] > 302
    request_id = d.add(ids, p.answers[on_p].params)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.origins[request_id].theirs == 299
    settle(p, d)


@AHEAD
def test_out_of_blocks_on_p_while_it_decodes(group: EngineGroup, ahead: int) -> None:
    """vLLM preempts by itself; what is handed over are the blocks that the prompt has in the end."""
    p, d = group.engine(0, ahead=ahead, num_blocks=FEW_BLOCKS), group.engine(1, ahead=ahead)
    preempted = Preempted(p)
    hand_all_over(p, d, [prompt(60, n) for n in range(4)], on_p=40, on_d=5)
    assert preempted.times.total() > 0
    settle(p, d)


@AHEAD
def test_out_of_blocks_on_d_while_it_decodes(group: EngineGroup, ahead: int) -> None:
    """A loaded prompt that is preempted is prefilled by D: the lease is over, and nothing is loaded twice."""
    p, d = group.engine(0, ahead=ahead), group.engine(1, ahead=ahead, num_blocks=FEW_BLOCKS)
    preempted = Preempted(d)
    for _, name in hand_all_over(p, d, [prompt(60, n) for n in range(4)], on_p=1, on_d=80):
        assert d.answers[name].external == 60
    assert preempted.times.total() > 0
    assert not d.workers[0].failed
    settle(p, d)


# --- priorities -------------------------------------------------------------------------------------------------


@AHEAD
def test_the_urgent_request_is_loaded_first(group: EngineGroup, ahead: int) -> None:
    p = group.engine(0, ahead=ahead)
    d = group.engine(1, scheduling="priority", ahead=ahead, num_blocks=FEW_BLOCKS)
    order: list[str] = []
    half: Any = scheduler_half(d)
    real = half.after_alloc
    half.after_alloc = lambda request, *args: (order.append(request.request_id), real(request, *args))
    prompts = [prompt(150, n) for n in range(4)]  # D has room for one of them
    names = [
        d.add(ids, prefill(p, ids), max_tokens=4, priority=priority)
        for ids, priority in zip(prompts, (5, 9, 7, 0), strict=True)
    ]
    run([p, d], lambda: all(d.answers[name].finish is not None for name in names))
    assert list(dict.fromkeys(order)) == [names[number] for number in (3, 0, 2, 1)]
    assert all(d.answers[name].tokens == tokens_after(ids, 4) for name, ids in zip(names, prompts, strict=True))
    settle(p, d)


@AHEAD
def test_an_urgent_request_takes_the_blocks_of_another_on_d(group: EngineGroup, ahead: int) -> None:
    """The one that is preempted was loaded; it goes on later, prefilled by D where its blocks are gone."""
    p = group.engine(0, scheduling="priority", ahead=ahead)
    d = group.engine(1, scheduling="priority", ahead=ahead, num_blocks=FEW_BLOCKS)
    preempted = Preempted(d)
    patient = d.add(prompt(110), prefill(p, prompt(110)), max_tokens=60, priority=5)
    run([p, d], lambda: len(d.answers[patient].tokens) >= 3)
    urgent = d.add(prompt(120, 1), prefill(p, prompt(120, 1)), max_tokens=40, priority=0)
    run([p, d], lambda: d.answers[urgent].finish is not None)
    assert preempted.times[patient] and not preempted.times[urgent]
    assert d.answers[patient].finish is None
    assert d.origins[urgent].theirs == 119
    run([p, d], lambda: d.answers[patient].finish is not None)
    assert d.answers[patient].tokens == tokens_after(prompt(110), 60)
    assert d.answers[urgent].tokens == tokens_after(prompt(120, 1), 40)
    assert d.all_loads[patient] == d.all_loads[urgent] == 1
    settle(p, d)


@AHEAD
def test_an_urgent_request_takes_the_blocks_of_another_on_p(group: EngineGroup, ahead: int) -> None:
    """The patient one was prefilled already and decodes: what D gets of it was computed after that."""
    p = group.engine(0, scheduling="priority", ahead=ahead, num_blocks=FEW_BLOCKS)
    d = group.engine(1, scheduling="priority", ahead=ahead)
    preempted = Preempted(p)
    patient = p.add(prompt(130), PREFILL, max_tokens=40, priority=5)
    run([p], lambda: len(p.answers[patient].tokens) >= 3)
    urgent = p.add(prompt(120, 1), PREFILL, max_tokens=30, priority=0)
    run([p], lambda: p.answers[urgent].finish is not None)
    assert preempted.times[patient] and p.answers[patient].finish is None
    first = d.add(prompt(120, 1), p.answers[urgent].params)
    run([p, d], lambda: p.answers[patient].finish is not None)
    second = d.add(prompt(130), p.answers[patient].params)
    run([p, d], lambda: d.answers[first].finish is not None and d.answers[second].finish is not None)
    assert (d.origins[first].theirs, d.origins[second].theirs) == (119, 129)
    settle(p, d)


# --- speculative decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
@AHEAD
def test_drafts_on_both_sides(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, ahead: int, runner: str) -> None:
    """The KV of drafts that were wrong lies behind the prompt, in blocks of the lease and of the load."""
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    p, d = group.pair(drafts=3, ahead=ahead, runner=runner)
    for tokens, decoded in itertools.product((2, BLOCK - 1, BLOCK, 4 * BLOCK + 1, 250), (1, 6)):
        ids = prompt(tokens, tokens + decoded)
        on_p = p.add(ids, PREFILL, max_tokens=decoded)
        run([p], lambda on_p=on_p: p.answers[on_p].finish is not None)
        assert p.answers[on_p].tokens == tokens_after(ids, decoded)
        request_id = d.add(ids, p.answers[on_p].params, max_tokens=30)
        run([p, d], lambda request_id=request_id: d.answers[request_id].finish is not None)
        assert d.origins[request_id].theirs == tokens - 1
        assert d.answers[request_id].external == tokens - d.step_loads[request_id]
        assert d.answers[request_id].tokens == tokens_after(ids, 30)
    assert p.drafts_kept and d.drafts_kept
    settle(p, d)


@AHEAD
def test_drafts_and_preemption(group: EngineGroup, ahead: int) -> None:
    p = group.engine(0, drafts=3, ahead=ahead, num_blocks=FEW_BLOCKS)
    d = group.engine(1, drafts=3, ahead=ahead, num_blocks=FEW_BLOCKS)
    on_both = Preempted(p), Preempted(d)
    # On D any two that overlap run out of blocks, whenever the second one comes.
    hand_all_over(p, d, [prompt(60, n) for n in range(4)], on_p=40, on_d=200)
    assert all(preempted.times.total() for preempted in on_both)
    settle(p, d)


@AHEAD
def test_drafts_on_one_side_alone(group: EngineGroup, ahead: int) -> None:
    for of_p, of_d in ((3, 0), (0, 3)):
        p, d = group.engine(0, drafts=of_p, ahead=ahead), group.engine(1, drafts=of_d, ahead=ahead)
        request_id = hand_over(p, d, prompt(100), max_tokens=30)
        assert d.origins[request_id].theirs == 99
        assert d.answers[request_id].tokens == tokens_after(prompt(100), 30)
        settle(p, d)


# --- several engines for one client -----------------------------------------------------------------------------


def test_a_conversation_between_ds_with_and_without_a_hand_over(group: EngineGroup) -> None:
    """Each turn goes to another D, every second one with P's hand-over: nobody can tell."""
    p, with_one, without = group.engine(0), group.engine(1), group.engine(1)
    said = prompt(40)
    for turn in range(6):
        d, params = (with_one, prefill(p, said)) if turn % 2 == 0 else (without, None)
        request_id = d.add(said, params, max_tokens=20)
        run([p, d], lambda d=d, request_id=request_id: d.answers[request_id].finish is not None)
        assert d.answers[request_id].tokens == tokens_after(said, 20)
        assert d.all_loads[request_id] == (params is not None)
        said = said + d.answers[request_id].tokens + prompt(13, turn)
    settle(p, with_one, without)
    assert not without.all_loads


# --- data parallelism -------------------------------------------------------------------------------------------


def ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(100):
        held = [socket.socket() for _ in range(count)]
        try:
            held[0].bind(("127.0.0.1", 0))
            first: int = held[0].getsockname()[1]
            for number, other in enumerate(held[1:], 1):
                other.bind(("127.0.0.1", first + number))
        except (OSError, OverflowError):
            continue
        finally:
            for each in held:
                each.close()
        return first
    raise AssertionError("no free ports in a row")


def replicas(group: EngineGroup, origin: int, tp: int) -> list[Engine]:
    """Two data-parallel ranks of one engine, with the same settings, of which the port is one."""
    for _ in range(5):
        extra = {"side_channel_port": (first := ports(2 * tp))}
        try:
            engines = [group.engine(origin, dp_rank=rank, tp=tp, extra=extra) for rank in range(2)]
        except ConfigError:
            continue  # somebody else took one
        taken = [rank.port for engine in engines for rank in scheduler_half(engine).ranks]
        assert taken == list(range(first, first + 2 * tp))
        return engines
    raise AssertionError("no ports to be had")


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 1), (2, 1)])
def test_every_data_parallel_rank_is_an_engine_of_its_own(group: EngineGroup, p_ranks: int, d_ranks: int) -> None:
    """Each hands over its own blocks: the same block ids mean another prompt on the other rank."""
    on_p, on_d = replicas(group, 0, p_ranks), replicas(group, 1, d_ranks)
    everyone = [*on_p, *on_d]
    ids = {rank: prompt(100, rank) for rank in range(2)}
    params = {rank: prefill(p, ids[rank]) for rank, p in enumerate(on_p)}
    assert [params[rank]["remote_engine_id"].rpartition("_")[2] for rank in range(2)] == ["dp0", "dp1"]
    for rank, d in itertools.product(range(2), on_d):
        rank_params = params[rank] if d is on_d[rank] else prefill(on_p[rank], ids[rank])
        request_id = d.add(ids[rank], rank_params, max_tokens=4)
        run(everyone, lambda d=d, request_id=request_id: d.answers[request_id].finish is not None)
        assert d.origins[request_id].theirs == 99
        assert d.answers[request_id].tokens == tokens_after(ids[rank], 4)
    settle(*everyone)
    assert all(len(p.leases) == 2 for p in on_p)
