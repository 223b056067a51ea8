"""What P's scheduler half tells its ranks of a prompt before the lease: names, chunks, and what is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import Settings
from kvferry.connector.engine.lease_planner import PAUSE_SECONDS, HeldBlocks
from kvferry.connector.engine.params import RemotePrompt, prompt_digest, prompt_names, to_transfer_params
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.geometry.engine_types import BlockTable, RequestView, ScheduledTokens
from kvferry.connector.step_loads.steps_in_flight import StepsInFlight
from kvferry.connector.wire.step_plan import PeerEngine, Prefill, PrefillStop, RankAddress, StepPlan, unpack_ids

RANK = RankAddress(0, 0, "10.0.0.1", 1234, bytes(16))
IDS = list(range(100))
WANTED = {"do_remote_decode": True, "transfer_id": "tx-1"}
FULL, WINDOW = BlockTable("full", 16), BlockTable("sliding_window", 16, window=32)


def view(
    request_id: str = "cmpl-abc-0-0123abcd", params: Any = None, ids: Sequence[int] | None = IDS, computed: int = 0
) -> RequestView:
    return RequestView(request_id, params or WANTED, ids, len(IDS), computed)


DONE, BLOCKS = view(computed=100), [[1, 2, 3, 4, 5, 6, 7]]
"""The prompt once all of it is computed, and its blocks."""


def half(*tables: BlockTable, **kwargs: Any) -> SchedulerHalf:
    made = SchedulerHalf(
        Settings(), "p", tables or (FULL,), tp_size=1, pp_size=1, produces=True, consumes=True, **kwargs
    )
    made.set_ranks([RANK])
    return made


def tokens(
    start: int, count: int, ids: Sequence[int], *, fresh: bool = False, request: RequestView | None = None
) -> ScheduledTokens:
    return ScheduledTokens((request or view()).request_id, start, count, [ids], fresh)


def step(scheduler: SchedulerHalf, *scheduled: ScheduledTokens, preempted: Sequence[str] = ()) -> StepPlan:
    computed = [each.request_id for each in scheduled]
    return scheduler.take_plan(computed=computed, scheduled=scheduled, preempted=preempted)


def started(**kwargs: Any) -> tuple[SchedulerHalf, Prefill]:
    """After the step that computes the first 32 tokens of the prompt."""
    scheduler = half(**kwargs)
    scheduler.on_new_request(view())
    (prefill,) = step(scheduler, tokens(0, 32, [7, 8], fresh=True)).prefills
    return scheduler, prefill


def empty(plan: StepPlan) -> bool:
    return not (plan.wakes_thread or plan.prefill_chunks)


def chunks(plan: StepPlan) -> list[tuple[int, int, list[int], bool]]:
    return [(c.start, c.stop, unpack_ids(c.block_ids[0]).tolist(), c.restarts) for c in plan.prefill_chunks]


def test_a_prompt_is_told_with_its_first_step_and_leased_under_the_same_token() -> None:
    scheduler, request = half(), view()
    scheduler.on_new_request(request)
    (queued,) = (plan := step(scheduler)).queued
    assert not plan.prefills, "the engine has computed nothing"
    assert empty(step(scheduler)), "it is told once"
    plan = step(scheduler, tokens(16, 32, [7, 8, 9], fresh=True))
    (prefill,) = plan.prefills
    assert (queued.token, queued.names) == (prefill.token, prefill.names)
    assert prefill.names == (
        "tx-1", "cmpl-abc-0-0123abcd", "cmpl-abc-0", "abc-0", "abc", prefill.token.hex()
    )  # fmt: skip
    assert (prefill.num_tokens, prefill.digest) == (100, prompt_digest(IDS))
    assert (prefill.found, prefill.step_tokens, prefill.streams) == (16, 32, True)
    assert chunks(plan) == [(16, 48, [7, 8, 9], False)]
    plan = step(scheduler, tokens(48, 52, [4, 5, 6, 2, 3]))
    assert chunks(plan) == [(48, 100, [4, 5, 6, 2], False)], "a block behind the prompt"
    assert not plan.prefills
    assert chunks(step(scheduler, tokens(100, 1, []))) == [], "a token of the answer"
    held, params = scheduler.request_finished(DONE, [[7, 8, 9, 4, 5, 6, 2, 3]], completed=True)
    (lease,) = scheduler.take_plan().leases
    assert held and params is not None
    assert (lease.token, lease.digest, lease.params) == (prefill.token, prefill.digest, b"")
    assert unpack_ids(lease.block_ids[0]).tolist() == [7, 8, 9, 4, 5, 6, 2], "as D may have found them before the lease"
    assert msgspec.msgpack.decode(prefill.params) == params
    assert (params["transfer_mode"], params["transfer_id"], params["kvferry"]["token"]) == (
        "push", "tx-1", lease.token.hex()
    )  # fmt: skip


def aborts(scheduler: SchedulerHalf) -> StepPlan:
    scheduler.request_finished(view(), [[7, 8]], completed=False)
    return scheduler.take_plan()


def finds_tokens_invalid(scheduler: SchedulerHalf) -> StepPlan:
    return step(scheduler, tokens(0, 48, [9]))


@pytest.mark.parametrize("end", [aborts, finds_tokens_invalid])
def test_a_prompt_that_is_not_handed_over_is_told_so(end: Callable[[SchedulerHalf], StepPlan]) -> None:
    scheduler, prefill = started()
    plan = end(scheduler)
    assert plan.stops == (PrefillStop(prefill.token, ended=True),) and not plan.prefill_chunks


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_blocks_that_the_engine_takes_are_taken_back_first(told: bool) -> None:
    scheduler, prefill = started()
    lost = (PrefillStop(prefill.token, ended=False),)
    if told:
        assert step(scheduler, preempted=[view().request_id]).stops == lost
        assert empty(step(scheduler, preempted=[view().request_id])), "they are lost once"
    plan = step(scheduler, tokens(16, 16, [3, 4], fresh=True))
    assert plan.stops == (() if told else lost) and chunks(plan) == [(16, 32, [3, 4], True)]


@pytest.mark.parametrize("why", ["draining", "embeddings"])
def test_a_prompt_that_cannot_be_leased_is_told_and_given_up(why: str) -> None:
    scheduler = half()
    if why == "draining":
        scheduler.drain()
    scheduler.on_new_request(view(ids=IDS if why == "draining" else None))
    plan = step(scheduler, tokens(0, 32, [7, 8], fresh=True))
    assert ([prefill.params for prefill in plan.prefills], [stop.ended for stop in plan.stops]) == ([b""], [True])
    assert not plan.prefill_chunks and not plan.prefills[0].streams
    assert empty(step(scheduler, tokens(32, 32, [9, 10])))


def test_a_pause_that_lasts_ends_leases_and_gives_none() -> None:
    now, paused = [0.0], [True]
    scheduler = half(clock=lambda: now[0], is_paused=lambda: paused[0])

    def finish(name: str) -> bool:
        scheduler.on_new_request(view(name))
        return scheduler.request_finished(view(name, computed=100), BLOCKS, completed=True)[0]

    assert finish("one") and not scheduler.take_plan().ends_leases
    now[0] = PAUSE_SECONDS - 0.01
    assert not scheduler.take_plan().ends_leases
    now[0] = PAUSE_SECONDS
    assert scheduler.take_plan().ends_leases and not finish("two")
    paused[0] = False
    assert not scheduler.take_plan().ends_leases and finish("three")


def test_another_prompt_than_was_told_gets_another_token() -> None:
    scheduler, told = started()
    other = RequestView(view().request_id, WANTED, [9] * 100, 100, 100)
    scheduler.request_finished(other, BLOCKS, completed=True)
    plan = scheduler.take_plan()
    assert plan.stops == (PrefillStop(told.token, ended=True),)
    assert plan.leases[0].token == plan.prefills[0].token != told.token
    assert plan.leases[0].digest == prompt_digest([9] * 100)


def test_tokens_that_a_load_may_not_bring_do_not_leave_early() -> None:
    steps = StepsInFlight()
    scheduler = half(steps=steps)
    steps.scheduled(loads=True)
    names = [f"r{n}" for n in range(3)]
    for name in names:
        scheduler.on_new_request(view(name))
    plan = step(scheduler, tokens(0, 16, [1], fresh=True, request=view("r0")))
    assert [prefill.streams for prefill in plan.prefills] == [False]
    steps.processed(1.0)
    plan = step(scheduler, tokens(0, 16, [2], fresh=True, request=view("r1")))
    assert [prefill.streams for prefill in plan.prefills] == [True]
    peer = PeerEngine("q", 1, 1, 30.0, (RANK,))
    offered = to_transfer_params(RemotePrompt(b"t" * 16, 100, prompt_digest(IDS), peer)) | {"do_remote_decode": True}
    scheduler.on_new_request(view("r3", offered))
    plan = step(scheduler, tokens(0, 16, [3], fresh=True, request=view("r3")))
    assert [prefill.streams for prefill in plan.prefills] == [False]


def test_below_another_connector_nothing_streams() -> None:
    assert not started(streams=lambda: False)[1].streams


@pytest.mark.parametrize(
    ("request_id", "transfer_id", "names"),
    [
        ("chatcmpl-u-7-0123abcd", None, ("chatcmpl-u-7-0123abcd", "chatcmpl-u-7", "u-7")),
        ("cmpl-u-1-0123abcd", "t", ("t", "cmpl-u-1-0123abcd", "cmpl-u-1", "u-1")),
        ("r", 7, ("r",)),
        ("r", "a\nb", ("r",)),
        ("r", "x" * 257, ("r",)),
    ],
)
def test_names(request_id: str, transfer_id: object, names: tuple[str, ...]) -> None:
    assert prompt_names(request_id, {"transfer_id": transfer_id}, b"t" * 16) == (*names, (b"t" * 16).hex())


def test_prompts_that_were_in_no_queue_are_not_told() -> None:
    """One that is computed in the first step after its request, and one that will not be handed over."""
    scheduler = half()
    scheduler.on_new_request(view())
    assert not step(scheduler, tokens(0, 32, [7, 8], fresh=True)).queued
    scheduler.on_new_request(view("another"))
    scheduler.drain()
    assert empty(step(scheduler))


def test_how_many_blocks_leases_hold_and_for_how_long() -> None:
    now = 10.0
    held = HeldBlocks(lambda: now)
    held.begin("a", 5)
    now = 12.0
    held.begin("b", 9)
    held.begin("b", 10)
    assert (len(held), held.blocks, "a" in held) == (2, 15, True), "an id that comes again counts once"
    now = 13.0
    assert held.take_block_ms() == 5 * 2000 + 15 * 1000, "leases that have not ended count, too"
    held.end(["a", "unknown"])
    now = 14.0
    held.end(["b"])
    held.end(["b"])
    now = 100.0
    assert (len(held), held.blocks, held.take_block_ms()) == (0, 0, 10 * 1000)
    held.begin("c", 1)
    total = 0
    for part in range(1, 1001):
        now = 100.0 + part * 0.0005
        total += held.take_block_ms()
    assert abs(total - 500) <= 1, "parts of milliseconds count at the next call"
