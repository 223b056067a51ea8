"""A D that reads P's pages by itself begins when P's device has computed the prompt, before the lease that P's engine
gives with a later step. Until then the blocks are the engine's: nothing counts that was read after it took them back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.pages import computed_steps
from kvferry.connector.pages.computed_steps import NEARLY_SECONDS, ComputedStep, PromptBlocks
from kvferry.connector.prefill_side import serve
from kvferry.connector.prefill_side.lookup import Answer
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, PrefillChunk, PrefillStop, StepPlan, pack_ids
from kvferry.connector.wire.transfer_estimate import UNKNOWN
from kvferry.transport import grant_board
from kvferry.transport.grant_board import GrantBoard
from tests.handover.gates import Gate, halves
from tests.handover.prefilling import PrefillingEngine
from tests.handover.rank_group import RankGroup
from tests.handover.streamed import ELSEWHERE, OURS, STEP, THEIRS, TOKENS, all_ended, ends_well, has, make, nothing_of
from tests.handover.test_posted_grants import asked
from tests.support.inside import (
    board_of,
    early_asks,
    early_votes,
    leases_of,
    plans_of,
    prompts_of,
    replies_of,
    sends_of,
)
from tests.support.ranks import Rank, wait
from tests.support.streaming_faults import grant_stays


def warm(p: Rank, d: Rank) -> None:
    """With a link between them, so that D looks at P's board."""
    engine = PrefillingEngine([p], THEIRS, TOKENS, "first-p")
    engine.begin(step_tokens=TOKENS)
    engine.step(0, TOKENS)
    engine.load(d, OURS, "first-d")
    engine.grant()
    assert wait(lambda: p.sent == {"first-p"} and d.received == {"first-d"}, [p, d]) and not d.failed
    for rank in (p, d):
        rank.sent.clear()
        rank.received.clear()
    for cache in d.caches.values():
        cache.fill_(-1)


@pytest.fixture
def pair(group: RankGroup) -> tuple[Rank, Rank]:
    p, d = make(group, "cma")
    warm(p, d)
    return p, d


def computed(p: Rank, tokens: int = TOKENS) -> PrefillingEngine:
    """A prompt whose last step has ended, and whose engine has not looked at it."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    for start in range(0, tokens, STEP):
        engine.step(start, min(start + STEP, tokens))
    return engine


def is_posted(p: Rank, engine: PrefillingEngine) -> Callable[[], bool]:
    def posted() -> bool:
        prompt = prompts_of(p).get(engine.token)
        return prompt is not None and prompt.blocks is not None and prompt.blocks.posted is not None

    p.thread.wake()  # nobody waits for this prompt by name
    return posted


def test_d_reads_before_the_lease(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine = computed(p)
    assert wait(is_posted(p, engine))
    engine.load(d, OURS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and has(d, 0, TOKENS)
    assert wait(lambda: early_votes(p).cost > 0, [p, d]), "D has released what is not there yet"
    assert not leases_of(p)
    engine.grant()
    ends_well([p], d)
    assert not board_of(p).posted


def test_a_prompt_that_is_not_computed_to_its_end_waits(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine = computed(p, 2 * STEP)
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(p)), [p, d]) and not board_of(p).posted
    engine.plan(2 * STEP, TOKENS)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and not board_of(p).posted
    assert nothing_of(d, 0, TOKENS)
    assert halves(p)[0].answers_wait, "the end of the step wakes the transfer thread"
    engine.write(2 * STEP, TOKENS)
    engine.end()
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and not leases_of(p)
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("board", [True, False])
def test_what_d_has_asked_for_is_read_before_the_lease(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, board: bool
) -> None:
    """Without room on the board P answers D's commit."""
    p, d = pair
    if not board:
        monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    counts = asked(p)
    engine = computed(p, 2 * STEP)
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and has(d, 0, TOKENS)
    assert not leases_of(p) and counts["Ask"] == 1 and counts["Commit"] == (not board)
    known = d.worker.take_estimates().values()
    assert all((estimate == UNKNOWN) is not board for estimate in known) and known
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("again", ["preempted", "computed again", "leased", "aborted"])
def test_p_answers_no_commit_of_blocks_that_are_lost(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    p, d = pair
    monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    counts = asked(p)
    engine = computed(p, 2 * STEP)
    gate = Gate(halves(d)[1].reads, "collect", lambda now: iter(()))
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: bool(prompts_of(p)[engine.token].readers), [p])
    read = next(iter(halves(d)[1].reads.by_number.values()))
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
    assert wait(lambda: d.failed == {"req-d"}, [p, d]) and counts["Commit"] == 1
    if again in ("preempted", "computed again"):
        engine.grant()
    assert again == "aborted" or wait(lambda: p.sent == {"req-p"}, [p, d])
    assert wait(lambda: all_ended(p), [p, d])


