"""A D that reads P's pages by itself begins when P's device has computed the prompt, before the lease that P's engine
gives with a later step. Until then the blocks are the engine's: nothing counts that was read after it took them back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.connector.pages import computed_steps
from kvferry.connector.pages.computed_steps import NEARLY_SECONDS, ComputedStep, PromptBlocks
from kvferry.connector.prefill_side import serve
from kvferry.connector.prefill_side.prompts import Prompt
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, PrefillChunk, PrefillStop, StepPlan, pack_ids
from kvferry.connector.wire.transfer_estimate import UNKNOWN
from kvferry.transport import grant_board
from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import OURS, THEIRS, TOKENS, Gate, Pair, RankGroup, breaks, forget, wipe
from tests.handover.streamed import ELSEWHERE, STEP, all_ended, ends_well, has, make, nothing_of
from tests.handover.test_leases import asked
from tests.support.inside import board_of, early_asks, early_releases, leases_of, plans_of, prompts_of
from tests.support.ranks import Rank, wait


def warm(p: Rank, d: Rank) -> Pair:
    """With a link between them, so that D looks at P's board."""
    engine = PrefillingEngine([p], THEIRS, TOKENS, "first-p")
    engine.begin(step_tokens=TOKENS)
    engine.load(d, OURS, "first-d")
    engine.finish()
    assert wait(lambda: p.sent == {"first-p"} and d.received == {"first-d"}, [p, d]) and not d.failed
    forget(p, d)
    wipe(d, -1)
    return p, d


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return warm(*make(group, "cma"))


def computed(p: Rank, tokens: int = TOKENS) -> PrefillingEngine:
    """A prompt whose last step has ended, and whose engine has not looked at it."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    for start in range(0, tokens, STEP):
        engine.step(start, min(start + STEP, tokens))
    return engine


def posted(p: Rank) -> PrefillingEngine:
    """Such a prompt whose grant P has posted."""
    engine = computed(p)
    await_post(p, engine)
    return engine


def await_post(p: Rank, engine: PrefillingEngine) -> None:
    p.thread.wake()  # nobody waits for this prompt by name
    assert wait(lambda: bool((found := prompts_of(p).get(engine.token)) and found.blocks and found.blocks.posted))


def asked_for(p: Rank, d: Rank) -> PrefillingEngine:
    """A prompt whose last step is not planned, for which D asks."""
    engine = computed(p, 2 * STEP)
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    return engine


def loaded(p: Rank, d: Rank) -> bool:
    return wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and has(d, 0, TOKENS)


def failed(p: Rank, d: Rank) -> bool:
    return wait(lambda: d.failed == {"req-d"}, [p, d])


def test_d_reads_before_the_lease(p: Rank, d: Rank) -> None:
    engine = posted(p)
    engine.load(d, OURS)
    assert loaded(p, d)
    assert wait(lambda: bool(early_releases(p)), [p, d]), "D has released what is not there yet"
    assert not leases_of(p)
    engine.grant()
    ends_well([p], d)
    assert not board_of(p).posted


@pytest.mark.parametrize("board", [True, False])
def test_a_prompt_that_is_not_computed_to_its_end_waits(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, board: bool
) -> None:
    """Without room on the board P answers D's commit."""
    if not board:
        monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    counts, engine = asked(p), asked_for(p, d)
    engine.plan(2 * STEP, TOKENS)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and not board_of(p).posted
    assert nothing_of(d, 0, TOKENS)
    assert p.producer.answers_wait, "the end of the step wakes the transfer thread"
    engine.write(2 * STEP, TOKENS)
    engine.end()
    assert loaded(p, d)
    assert not leases_of(p) and counts["Ask"] == 1 and counts["Commit"] == (not board)
    known = d.worker.take_estimates().values()
    assert all((estimate == UNKNOWN) is not board for estimate in known) and known
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("again", ["preempted", "computed again", "leased", "aborted"])
def test_p_answers_no_commit_of_blocks_that_are_lost(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    gate = Gate(d.consumer.reads, "collect", lambda now: iter(()))
    counts, engine = asked(p), asked_for(p, d)
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: bool(prompts_of(p)[engine.token].readers), [p])
    read = next(iter(d.consumer.reads.by_number.values()))
    assert wait(lambda: not read.awaits_grant, [d])
    engine.take_back(ELSEWHERE, ended=again == "aborted")
    if again in ("computed again", "leased"):
        engine.step(0, STEP, restarts=True)
        engine.step(STEP, TOKENS)
    if again == "leased":
        engine.grant()
        assert wait(lambda: engine.token in leases_of(p), [p])
    assert wait(lambda: not plans_of(p).posted, [p])
    gate.open()
    assert failed(p, d) and counts["Commit"] == 1
    if again in ("preempted", "computed again"):
        engine.grant()
    assert again == "aborted" or wait(lambda: p.sent == {"req-p"}, [p, d])
    assert wait(lambda: all_ended(p), [p, d])


