"""Prompts that P's engine computes while their bytes leave: what has left when, and that no wrong byte ever counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.protocol.step_plan import StepPlan
from kvferry.connector.transfer.sender import PackedChunk
from tests.handover.gates import PATIENT, halves
from tests.handover.prefilling import PrefillingEngine
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import SlowCopies, install
from tests.support.ranks import Rank, left_in_tables, let_time_pass, wait
from tests.transport.plane_list import PUSH, host_planes

TOKENS, STEP = 100, 40
THEIRS, OURS = [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
ELSEWHERE = [20, 21, 24, 22, 28, 27, 30]
PLANES = [*host_planes(PUSH), "tcp in pieces", "tcp with checksums"]


def make(
    group: RankGroup, plane: str = "shm", content: int = 16, transfer_timeout_seconds: float = 600.0, **options: object
) -> tuple[Rank, Rank]:
    settings = Settings(
        plane=plane.split(maxsplit=1)[0],
        slot_bytes=1 << 20,
        staging_bytes=8 << 20,
        checksum="checksums" in plane,
        **PATIENT | {"transfer_timeout_seconds": transfer_timeout_seconds},
    )
    content = 64 if "pieces" in plane or "checksums" in plane else content
    p = group.rank(settings=settings, content=content, engine_id="engine-p")
    d = group.rank(settings=settings, content=content, engine_id="engine-d", **options)
    return p, d


def has(d: Rank, start: int, stop: int, blocks: Sequence[int] = OURS, layers: slice = slice(None)) -> bool:
    return torch.equal(d.read(blocks, TOKENS)[layers, :, start:stop], d.wanted(TOKENS)[layers, :, start:stop])


def nothing_of(d: Rank, start: int, stop: int, layers: slice = slice(None)) -> bool:
    return bool((d.read(OURS, TOKENS)[layers, :, start:stop] == -1).all())


def ends_well(p: Sequence[Rank], *ds: Rank) -> None:
    """D has the prompt, and P's lease has ended."""
    assert wait(lambda: all(d.received == {"req-d"} for d in ds), [*p, *ds])
    assert not any(d.failed for d in ds) and all(has(d, 0, TOKENS) for d in ds)
    assert wait(lambda: all(rank.sent == {"req-p"} for rank in p), [*p, *ds])
    for rank in p:
        assert wait(lambda rank=rank: all_ended(rank), [*p, *ds])


def all_ended(p: Rank) -> bool:
    producer = halves(p)[0]
    left = left_in_tables(p)
    del left["links"]
    return not (
        any(left.values()) or producer.computing.prompts or producer._sender.waiting or producer.computing.steps
    )


@pytest.mark.parametrize("plane", PLANES)
def test_each_step_leaves_before_the_next_one_is_computed(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.plan(start, stop)
        engine.write(start, stop)
        engine.end()
        assert wait(lambda stop=stop: has(d, 0, stop), [p, d]), "the step's bytes arrive before the next step"
        assert nothing_of(d, stop, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]), "D needs no lease: P itself has sent the bytes"
    engine.grant()
    ends_well([p], d)
    assert d.plane == plane.split(maxsplit=1)[0]


def test_the_layers_of_a_step_leave_one_after_the_other(group: RankGroup) -> None:
    p, d = make(group, content=1024)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    engine.load(d, OURS, step=TOKENS)
    engine.plan(0, TOKENS)
    for layer in range(len(p.layers)):
        engine.write(0, TOKENS, [layer])
        engine.hook([layer])
        assert wait(lambda layer=layer: has(d, 0, TOKENS, layers=slice(layer + 1)), [p, d])
        assert nothing_of(d, 0, TOKENS, slice(layer + 1, None))
    engine.end()
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("hooked", [(3, 1), (0, 0, 2), (), (1,)])
def test_layers_that_come_in_another_order_or_not_at_all(group: RankGroup, hooked: tuple[int, ...]) -> None:
    """Chunks leave in order, so a layer that is early waits, and one without a hook is ready at the end of the step."""
    p, d = make(group, content=1024)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    engine.load(d, OURS, step=TOKENS)
    engine.plan(0, TOKENS)
    engine.write(0, TOKENS, hooked)
    engine.hook(hooked)
    first = 0 in hooked
    assert wait(lambda: bool(halves(p)[0]._sender.waiting), [p, d])
    assert wait(lambda: has(d, 0, TOKENS, layers=slice(int(first))), [p, d]) and nothing_of(
        d, 0, TOKENS, slice(1, None)
    )
    engine.write(0, TOKENS)
    engine.end()
    engine.grant()
    ends_well([p], d)