def test_reads_that_p_grants_by_message_are_bounded(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_READERS", 0)
    p, d = pair
    engine = computed(p, 2 * STEP)
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: bool(board_of(p).posted) and bool(early_asks(p)), [p, d])
    engine.grant()
    ends_well([p], d)


def test_an_ask_for_a_prompt_that_is_taken_back_is_denied(pair: tuple[Rank, Rank]) -> None:
    """D was told that it is nearly computed, so a step of D may wait."""
    p, d = pair
    engine = computed(p, STEP)
    producer_ = halves(p)[0]
    assert wait(lambda: engine.token in prompts_of(producer_))
    engine.load(d, OURS)
    assert wait(lambda: bool(early_asks(producer_)), [p, d])
    assert producer_.named.offer(engine.token) == []
    engine.take_back(ELSEWHERE)
    assert wait(lambda: d.failed == {"req-d"}, [p, d])


@pytest.mark.parametrize("resumed", [False, True])
def test_an_ask_that_comes_after_the_blocks_were_taken_back_is_denied(
    pair: tuple[Rank, Rank], *, resumed: bool
) -> None:
    """D heard that the prompt is nearly computed, and its step asks some milliseconds later. P's engine may compute the
    prompt anew by then: the step of D would wait for all of it."""
    p, d = pair
    engine = computed(p, STEP)
    producer_ = halves(p)[0]
    assert wait(lambda: engine.token in prompts_of(producer_))
    assert producer_.named.offer(engine.token) == []
    engine.take_back(ELSEWHERE)
    if resumed:
        engine.step(0, STEP, restarts=True)
    assert wait(lambda: not plans_of(p).posted, [p])
    engine.load(d, OURS)
    assert wait(lambda: d.failed == {"req-d"}, [p, d]) and not early_asks(producer_)
    if resumed:  # D may be told again, and ask again
        engine.step(STEP, TOKENS)
        assert wait(is_posted(p, engine)) and not producer_.named.is_taken_back(engine.token)


