"""A load and its reads: one end, none while something may write or after the deadline; attempts; each reported once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import consumer
from kvferry.connector.decode_side import load as loads
from kvferry.connector.decode_side import read as reads
from kvferry.connector.decode_side.consumer import Consumer
from kvferry.connector.decode_side.fetch import (
    ATTEMPTS_PER_PEER,
    SAME_PEER_SECONDS,
    FetchState,
    PageWrite,
    RankRead,
    ReadPhase,
)
from kvferry.connector.decode_side.link import Blame, LinkPhase, Reason
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.geometry.spans import Span
from kvferry.connector.geometry.token_sharding import ALL_TOKENS
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoads
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FAILURE_KINDS
from kvferry.connector.wire.step_plan import LOST, LeaseGrant, Load, LoadEnd, PeerEngine, RankAddress, RemoteLease
from kvferry.transport.channels import Copy, Received, RecvChannel
from tests.support.ranks import Timed

STATE, PHASE = FetchState, ReadPhase
END = 100.0
SETTINGS = Timed(handshake_timeout_seconds=10, transfer_timeout_seconds=30, handover_timeout_seconds=END)
WHOLE = PlannedSpan(Span(0, 0, 32, 0, 8, 0, 4096), 0, 0, 0)
P = PeerEngine("p", 1, 1, 30.0, tuple(RankAddress(rank, 0, "host", rank, b"") for rank in range(2)))


def load(request_id: str, *, now: bool = False, peers: int = 1) -> Load:
    others = (RemoteLease(b"u" * 16, P),) * (peers - 1)
    return Load(request_id, b"t" * 16, P, (b"",), ((0, 1),), now=now, alternatives=others)


class Rank:
    """D's half of a transfer thread with one load, whose links, copies and time are the test's. Of each P rank D
    fetches two chunks, or by one copy if it ``pulls``."""

    def __init__(
        self, peers: int = 1, planes: int = 1, sources: int = 2, *, inside: bool = False, pulls: bool = False,
        drafts: bool = False,
    ) -> None:  # fmt: skip
        self.now, self.pulls, self.links, self.copies, self.dialed = 0.0, pulls, dict[int, Any](), list[Copy](), 0
        self.writing, self.reports, self.releases = set[Copy](), list[LoadEnd](), 0
        regions = (SimpleNamespace(draft="layer"),) * drafts
        caches = Mock(geometry=SimpleNamespace(regions=regions), cut=lambda *_, **__: [None] * 2, unpack=self.copy)
        self.synchronize = caches.copies.synchronize
        caches.nbytes, caches.in_pieces = lambda box: 1, lambda box: False
        context = Mock(caches=caches, settings=SETTINGS, clock=lambda: self.now, planes=[None] * planes)
        links: Any = Mock(get=self.dial, source_addresses=lambda peer: P.ranks[:sources])
        links.to_serve = lambda **_: list(self.links.values())
        renewals = Mock(release=self.released, kept={}, expected=lambda *_: (0,), decode_engine=bytes(16), rank=0)
        with patch.multiple(consumer, Links=lambda _: links, LeaseRenewals=lambda *_: renewals, Lookups=Mock()):
            self.it = Consumer(context, Mock(finished=self.finished))
        (self.posted,) = StepLoads().post([load("r", now=inside, peers=peers)])
        self.it.loads.begin(self.posted, 0.0)
        (self.fetch,) = self.it.loads.running

    def dial(self, address: RankAddress, now: float, redial: bool = False) -> Any:
        link = self.links.get(address.port)
        if link is None or (redial and link.phase is LinkPhase.FAILED):
            self.dialed += address.port == 0
            channel = Mock(pulls=self.pulls, few_bytes=1, read=self.copy)
            link = self.links[address.port] = Mock(
                phase=LinkPhase.GREETING, handled_phase=LinkPhase.GREETING, channel=channel, pulls=self.pulls,
                board=None, pages=[None], users=0, slot_bytes=1, converted=(), arrived=[], replies=[],
                plane=SimpleNamespace(name="plane"),
            )  # fmt: skip
            link.theirs.regions = [None]
            link.serve = lambda now: [link.replies.pop(0) for _ in range(len(link.replies))]
            channel.poll = lambda: [link.arrived.pop(0) for _ in range(len(link.arrived))]
            link.lose_plane = lambda why: self.fails(link, Reason("peer_lost", why, "plane"))
        return link

    @staticmethod
    def fails(link: Any, reason: Reason) -> None:
        link.phase, link.failure = LinkPhase.FAILED, reason

    def copy(self, *_: object, **__: object) -> Copy:
        self.copies.append(Copy())
        self.writing.add(self.copies[-1])
        return self.copies[-1]

    def finished(self, posted: StepLoad, end: LoadEnd, *_: object) -> None:
        assert not self.writing, "nothing writes the blocks any more"
        self.reports.append(end)
        posted.ended(end)

    def released(self, token: bytes, *_: object) -> None:
        assert self.reports, "between attempts the lease is kept"
        self.releases += token == self.posted.load.token

    def happen(self, what: str | float, source: int = 0, reason: Reason | None = None) -> Rank:
        """Seconds pass, or something happens with a source, or with the oldest copy."""
        link: Any = self.links.get(source)
        one = next((each for each in self.fetch.reads if each.link is link), None)
        number = one.number if one is not None else 0
        attached = link is not None and link.phase is LinkPhase.ATTACHED
        match what:
            case float() | int():
                self.now += what
            case "attach" if link is not None and link.phase is LinkPhase.GREETING:
                link.phase = LinkPhase.ATTACHED
            case "fail" if link is not None and link.phase is not LinkPhase.FAILED:
                self.fails(link, reason or Reason("peer_lost", "planted"))
            case "grant" if attached:
                chunks = 0 if self.pulls else 2
                link.replies.append(messages.Grant(read=number, num_tokens=1, chunks=chunks, block_ids=(b"",)))
            case "chunk" if attached and one is not None and one.tags:
                link.arrived.append(Received(min(one.tags), 0, 1, lambda: None))
            case "copied" | "broken" if self.copies:
                copy = self.copies.pop(0)
                copy.done, copy.error = True, "planted" * (what == "broken")
                self.writing.discard(copy)
            case "committed" | "late" if attached:
                link.replies.append(messages.Committed(read=number, ok=what == "committed"))
            case "deny" if attached:
                link.replies.append(messages.Deny(read=number, reason="bounds"))
            case "cancel":
                self.it.loads.cancel("r", self.now)
            case "claim":
                self.posted.claimed = True
        with (
            patch.multiple(loads, plan_reads=lambda *_: (WHOLE,), check_complete=Mock(), draft_layers=lambda *_: ()),
            patch.multiple(reads, pages_of=Mock(), SpanRead=Mock()),
        ):
            self.it.serve(self.now)
            self.it.tick(self.now)
        return self

    def all_of(self, *events: str) -> Rank:
        """Each event happens with every source."""
        for event in events:
            for source in self.links:
                self.happen(event, source)
        return self


ASKED, GRANTED = ("attach",), ("attach", "grant")
COPIED = (*GRANTED, "chunk", "chunk", "copied", "copied")


GONE = Reason("denied", "gone")


@pytest.mark.parametrize("event", ["fail", "cancel"])
def test_during_io_it_drains_first(event: str) -> None:
    rank = Rank().all_of(*GRANTED, "chunk").happen(event, reason=GONE)
    assert rank.fetch.state is STATE.DRAINING and len(rank.copies) == 2
    rank.happen("copied").happen("fail", 1, Reason("timeout", "again")).happen(1e9)
    assert rank.fetch.state is STATE.DRAINING, "time is no proof"
    rank.happen("broken")
    assert [end.failed for end in rank.reports] == ["denied" if event == "fail" else "cancelled"] and rank.releases == 1


def test_a_load_that_is_cancelled_while_it_drains_has_no_other_attempt() -> None:
    rank = Rank().all_of(*GRANTED, "chunk").happen("fail").happen("cancel").all_of("copied").happen(SAME_PEER_SECONDS)
    assert (rank.dialed, [end.failed for end in rank.reports]) == (1, ["cancelled"])


@pytest.mark.parametrize(
    ("before", "limit", "blames"),
    [((), 10, "peer"), (ASKED, 30, ""), (GRANTED, 30, "plane"), ((*GRANTED, "copied", "copied"), 30, "")],
)
def test_every_state_has_a_deadline(before: tuple[str, ...], limit: float, blames: Blame) -> None:
    rank = Rank(inside=True, pulls="copied" in before).all_of(*before).happen(limit - 0.1)
    state = rank.fetch.state
    assert not rank.reports and state in (STATE.CONNECTING, STATE.READING, STATE.COMMITTING)
    assert rank.happen(0.2).fetch.reason == Reason("timeout", f"nothing moved on in time while {state.value}", blames)
    assert rank.reports[0].failed == "timeout" and rank.releases == 1


def test_progress_moves_the_deadline_up_to_the_end() -> None:
    rank = Rank().all_of(*ASKED)
    for event in ("grant", "chunk", "copied", "grant", "chunk"):
        rank.happen(19.0).happen(event)
        assert rank.fetch.deadline == min(rank.now + 30.0, END) and not rank.reports
    rank.happen(6.0)
    assert rank.fetch.state is STATE.DRAINING and rank.fetch.reason is not None and not rank.fetch.reason.blames
    rank.happen("copied")
    assert [end.failed for end in rank.reports] == ["timeout"]


def test_no_bytes_count_before_their_grant_nor_pages_before_their_commit() -> None:
    rank = Rank().all_of("attach", "chunk", "chunk", "copied", "copied")
    assert rank.fetch.state is STATE.COMMITTING and not rank.reports
    assert not rank.all_of("grant").reports[0].failed
    rank = Rank(pulls=True).all_of(*GRANTED).happen("committed").all_of("copied").happen("committed", 0)
    assert rank.fetch.state is STATE.COMMITTING and not rank.happen("committed", 1).reports[0].failed
    rank = Rank(pulls=True, inside=True).all_of(*GRANTED, "copied").happen("committed").happen("late", 1)
    assert [end.failed for end in rank.reports] == ["expired"]


def test_a_step_that_computes_with_a_load_comes_before_the_end_of_its_lease() -> None:
    rank = Rank(sources=1, inside=True).all_of(*COPIED[:-1])
    with patch.object(rank.it, "tick"):
        rank.happen("copied")
    assert len(rank.reports) == 1 and not rank.releases and rank.it.loads.running
    assert rank.happen(0.02).releases == 1 and not rank.it.loads.running


# --- attempts -----------------------------------------------------------------------------------------------------
def test_the_same_p_is_tried_once_more_and_not_at_once() -> None:
    rank = Rank(planes=2, sources=1).happen(10.0 - SAME_PEER_SECONDS).happen("fail")
    assert (rank.fetch.state, rank.fetch.deadline) == (STATE.WAITING, rank.now + SAME_PEER_SECONDS)
    rank.happen(SAME_PEER_SECONDS)
    assert (rank.fetch.state, rank.dialed, rank.fetch.reason) == (STATE.CONNECTING, 2, None)
    assert rank.happen("fail").reports[0].failed == "peer_lost"


@pytest.mark.parametrize(("blames", "expected"), [("", [1, 2, 0, 1, 2]), ("peer", [1, 2])])
def test_all_named_p_are_tried_before_the_first_again(blames: Blame, expected: list[int]) -> None:
    rank, peers = Rank(peers=3, sources=1), list[int]()
    while not rank.happen("fail", reason=Reason("peer_lost", "planted", blames)).happen(1.0).reports:
        peers.append(rank.fetch.peer)
    assert peers == expected


def test_no_attempt_follows_one_with_which_a_step_computes() -> None:
    rank = Rank(peers=3).all_of(*GRANTED).happen("claim").happen("fail")
    assert rank.dialed == 1 and rank.reports[0].failed == "peer_lost"


def test_a_failed_load_is_reported_also_where_the_device_has_failed() -> None:
    rank = Rank(drafts=True)
    rank.synchronize.side_effect = RuntimeError("CUDA error")
    rank.all_of(*GRANTED).happen("fail").happen("cancel")
    assert rank.synchronize.called and (len(rank.reports), rank.releases) == (1, 1)


GOOD = ["attach", "grant", "chunk", "chunk", "copied", "copied", "committed", 0.02, 1.0]
EVENTS = st.tuples(st.sampled_from([*GOOD, *GOOD, 25.0, "broken", "late", "deny", "fail", "cancel"]), st.integers(0, 1))
REASONS = st.builds(
    Reason, st.sampled_from(FAILURE_KINDS), st.just("planted"), st.sampled_from(["", "", "plane", "peer"])
)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from([False, False, False, True]),
    st.booleans(), st.sampled_from([(), ASKED, GRANTED]), st.lists(st.tuples(EVENTS, REASONS), max_size=60),
)  # fmt: skip
def test_one_report_and_one_release_after_the_last_attempt(
    peers: int, planes: int, sources: int, inside: bool, pulls: bool, before: tuple[str, ...], script: list[Any]
) -> None:
    rank = Rank(peers, planes, sources, inside=inside, pulls=pulls).all_of(*before)
    for (event, source), reason in script:
        rank.happen(event, source, reason)
        assert rank.releases <= len(rank.reports) <= 1
        assert rank.dialed <= (1 if inside else planes - 1 + ATTEMPTS_PER_PEER * peers)
        assert rank.reports or rank.fetch.state is STATE.DRAINING or rank.now <= rank.fetch.deadline <= END
        assert not rank.writing or rank.fetch.state in (STATE.READING, STATE.DRAINING)
    rank.happen(END)
    for _ in range(len(rank.copies)):
        rank.happen("copied")
    assert (len(rank.reports), rank.releases) == (1, 1), "the deadline is past, and nothing writes"
    assert not rank.it.loads.running and not rank.it.reads.writes


NAMES = "ab"
WHAT = ["post", "post", "lease", "freed", "early", "early", "join", "ended", "ended", "earlier", "take", "thread"]
act = st.tuples(st.sampled_from(WHAT), st.sampled_from(NAMES), st.booleans())


@given(st.lists(act, min_size=10, max_size=60))
def test_whatever_happens_every_id_is_reported_once(script: list[tuple[str, str, bool]]) -> None:
    """At its end, or early, and then the end of the load is the step's that joins it."""
    rank = StepLoads()
    owed: dict[str, StepLoad] = {}  # posted, and not reported
    early: dict[str, StepLoad] = {}  # reported before their end, and not joined
    told: dict[str, LoadEnd | None] = {}  # reported, and not taken; with its end, if it has one
    leased: set[str] = set()

    def take() -> None:
        results = rank.take_results()
        assert results.received == told.keys()
        assert results.ends == {name: end for name, end in told.items() if end is not None}
        assert results.failed == {name for name, end in results.ends.items() if end.failed}
        told.clear()
        assert results.sent <= leased
        leased.difference_update(results.sent)

    def thread_ends() -> None:
        rank.end_all(LOST)
        told.update(dict.fromkeys(owed, LOST))
        owed.clear()

    for what, name, flag in script:
        end = LoadEnd() if flag else LOST
        if what == "post" and not (name in owed or name in early or name in told):
            (owed[name],) = rank.post([load(name)])
        elif what == "early" and name in owed:
            owed[name].begun(ends_at=-math.inf if flag else math.inf)
            rank.report_early(0.0, foresees=False)
            if flag:
                early[name], told[name] = owed.pop(name), None
        elif what == "join" and name in early and name not in told:
            assert rank.join([load(name)]) == [early.pop(name)]
        elif what == "ended" and (one := owed.pop(name, None) or early.get(name)) is not None:
            one.ended(end)
            rank.load_ended(one)
            if name not in early:
                told[name] = end
        elif what == "earlier":
            (one,) = StepLoads().post([load(name, now=flag)])
            one.ended(LoadEnd())
            rank.load_ended(one)
        elif what == "lease" and name not in leased:
            leased.add(name)
            rank.post((), [LeaseGrant(name, b"", 0, ())])
        elif what == "freed":
            rank.lease_freed(name)
        elif what == "thread":
            thread_ends()
        elif what == "take":
            take()
    thread_ends()
    take()
    assert not leased