def test_reads_that_p_grants_by_message_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_READERS", 0)
    p, d = pair
    engine = asked_for(p, d)
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: bool(board_of(p).posted) and bool(early_asks(p)), [p, d])
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("asks", ["before", "after", "once it is computed anew"])
def test_an_ask_for_a_prompt_that_is_taken_back_is_denied(p: Rank, d: Rank, asks: str) -> None:
    """D was told that it is nearly computed, so a step of D may wait: it would wait for all of the prompt."""
    engine = computed(p, STEP)
    assert wait(lambda: bool((found := prompts_of(p).get(engine.token)) and found.blocks))
    if asks == "before":
        engine.load(d, OURS)
        assert wait(lambda: bool(early_asks(p)), [p, d])
    p.producer.offer(prompts_of(p)[engine.token], 0.0)
    engine.take_back(ELSEWHERE)
    if asks == "once it is computed anew":
        engine.step(0, STEP, restarts=True)
    if asks != "before":
        assert wait(lambda: not plans_of(p).posted, [p])
        engine.load(d, OURS)
    assert failed(p, d) and not early_asks(p)
    if asks == "once it is computed anew":  # D may be told again, and ask again
        engine.step(STEP, TOKENS)
        await_post(p, engine)
        assert wait(lambda: not prompts_of(p)[engine.token].taken_back, [p])


def test_a_commit_of_what_nobody_was_granted_is_refused(group: RankGroup, p: Rank, d: Rank) -> None:
    engine, raw = computed(p, STEP), group.raw(p, d, attached=False)
    assert wait(lambda: engine.token in prompts_of(p))
    prompts_of(p)[engine.token].readers[b"another D", 1] = PromptBlocks()
    raw.greet()
    raw.send(messages.Commit(read=1, token=engine.token))
    assert not raw.answer(messages.Committed).ok