def test_tokens_found_in_the_prefix_cache_leave_before_the_first_step_ends(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.write(0, 48)
    engine.begin(found=48, step_tokens=STEP)
    engine.load(d, OURS, found=48, step=STEP)
    engine.plan(48, 88)
    assert wait(lambda: has(d, 0, 48), [p, d]) and nothing_of(d, 48, TOKENS)
    engine.write(48, 88)
    engine.end()
    engine.step(88, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_an_ask_that_precedes_the_first_step(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.load(d, OURS, step=STEP)
    assert wait(lambda: bool(halves(p)[0]._early.asks), [p, d])
    engine.begin(step_tokens=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.step(STEP, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_steps_that_differ_from_d_s_windows(group: RankGroup) -> None:
    """P's steps are shorter beside other requests, and D's window is ready when all of its tokens are."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    for start, stop in ((0, 7), (7, 39), (39, 55), (55, 99)):
        engine.step(start, stop)
        ready = stop // STEP * STEP
        assert wait(lambda ready=ready: has(d, 0, ready), [p, d]) and nothing_of(d, ready, TOKENS)
    engine.step(99, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_the_lease_begins_while_bytes_are_left(group: RankGroup) -> None:
    """P's lease comes before the transfer thread has sent all: the read goes on under the lease."""
    p, d = make(group, "tcp in pieces")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._sender.waiting), [p, d])
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("plane", PLANES)
def test_a_preempted_prompt_goes_on_from_other_blocks(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.plan(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.end()  # of the step that was under way: it says nothing about the new blocks
    engine.plan(0, STEP, restarts=True)
    assert wait(lambda: not p.worker._transfer_thread._commands, [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.write(0, STEP)
    engine.end()
    engine.step(STEP, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_a_prompt_that_is_preempted_until_its_lease(group: RankGroup) -> None:
    """Without a chunk that restarts, the lease names the blocks."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.take_back(ELSEWHERE)
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[SlowCopies]:
    return install(monkeypatch)


def preempt_under_a_copy(p: Rank, d: Rank, slow: SlowCopies) -> PrefillingEngine:
    """A copy out of P's blocks is under way when the engine takes them back, and reads what others wrote there."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, STEP)
    assert wait(lambda: bool(halves(p)[0]._sender.waiting), [p, d])
    engine.write(0, STEP)
    slow.gate.clear()
    engine.end()
    assert wait(lambda: slow.running > 0, [p, d])
    engine.take_back(ELSEWHERE)
    slow.gate.set()
    assert wait(lambda: not slow.running, [p, d])
    engine.step(0, STEP, restarts=True)
    engine.step(STEP, TOKENS)
    engine.grant()
    return engine


@pytest.mark.parametrize("plane", host_planes(PUSH))
def test_no_byte_of_a_copy_counts_that_ends_after_its_blocks_are_lost(
    group: RankGroup, copies: list[SlowCopies], plane: str
) -> None:
    p, d = make(group, plane)
    preempt_under_a_copy(p, d, copies[0])
    ends_well([p], d)


def test_without_the_look_at_the_blocks_wrong_bytes_arrive(
    group: RankGroup, copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the test above would see it."""
    monkeypatch.setattr(PackedChunk, "lost", property(lambda packed: False))
    p, d = make(group)
    preempt_under_a_copy(p, d, copies[0])
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed
    assert not has(d, 0, STEP) and has(d, STEP, TOKENS)


def test_an_abort_under_a_copy(group: RankGroup, copies: list[SlowCopies]) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, STEP)
    assert wait(lambda: bool(halves(p)[0]._sender.waiting), [p, d])
    engine.write(0, STEP)
    copies[0].gate.clear()
    engine.end()
    assert wait(lambda: copies[0].running > 0, [p, d])
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"}, [p, d]), "D need not wait for the copy"
    copies[0].gate.set()
    assert wait(lambda: all_ended(p), [p, d])
    assert nothing_of(d, 0, TOKENS)


@pytest.mark.parametrize("when", ["before the first step", "while a step runs", "after a step", "after a preemption"])
def test_p_gives_the_prompt_up(group: RankGroup, when: str) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    sender = halves(p)[0]._sender
    if when == "before the first step":
        assert wait(lambda: bool(sender.waiting), [p, d])
    else:
        engine.step(0, STEP)
        assert wait(lambda: has(d, 0, STEP), [p, d])
        if when == "while a step runs":
            engine.plan(STEP, TOKENS)
        elif when == "after a preemption":
            engine.take_back(ELSEWHERE)
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])
    engine.load(d, OURS, "late-d", step=STEP)
    assert wait(lambda: "late-d" in d.failed, [p, d]), "who asks later is refused at once"
    assert not p.sent


def test_asks_that_are_held_are_refused_with_the_prompt(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.load(d, OURS, step=STEP)
    assert wait(lambda: bool(halves(p)[0]._early.asks), [p, d])
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])


def test_d_cancels_while_p_computes(group: RankGroup) -> None:
    """D's release comes before the lease, and counts when the lease begins."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    for cache in d.caches.values():
        cache.fill_(-1)
    producer = halves(p)[0]
    assert wait(lambda: bool(producer._early.votes) and not producer._sender.waiting, [p, d])
    let_time_pass(p, 10_000)  # the vote is kept for as long as P computes
    engine.step(STEP, TOKENS)
    assert nothing_of(d, 0, TOKENS)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d])
    assert nothing_of(d, 0, TOKENS)


def test_a_d_that_is_gone_lets_the_lease_expire(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    keeper = halves(d)[1]._lease_keeper  # D says nothing, as when its process is killed
    keeper.release = keeper.close_all = lambda *arguments: None
    d.close()
    engine.step(STEP, TOKENS)
    engine.grant()
    assert wait(lambda: token_is_leased(p, engine), [p])
    let_time_pass(p, 10_000)
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p])


def token_is_leased(p: Rank, engine: PrefillingEngine) -> bool:
    return engine.token in halves(p)[0]._leases


def test_p_ends_while_it_computes(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    p.close()
    assert wait(lambda: d.failed == {"req-d"}, [d])
    assert nothing_of(d, STEP, TOKENS)


def test_two_ds_read_one_prompt_while_it_is_computed(group: RankGroup) -> None:
    p, d = make(group)
    other = group.rank(settings=d.settings, engine_id="engine-other")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    engine.load(other, OURS)
    assert wait(lambda: has(d, 0, STEP), [p, d, other])
    assert wait(lambda: len(halves(p)[0]._sender.waiting.get(engine.token, ())) == 2, [p, d, other])
    engine.step(STEP, TOKENS)
    assert wait(lambda: d.received == other.received == {"req-d"}, [p, d, other]) and not (d.failed or other.failed)
    assert has(other, 0, TOKENS)
    engine.grant()
    ends_well([p], d, other)


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (2, 3)])
def test_other_numbers_of_ranks(group: RankGroup, theirs: int, ours: int) -> None:
    settings = Settings(plane="shm", **PATIENT)
    ps = [group.rank(engine_id="engine-p", tp_rank=n, tp_size=theirs, total_heads=6, settings=settings)
          for n in range(theirs)]  # fmt: skip
    ds = [group.rank(engine_id="engine-d", tp_rank=n, tp_size=ours, total_heads=6, settings=settings)
          for n in range(ours)]  # fmt: skip
    engine = PrefillingEngine(ps, THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    for d in ds:
        engine.load(d, OURS, step=STEP)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.step(start, stop)
        assert wait(lambda stop=stop: all(has(d, 0, stop) for d in ds), [*ps, *ds])
        assert all(nothing_of(d, stop, TOKENS) for d in ds)
    engine.grant()
    ends_well(ps, *ds)


@pytest.mark.parametrize(("block_size", "layout"), [(8, "HND"), (32, "NHD"), (16, "NHD")])
def test_other_blocks_and_layouts(group: RankGroup, block_size: int, layout: str) -> None:
    p, d = make(group, "tcp", block_size=block_size, layout=layout, blocks=40)
    ours = list(range(3, 3 + -(-TOKENS // block_size)))[::-1]
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, ours, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP, ours), [p, d])
    engine.step(STEP, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and has(d, 0, TOKENS, ours)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.failed


def test_a_d_that_reads_p_s_pages_by_itself_waits_for_the_lease(group: RankGroup) -> None:
    p, d = make(group, "cma")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._early.asks), [p, d]) and nothing_of(d, 0, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_p_says_that_it_lives_while_it_computes(group: RankGroup) -> None:
    """D's deadline begins anew with each repeated grant, and ends a read of which it hears nothing."""
    p, d = make(group, transfer_timeout_seconds=60.0)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    (active,) = wait_for_reads(p, d)
    for turn in range(1, 4):
        before = active.lifetime.state.deadline
        let_time_pass(d, 50 * turn)
        let_time_pass(p, 3 * turn)
        assert wait(lambda before=before: active.lifetime.state.deadline > before + 40, [p, d])
    assert not d.failed
    let_time_pass(d, 250)
    assert wait(lambda: active.attempts is not None, [p, d]), "after a silence D begins anew"


def wait_for_reads(p: Rank, d: Rank) -> list[object]:
    assert wait(lambda: bool(halves(p)[0]._sender.waiting), [p, d])
    return list(halves(d)[1]._active_loads)


def test_a_read_that_waits_takes_no_turn(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    wait_for_reads(p, d)
    producer = halves(p)[0]
    turns, pumped, real, pump = [], [], producer._sender.turn, producer.pump
    monkeypatch.setattr(producer._sender, "turn", lambda now: turns.append(now) or real(now))
    monkeypatch.setattr(producer, "pump", lambda now: pumped.append(now) or pump(now))
    assert wait(lambda: len(pumped) > 20, [p, d]) and not turns
    engine.step(0, TOKENS)
    engine.grant()
    ends_well([p], d)
    assert turns


def test_blocks_that_do_not_exist_are_not_read(group: RankGroup) -> None:
    """An error of the engine: its later chunks do not say which tokens lie where, and the lease does."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    right, engine.blocks = engine.blocks, [*THEIRS[:3], 99, 98, *THEIRS[5:]]
    engine.plan(STEP, 2 * STEP)
    engine.end()
    engine.blocks = right
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: not p.worker._transfer_thread._commands, [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_a_step_that_ends_after_its_blocks_are_lost_says_nothing_of_the_new_ones(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is behind its engine: the prompt begins anew before the step of the lost blocks has ended."""
    p, d = make(group)
    device: list[Callable[[], None]] = []
    monkeypatch.setattr(p.worker.rank_context.caches.copies, "after_engine", device.append)

    def reach(count: int) -> None:
        for _ in range(count):
            device.pop(0)()

    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    reach(2)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.step(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.plan(0, 2 * STEP, restarts=True)
    reach(2)
    assert wait(lambda: len(halves(p)[0].computing.steps) == 1, [p, d]), "the step of the lost blocks has ended"
    assert not wait(lambda: not nothing_of(d, STEP, TOKENS), [p, d], seconds=0.2)
    engine.write(0, 2 * STEP)
    engine.end()
    reach(2)
    assert wait(lambda: has(d, 0, 2 * STEP), [p, d])
    engine.step(2 * STEP, TOKENS)
    engine.grant()
    reach(2)
    ends_well([p], d)