PEER_LOST = Reason("peer_lost", "gone")


class Read:
    """A read, and how its copies begin and end."""

    def __init__(self, left: int = 0, state: FetchState = STATE.READING, **more: Any) -> None:
        fetch: Any = SimpleNamespace(state=state, load=SimpleNamespace(**more))
        self.it = RankRead(1, fetch, Mock(), P.ranks[0], [])
        self.it.tags = set(range(left))
        self.it.asked(0.0)

    def begin(self) -> None:
        self.it.tags -= {max(self.it.tags, default=0)}
        self.it.write_began(PageWrite(self.it, Copy(done=True), 1), 0.0)

    def end(self, failure: Reason | None = None) -> ReadPhase:
        self.it.write_ended(next(iter(self.it.writes)), failure, 0.0)
        return self.it.phase


MIB = 1 << 20
UNBOUNDED = RecvChannel.few_bytes


@pytest.mark.parametrize(
    ("few", "slot", "step", "wanted"),
    [
        (UNBOUNDED, 8 * MIB, 0, 8 * MIB),  # a prompt that is computed, in whole slots
        (4 * MIB, 8 * MIB, 0, 4 * MIB),
        (4 * MIB, MIB, 0, MIB),
        (UNBOUNDED, 64 * MIB, 2048, 32 * MIB),  # an eighth of the layers of a step
        (UNBOUNDED, 8 * MIB, 2048, 8 * MIB),
        (4 * MIB, 16 * MIB, 2048, 8 * MIB),  # which takes several flows
        (4 * MIB, 16 * MIB, 512, 4 * MIB),
        (4 * MIB, 16 * MIB, 128, 2 * MIB),  # no longer than until an eighth of the layers is computed
    ],
)
def test_the_messages_that_d_asks_for(few: int, slot: int, step: int, wanted: int) -> None:
    region = SimpleNamespace(tile_tokens=1, content_bytes=512, shard=ALL_TOKENS)
    channel = SimpleNamespace(pulls=False, few_bytes=few)
    read = Read(step_tokens=step, found=0).it
    read.link = SimpleNamespace(  # type: ignore[assignment]
        slot_bytes=slot, channel=channel, theirs=SimpleNamespace(regions=(region,))
    )
    read.plan((WHOLE,), 0.0)
    assert read.chunk_bytes == wanted and len(read.planned) == (4096 // step if step else 1)


def test_stopped_while_copies_write() -> None:
    read = Read(2)
    read.begin()
    read.begin()
    assert read.it.stop(0.0) and not read.it.stop(0.0)
    assert [read.end(), read.end(PEER_LOST)] == [PHASE.STOPPED] * 2
    read.it.fail(PEER_LOST)
    assert read.it.failure is None and not read.it.writes


def test_a_burst_says_nothing_of_the_end() -> None:
    """Messages come many at once: what is left is foreseen once half of the last step's are there."""
    read = Read(8).it
    read.boxes, read.last_step, read.last_step_at = [SimpleNamespace()] * 10, 2, 1.0  # type: ignore[list-item]
    read.take_grant(0.0)
    left = []
    for _ in range(6):
        read.tags.pop()
        left.append(read.seconds_left(4.0))
    assert left == [math.inf] * 3 + [3.0 * 4 / 3, 3.0 * 3 / 4, 3.0 * 2 / 5]