def test_what_the_engine_has_taken_back_is_not_nearly_computed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread takes the blocks back before the transfer thread gets the plan that says so."""
    monkeypatch.setattr(computed_steps, "NEARLY_SECONDS", 600.0)
    p, _ = pair
    offered: list[bytes] = []
    monkeypatch.setattr(p.producer, "offer", lambda prompt, now: offered.append(prompt.token))
    for name, lost in (("stands", False), ("lost", True)):
        engine = PrefillingEngine([p], THEIRS, TOKENS, name)
        engine.begin(step_tokens=TOKENS)
        engine.plan(0, TOKENS)
        assert wait(lambda: bool(p.producer.steps.flights), [p])
        engine.hook([0])
        stop = StepPlan(stops=(PrefillStop(engine.token, ended=False),))
        if lost:
            p.worker.take_back(stop)
        engine.hook([1])
        p.thread.wake()
        assert wait(lambda: not p.producer.steps.has_news, [p])
        assert lost or wait(lambda engine=engine: engine.token in offered, [p])
        engine.post(stop)
        engine.end()
        assert wait(lambda: not p.producer.steps.flights, [p])
        assert not (lost and engine.token in offered)


def test_the_lease_takes_the_posted_grant_over(p: Rank) -> None:
    """D may have found it: it must stand on, and fall with the lease."""
    engine = posted(p)
    (place,) = board_of(p).posted
    counter = int(board_of(p).counters[place // 8])
    engine.grant()
    assert wait(lambda: engine.token in leases_of(p))
    assert leases_of(p)[engine.token].blocks.posted[1] == place and int(board_of(p).counters[place // 8]) == counter


def test_an_error_behind_the_grant_frees_no_blocks(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """D may have found the grant: only the end of the lease gives the blocks back, once."""
    engine = posted(p)
    monkeypatch.setattr(p.producer, "serve_waiting", breaks)
    engine.grant()
    assert wait(lambda: engine.token in leases_of(p))
    assert wait(lambda: not plans_of(p).posted, [p, d])
    assert not p.sent and leases_of(p)[engine.token].blocks.posted
    engine.load(d, OURS)
    ends_well([p], d)


@pytest.mark.parametrize("fault", ["a wrong block", "an error"])
def test_a_fault_of_one_prompt_reaches_no_other(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    other = PrefillingEngine([p], [1 << 20] if fault == "a wrong block" else ELSEWHERE, TOKENS, "other-p")
    for each in (engine, other):
        each.begin(step_tokens=TOKENS)
    offer = p.producer.offer

    def breaks_once(prompt: Prompt, now: float) -> None:
        breaks() if prompt.token == other.token else offer(prompt, now)

    monkeypatch.setattr(p.producer, "offer", breaks_once)
    chunks = (PrefillChunk(each.token, 0, TOKENS, (pack_ids(each.blocks),), False, 0) for each in (other, engine))
    engine.post(StepPlan(prefill_chunks=tuple(chunks)))
    engine.write(0, TOKENS)
    engine.end()
    engine.load(d, OURS)
    assert loaded(p, d)


def test_a_lease_of_other_blocks_is_posted_anew(p: Rank, d: Rank) -> None:
    engine = posted(p)
    for cache in p.caches.values():
        cache[THEIRS] = -7
    engine.blocks = list(ELSEWHERE)
    engine.write(0, TOKENS)
    engine.grant()
    # An engine that moves a prompt says so before. Here the lease alone does, so D comes after it.
    assert wait(lambda: engine.token in leases_of(p), [p])
    engine.load(d, OURS)
    ends_well([p], d)


@pytest.fixture
def under_way(pair: Pair) -> Iterator[tuple[PrefillingEngine, Gate]]:
    """D has copied the prompt before its lease, and has not looked at the grant again. What it read then does not
    count."""
    p, d = pair
    engine = posted(p)
    reads = d.consumer.reads
    gate = Gate(reads, "collect", lambda now: iter(()))
    engine.load(d, OURS)
    assert wait(lambda: any(read.note for read in list(reads.by_number.values())), [d]), "it began to"
    yield engine, gate
    assert d.failed == {"req-d"}


@pytest.mark.parametrize("how", ["preempted", "aborted", "aborted beside a thread that stands still", "ended"])
def test_what_was_read_before_its_blocks_were_taken_back_does_not_count(
    pair: Pair, under_way: tuple[PrefillingEngine, Gate], how: str
) -> None:
    """The engine withdraws the grant itself: P's transfer thread may stand still."""
    (p, d), (engine, gate) = pair, under_way
    held = Gate(plans_of(p), "run", lambda now: None) if "still" in how else None
    if how == "ended":
        p.worker.close()
    else:
        engine.take_back(ELSEWHERE if how == "preempted" else None, ended=how != "preempted")
    gate.open()
    assert failed(d, d) if held or how == "ended" else failed(p, d)
    if held is not None:
        held.open()
    if how == "preempted":
        engine.step(0, STEP, restarts=True)
        engine.finish(STEP)
        assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert how == "ended" or wait(lambda: all_ended(p), [p, d])


def test_what_was_read_before_a_reset_does_not_count(pair: Pair, under_way: tuple[PrefillingEngine, Gate]) -> None:
    """Neither before the lease, nor under a lease that comes with the reset."""
    (p, d), (engine, gate) = pair, under_way
    lease = LeaseGrant(engine.request_id, engine.token, TOKENS, (pack_ids(engine.blocks),))
    engine.post(StepPlan(leases=(lease,), ends_leases=True))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "its blocks are the engine's"
    gate.open()
    assert failed(p, d) and wait(lambda: all_ended(p), [p, d])


def test_a_step_nearly_ends_when_little_time_is_left() -> None:
    now, said = [0.0], list[tuple[bool, int]]()
    step = ComputedStep((), 8, lambda: None, lambda: said.append((step.nearly, step.computed)), lambda: now[0])
    for layers in range(1, 8):
        step.has_computed(layers)
        now[0] += NEARLY_SECONDS / 2.5
    assert said == [(True, 6)], "two layers are left, and half of the time of a third"
    step.has_ended()
    assert said == [(True, 6), (True, 7)]