def test_what_the_engine_has_taken_back_is_not_nearly_computed(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread takes the blocks back before the transfer thread gets the plan that says so."""
    monkeypatch.setattr(computed_steps, "NEARLY_SECONDS", 600.0)
    p, _ = pair
    producer_ = halves(p)[0]
    offered: list[bytes] = []
    monkeypatch.setattr(producer_.named, "offer", lambda token: offered.append(token) or [])
    for name, lost in (("stands", False), ("lost", True)):
        engine = PrefillingEngine([p], THEIRS, TOKENS, name)
        engine.begin(step_tokens=TOKENS)
        engine.plan(0, TOKENS)
        assert wait(lambda: bool(producer_.steps.flights), [p])
        engine.hook([0])
        stop = StepPlan(stops=(PrefillStop(engine.token, ended=False),))
        if lost:
            p.worker.take_back(stop)
        engine.hook([1])
        p.thread.wake()
        assert wait(lambda: not producer_.steps.has_news, [p])
        assert (engine.token in offered) is not lost
        engine.post(stop)
        engine.end()
        assert wait(lambda: not producer_.steps.flights, [p])


@pytest.mark.parametrize("plane", ["cma", "tcp"])
def test_a_step_that_raises_an_error_computes_nothing(group: RankGroup, plane: str) -> None:
    """vLLM's V1 model runner ends the connector's step in a ``finally``. P's engine ends some time after the error."""
    p, d = make(group, plane)
    warm(p, d)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    engine.plan(0, TOKENS)
    engine.write(0, TOKENS, [0])
    engine.hook([0])
    engine.load(d, OURS, step=TOKENS if plane == "tcp" else 0)
    producer_ = halves(p)[0]
    assert wait(lambda: bool(early_asks(producer_) or sends_of(producer_).waiting), [p, d])
    engine.fail()
    p.thread.wake()
    again = PrefillingEngine([p], ELSEWHERE, TOKENS, "again-p")  # once P has taken this plan it has seen the error
    again.begin(step_tokens=TOKENS)
    assert wait(lambda: again.token in prompts_of(producer_), [p, d])
    assert not board_of(producer_).posted and not d.received and not d.failed
    p.worker.close()
    assert wait(lambda: d.failed == {"req-d"}, [d]) and not d.received - d.failed


def test_the_lease_takes_the_posted_grant_over(pair: tuple[Rank, Rank]) -> None:
    """D may have found it: it must stand on, and fall with the lease."""
    p, _ = pair
    engine = computed(p)
    producer = halves(p)[0]
    assert wait(is_posted(p, engine))
    (place,) = board_of(producer).posted
    counter = int(board_of(producer).counters[place // 8])
    engine.grant()
    assert wait(lambda: engine.token in leases_of(producer))
    assert leases_of(producer)[engine.token].posted == place
    assert int(board_of(producer).counters[place // 8]) == counter


def test_an_error_behind_the_grant_frees_no_blocks(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """D may have found the grant: only the end of the lease gives the blocks back, once."""
    p, d = pair
    engine = computed(p)
    producer = halves(p)[0]
    assert wait(is_posted(p, engine))

    def breaks(grant: LeaseGrant) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(producer.named, "grant", breaks)
    engine.grant()
    assert wait(lambda: engine.token in leases_of(producer))
    assert wait(lambda: not plans_of(p).posted, [p, d])
    assert not p.sent and leases_of(producer)[engine.token].posted is not None
    engine.load(d, OURS)
    assert wait(lambda: p.sent == {"req-p"} and d.received == {"req-d"}, [p, d]) and not d.failed
    assert has(d, 0, TOKENS) and not leases_of(producer)


def test_an_error_with_one_computed_prompt_reaches_no_other(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    broken = PrefillingEngine([p], ELSEWHERE, TOKENS, "broken-p")
    broken.begin(step_tokens=TOKENS)
    offer = halves(p)[0].named.offer

    def breaks(token: bytes) -> list[Answer]:
        if token == broken.token:
            raise RuntimeError("planted")
        return offer(token)

    monkeypatch.setattr(halves(p)[0].named, "offer", breaks)
    chunks = [
        PrefillChunk(each.token, 0, TOKENS, (pack_ids(each.blocks),), False, 0) for each in (broken, engine)
    ]  # fmt: skip
    engine.post(StepPlan(chunks=tuple(chunks)))
    engine.write(0, TOKENS)
    engine.end()
    engine.load(d, OURS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and has(d, 0, TOKENS)


def test_a_wrong_block_of_one_prompt_costs_no_other_its_blocks(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    wrong = PrefillingEngine([p], [1 << 20], TOKENS, "wrong-p")
    wrong.begin(step_tokens=TOKENS)
    chunks = [
        PrefillChunk(each.token, 0, TOKENS, (pack_ids(each.blocks),), False, 0) for each in (wrong, engine)
    ]  # fmt: skip
    engine.post(StepPlan(chunks=tuple(chunks)))
    engine.write(0, TOKENS)
    engine.end()
    engine.load(d, OURS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and has(d, 0, TOKENS)


def test_a_lease_of_other_blocks_is_posted_anew(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine = computed(p)
    assert wait(is_posted(p, engine))
    for cache in p.caches.values():
        cache[THEIRS] = -7
    engine.blocks = list(ELSEWHERE)
    engine.write(0, TOKENS)
    engine.grant()
    # An engine that moves a prompt says so before. Here the lease alone does, so D comes after it.
    assert wait(lambda: engine.token in leases_of(p), [p])
    engine.load(d, OURS)
    ends_well([p], d)


def read_under_way(p: Rank, d: Rank) -> tuple[PrefillingEngine, Gate]:
    """D has copied the prompt before its lease, and has not looked at the grant again."""
    engine = computed(p)
    assert wait(is_posted(p, engine))
    reads = halves(d)[1].reads
    gate = Gate(reads, "collect", lambda now: iter(()))
    engine.load(d, OURS)
    assert wait(lambda: any(read.note for read in reads.by_number.values()), [d]), "it began to"
    return engine, gate


def test_what_was_read_before_a_preemption_does_not_count(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine, gate = read_under_way(p, d)
    engine.take_back(ELSEWHERE)
    gate.open()
    assert wait(lambda: d.failed == {"req-d"}, [p, d]), "D computes it"
    engine.step(0, STEP, restarts=True)
    engine.step(STEP, TOKENS)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d])


def test_what_was_read_before_an_abort_does_not_count(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine, gate = read_under_way(p, d)
    engine.take_back(ended=True)
    gate.open()
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])


def test_what_was_read_before_a_reset_does_not_count(pair: tuple[Rank, Rank]) -> None:
    """Neither before the lease, nor under a lease that comes with the reset."""
    p, d = pair
    engine, gate = read_under_way(p, d)
    lease = LeaseGrant(engine.request_id, engine.token, TOKENS, (pack_ids(engine.blocks),))
    engine.post(StepPlan(leases=(lease,), ends_leases=True))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "its blocks are the engine's"
    gate.open()
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])


def test_what_was_read_before_p_ends_does_not_count(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    _, gate = read_under_way(p, d)
    p.worker.close()
    gate.open()
    assert wait(lambda: d.failed == {"req-d"}, [d])


def test_the_engine_withdraws_while_the_transfer_thread_stands_still(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    engine, gate = read_under_way(p, d)
    thread = p.thread
    held = Gate(plans_of(thread), "run", lambda now: None)
    engine.take_back(ended=True)
    gate.open()
    assert wait(lambda: d.failed == {"req-d"}, [d])
    held.open()
    assert wait(lambda: all_ended(p), [p, d])


def test_without_the_withdrawal_wrong_bytes_arrive(pair: tuple[Rank, Rank]) -> None:
    """The planted fault: the tests above would see it."""
    p, d = pair
    with grant_stays():
        engine = computed(p)
        assert wait(is_posted(p, engine))
        engine.take_back(ELSEWHERE)
        engine.load(d, OURS)
        assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed and not has(d, 0, TOKENS)


def test_blocks_that_are_lost_get_no_grant() -> None:
    board, blocks = GrantBoard(), PromptBlocks()
    blocks.lose()
    assert not blocks.post(board, bytes(16), b"text") and not board.posted
    blocks = PromptBlocks()
    assert blocks.post(board, bytes(16), b"text") and board.posted
    blocks.lose()
    blocks.lose()
    assert blocks.lost and not board.posted and blocks.take_posted(b"text") is None
    board.close()


def test_a_step_nearly_ends_when_little_time_is_left() -> None:
    now, said = [0.0], list[tuple[bool, int]]()
    step = ComputedStep((), 8, lambda: None, lambda: said.append((step.nearly, step.computed)), lambda: now[0])
    for layers in range(1, 8):
        step.has_computed(layers)
        now[0] += NEARLY_SECONDS / 2.5
    assert said == [(True, 6)], "two layers are left, and half of the time of a third"
    step.has_ended()
    assert said == [(True, 6), (True, 7)]


@pytest.mark.parametrize("nearly", [False, True])
def test_a_d_that_waits_by_name_hears_of_the_end_at_once(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, nearly: bool
) -> None:
    monkeypatch.setattr(computed_steps, "NEARLY_SECONDS", 600.0 if nearly else -1.0)
    p, _ = pair
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    ours, answers = halves(p)[0], list[messages.Reply]()
    replies_of(ours).send = lambda identity, message: answers.append(message)
    ask = messages.Resolve(number=1, name=engine.request_id, until="granted")
    ours.answer(ours.named.resolve(b"d", ask, 0.0))
    engine.plan(0, STEP)
    engine.hook(range(len(p.layers)))
    engine.end()
    engine.plan(STEP, TOKENS)
    engine.hook([0])
    assert wait(lambda: not plans_of(p).posted, [p]) and not answers
    engine.hook([1])
    assert nearly or (wait(lambda: not ours.steps.has_news, [p]) and not answers)
    if not nearly:
        engine.end()
    assert wait(lambda: bool(answers)), "no step of the engine has followed"
    assert isinstance(answers[0], messages.Resolved) and answers[0].granted
    engine.take_back(ELSEWHERE)
    assert wait(lambda: not plans_of(p).posted, [p])
    assert not ours.named.resolve(b"d", ask, 0.0), "the next one waits again"
    lease = LeaseGrant(engine.request_id, engine.token, TOKENS, (pack_ids(ELSEWHERE),))
    engine.post(StepPlan(leases=(lease,)))
    assert wait(lambda: len(answers) == 2, [p])
    assert isinstance(answers[1], messages.Resolved) and answers[1].granted
