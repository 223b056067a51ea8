"""A prompt before its lease: what P's scheduler and device say of it, D's questions and P's answers; nothing grows."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import LinkPhase, Reason
from kvferry.connector.decode_side.lookup import LEFT_SECONDS, RETRY_SECONDS, Lookups
from kvferry.connector.decode_side.lookup import LookupPhase as P
from kvferry.connector.geometry.engine_types import BlockTable, RequestView, ScheduledTokens
from kvferry.connector.pages import computed_steps
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.copies import Copies
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.prefill_side import prompts, serve
from kvferry.connector.prefill_side.serve import Producer
from kvferry.connector.scheduler.lease_planner import PAUSE_SECONDS, HeldBlocks
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.wire import messages
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, prompt_names, to_transfer_params
from kvferry.connector.wire.step_plan import (
    LeftAnswer,
    LookupResult,
    PeerEngine,
    Prefill,
    PrefillChunk,
    PrefillStop,
    PromptLookup,
    QueuedPrompt,
    RankAddress,
    StepPlan,
    unpack_ids,
)
from kvferry.connector.worker.prefill_events import PrefillEvents
from tests.unit.labelled_model import Model

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
    assert held.take_block_us() == 5 * 2_000_000 + 15 * 1_000_000, "leases that have not ended count, too"
    held.end(["a", "unknown"])
    now = 14.0
    held.end(["b"])
    held.end(["b"])
    now = 100.0
    assert (len(held), held.blocks, held.take_block_us()) == (0, 0, 10 * 1_000_000)
    held.begin("c", 1)
    total = 0
    for part in range(1, 1001):
        now = 100.0 + part * 0.0000005
        total += held.take_block_us()
    assert abs(total - 500) <= 1, "parts of microseconds count at the next call"


NAMES = [f"layers.{number}" for number in range(20)]
GROUPS = [3, 6, 9, 12, 15, 18, 19, 20]
"""How many layers are computed at each event."""


class Behind(Copies):
    """A device that reaches each point of its work when the test says so."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device("cpu" if device == "host" else "cuda")
        self.acts: list[Callable[[], None]] = []

    def after_engine(self, act: Callable[[], None]) -> None:
        self.acts.append(act)

    def reach(self, count: int) -> None:
        for _ in range(count):
            self.acts.pop(0)()


class Step:
    def __init__(self, device: str = "GPU") -> None:
        self.device, self.wakes, self.over = Behind(device), 0, 0
        geometry = Model(("full", "mla") * 10, 2, False).rank((0, 1), (0, 1), 16)
        self.events = PrefillEvents(self.device, geometry, self.wake, self.count_over)

    def wake(self) -> None:
        self.wakes += 1

    def count_over(self) -> None:
        self.over += 1

    def begin(self, *tokens: bytes, restarts: bool = False, found: int = 0) -> ComputedStep:
        step = self.events.begin_step(plan(*tokens, restarts=restarts, found=found))
        assert step is not None
        return step


def plan(*tokens: bytes, restarts: bool = False, found: int = 0) -> StepPlan:
    return StepPlan(prefill_chunks=tuple(PrefillChunk(token, 0, 1, (b"",), restarts, found) for token in tokens))


def test_nothing_counts_before_the_device_has_reached_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_steps, "NEARLY_SECONDS", 600.0)
    made = Step()
    step = made.begin(b"a", found=16)
    for name in NAMES:
        made.events.layer_computed(name)
    made.events.end_step()
    assert (step.begun, step.computed, step.ended, made.wakes, made.over) == (False, 0, False, 0, 0)
    events = 1 + len(GROUPS) + 1
    assert len(made.device.acts) == events
    made.device.reach(1)
    assert (step.begun, step.computed) == (True, 0)
    made.device.reach(1)
    assert step.computed == GROUPS[0] and not step.ended
    made.device.reach(events - 2)
    assert step.ended and step.computed == step.num_layers
    assert made.wakes == events - 1, "the end brings no news"
    assert made.over == 2, "nearly at its end, and at its end"


def test_the_begin_of_a_step_is_told_where_tokens_were_found() -> None:
    """Else what is ready then was ready when the step before had ended."""
    made = Step()
    for found, restarts, acts in ((0, False, 0), (16, False, 0), (16, True, 1), (16, False, 0)):
        step = made.begin(b"a", found=found, restarts=restarts)
        assert len(made.device.acts) == acts
        made.events.end_step()
        made.device.reach(acts + 1)
        assert step.begun == bool(acts) and step.ended


@pytest.mark.parametrize("device", ["host", "GPU"])
def test_in_host_memory_the_next_layer_begins_before_the_thread_is_woken(device: str) -> None:
    """A GPU shares no interpreter, and what it has computed leaves at once."""
    made = Step(device)
    step = made.begin(b"a")
    deferred = device == "host"
    for number, name in enumerate(NAMES):
        made.events.layer_begins()
        assert made.wakes == bisect(GROUPS, number)
        made.events.layer_computed(name)
        made.device.reach(len(made.device.acts))
        assert step.computed == max([0, *GROUPS[: bisect(GROUPS, number + 1)]])
        assert made.wakes == bisect(GROUPS, number if deferred else number + 1)
    made.events.end_step()
    made.device.reach(1)
    assert made.wakes == len(GROUPS)
    step = made.begin(b"a")
    made.events.layer_computed(NAMES[0])
    made.events.end_step()
    made.device.reach(1)
    assert step.ended and made.wakes == len(GROUPS) + 1, "where no layer begins, nothing waits for it"


def test_a_layer_has_its_place_in_each_region_of_the_step_under_way() -> None:
    made = Step()
    made.events.layer_computed("layers.0")
    step = made.begin(b"a")
    for name in ("layers.3", "layers.0", "layers.99"):  # the last one uses the cache of another layer
        made.events.layer_computed(name)
    assert sorted(step.layers) == [(0, 0), (1, 1)]
    made.events.end_step()
    made.events.layer_computed("layers.1")
    made.events.end_step()
    assert len(step.layers) == 2 and len(made.device.acts) == 1


# --- D's questions ------------------------------------------------------------------------------------------------
PARAMS = msgspec.msgpack.encode(
    to_transfer_params(RemotePrompt(bytes(16), 10, "ours", PeerEngine("p", 1, 1, 30.0, (RANK,))))
)
RESOLVED, UNRESOLVED = messages.Resolved(number=0, params=PARAMS), messages.Unresolved(number=0, final=False)
ANSWERS: dict[str, Any] = {
    "granted": replace(RESOLVED, granted=True), "streams": replace(RESOLVED, streams=True), "begun": RESOLVED,
    "not yet": UNRESOLVED, "known": replace(UNRESOLVED, known=True), "final": replace(UNRESOLVED, final=True),
}  # fmt: skip


class Asking:
    """D's lookup of one request, over links without sockets."""

    def __init__(self) -> None:
        self.now, self.sent, self.reports, self.released = 0.0, list[Any](), list[LookupResult](), list[Any]()
        self.link = self.new_link()
        context = Mock()
        links: Any = SimpleNamespace(get=lambda *_, redial=False: self.link, source_addresses=lambda peer: [None])
        renewals: Any = SimpleNamespace(rank=0, release_for_all=lambda lease, now: self.released.append(lease))
        results: Any = SimpleNamespace(looked_up=lambda request_id, result: self.reports.append(result))
        self.half = Lookups(context, links, renewals, results, Deadlines(lambda each: each.due))
        self.half.begin(PromptLookup("r", "p", 1, "", "tx-1"), self.now)
        self.lookup = self.half.open["r"]

    def new_link(self) -> Any:
        link = Mock(phase=LinkPhase.CONNECTED, reason=Reason("unreachable", "gone"), broken_plane="", pulls=False)
        link.misfit = False
        link.questions, link.connection = {}, Mock(lost=False, failure="unreachable", send=self.send)
        return link

    def send(self, frames: list[bytes]) -> bool:
        self.sent.append(messages.decode_request(frames))
        return True

    def questions(self) -> list[str]:
        """What D has asked P for, one after the other."""
        return [message.until for message in self.sent if isinstance(message, messages.Resolve)]

    def happen(self, *events: str | float) -> Asking:
        """A number is of seconds that pass."""
        for event in events:
            link = self.link
            if isinstance(event, float):
                self.now += event
                if self.lookup.due <= self.now:
                    self.half.on_due(self.lookup, self.now)
            elif event in ("lost", "plane breaks", "refused"):
                self.link, link.misfit = self.new_link(), event == "refused"
                link.phase, link.broken_plane = LinkPhase.FAILED, "tcp" if event == "plane breaks" else ""
                self.half.link_moved(link, self.now)
            elif event in ("p sends", "d reads"):
                link.phase, link.pulls = LinkPhase.ATTACHED, event == "d reads"
                self.half.link_moved(link, self.now)
            elif event == "left":
                self.half.leave(LeftAnswer("r", ("ours",)), self.now)
            elif event == "taken":
                self.half.taken("r")
            else:  # P answers the last question, which may have been answered
                self.half.reply(link, replace(ANSWERS[event], number=self.half.asked), self.now)
        return self


@pytest.mark.parametrize(("way", "until"), [((), "begun"), (("begun",), "granted")])
def test_an_open_question_is_repeated_after_a_pause(way: tuple[str, ...], until: str) -> None:
    """Also where its link fails once since P has last answered."""
    for event in ("not yet", "lost"):
        asking = Asking().happen(*way)
        before = asking.questions()
        assert asking.happen(event, RETRY_SECONDS / 2).questions() == before
        assert (asking.happen(RETRY_SECONDS / 2, 100.0).questions(), asking.reports) == ([*before, until], [])
    assert not asking.happen("not yet", RETRY_SECONDS, "lost", RETRY_SECONDS).reports, "P has answered since"
    asking.happen("lost")
    assert [result.reason for result in asking.reports] == ["unreachable"] and not asking.half.live


def test_a_link_that_fails_says_nothing_about_the_prompt() -> None:
    """Where its data plane broke, its questions go on over the next one at once, and as often as that comes."""
    asking = Asking().happen("lost", RETRY_SECONDS, *["plane breaks"] * 5)
    assert asking.questions() == ["begun"] * 7 and not asking.reports
    asking = Asking()
    for _ in range(5):
        asking.happen("refused", RETRY_SECONDS)  # handshakes for loads of other requests
    assert asking.questions() == ["begun"] * 6 and not asking.reports
    assert Asking().happen("streams", "lost").questions() == ["begun", "granted"]


def test_a_question_waits_where_p_takes_no_more_messages() -> None:
    asking = Asking().happen("not yet")
    asking.link.connection.send = lambda frames: False
    asking.happen(*[RETRY_SECONDS] * 5)
    assert asking.lookup.due == asking.now + RETRY_SECONDS and not asking.link.questions and not asking.reports


HAPPEN = "lost", "plane breaks", "refused", "p sends", "d reads", RETRY_SECONDS, "left", "taken"
EVENTS = st.sampled_from([*ANSWERS, *HAPPEN])


@given(st.lists(EVENTS, max_size=12))
def test_its_end_is_reported_once_and_its_lease_taken_or_released(events: list[str | float]) -> None:
    asking = Asking().happen(*events)
    phase, left = asking.lookup.phase, "left" in events
    reports = [result for result in asking.reports if not result.known]
    assert len(reports) <= 1 and len(asking.released) <= left
    assert bool(asking.link.questions) == (asking.lookup.link is not None), "over no link that has failed"
    assert len(reports) >= (phase is P.FOUND) and (phase in (P.FOUND, P.LEFT, P.ENDED)) >= left
    if phase is P.ENDED:
        assert not asking.half.live and not asking.link.questions and math.isinf(asking.lookup.due)
        assert left or len(reports) == 1
    elif phase is not P.FOUND:  # something is to come
        assert asking.link.questions or not math.isinf(asking.lookup.due) or phase is P.LINKING


@pytest.mark.parametrize("again", [(), ("not yet", RETRY_SECONDS), ("lost", RETRY_SECONDS)])
def test_a_question_outlives_its_request_while_p_does_not_know_the_prompt(again: tuple[str, ...]) -> None:
    """P may have the prompt already: the lease must not stay until it ends by time."""
    for answer in ("streams", "begun", "granted"):
        asking = Asking().happen("left", *again, answer)
        assert asking.released and not asking.half.live and asking.questions() == ["begun"] * (1 + bool(again))
    asking = Asking().happen("left", *again, "final")
    assert not (asking.released or asking.half.live or asking.reports)
    asking = Asking().happen("left", *again, LEFT_SECONDS)
    assert not (asking.link.questions or asking.half.live)
    assert not Asking().happen("left", "lost", RETRY_SECONDS, "lost").half.live


# --- P ------------------------------------------------------------------------------------------------------------
TOKEN = b"t" * 16


def prefill(request_id: str = "r", *names: str, token: bytes = TOKEN, **kwargs: Any) -> Prefill:
    form: dict[str, Any] = {"streams": True, "params": b"params"} | kwargs
    return Prefill(request_id, token, 100, "digest", (*names, request_id), found=16, step_tokens=64, **form)


class Names:
    """P's side without ranks; ``ask`` and ``told`` give what was answered since the last call."""

    def __init__(self) -> None:
        caches = SimpleNamespace(views=[], geometry=SimpleNamespace(regions=[], pp_size=1))
        context: Any = SimpleNamespace(
            caches=caches, settings=Settings(lease_seconds=30.0), engine_id="p", planes=[], log=None, clock=None
        )
        listener: Any = SimpleNamespace(send=self._sent, ended=[])
        self.p, self._answers = Producer(context, listener, lambda request_id: None), list[tuple[bytes, Any]]()

    def _sent(self, identity: bytes, frames: list[bytes]) -> bool:
        self._answers.append((identity, messages.decode_reply(frames)))
        return True

    def take(self) -> list[tuple[bytes, Any]]:
        """To whom, and what."""
        answers, self._answers[:] = self._answers[:], []
        return answers

    def told(self) -> list[Any]:
        """Of each answer its number, and P's params or whether it is the last one."""
        return [(a.number, a.params if isinstance(a, messages.Resolved) else a.final) for _, a in self.take()]

    def ask(
        self, number: int, name: str = "tx", until: Any = "begun", *, at: float = 0.0, of: bytes = b"d", **what: Any
    ) -> Any:
        self.p.handle(of, messages.Resolve(number=number, name=name, until=until, **what), at, "")
        return self.told()

    def end(self, now: float, token: bytes = TOKEN) -> list[Any]:
        self.p.stop_prefill(PrefillStop(token, ended=True), now)
        return self.told()


def test_questions_are_answered_in_time() -> None:
    named = Names()
    assert named.ask(1) == named.ask(2) == []
    named.p.tick(9.9)
    assert named.p.live and named.told() == []
    named.p.tick(10.0)
    assert named.told() == [(1, False), (2, False)] and not named.p.live


@pytest.mark.parametrize(("begins", "steps"), [(False, 1), (True, 1), (False, 0)])
def test_a_question_for_a_prompt_that_waits_is_held_and_told_so(begins: bool, steps: int) -> None:
    """Unless P's engine has not taken a step since: it may never take one."""
    named = Names()
    named.p.prompts.queue(QueuedPrompt("r", TOKEN, ("tx",)))
    if begins:
        named.p.begin_prefill(prefill("r", "tx", streams=False), 0.0)
    assert named.ask(1, until="granted") == named.ask(2, "another") == []
    named.p.plans_seen += steps
    named.p.tick(10.0)
    told: Any = {answer.number: answer for _, answer in named.take()}
    assert not told[1].final and not told[2].final
    assert (told[1].known, told[2].known) == (bool(steps), False)


def test_a_prompt_that_ends_answers_all_and_late_questions_for_a_while() -> None:
    named = Names()
    named.p.begin_prefill(prefill("r", "tx"), 0.0)
    assert named.ask(1, until="granted") == []
    assert named.end(0.0) == [(1, True)]
    assert named.ask(2, at=9.9) == [(2, True)]
    assert named.ask(3, at=10.0) == [], "another prompt may come with this name"


def test_another_engine_is_meant() -> None:
    assert Names().ask(1, engine_id="q") == [(1, True)] and Names().ask(1, engine_id="p") == []


def test_strangers_displace_only_their_own_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WAITING_SPANS", 64 * serve.WAITING_COST)
    named = Names()
    named.ask(1)
    for n in range(500):
        named.p.handle(b"stranger", messages.Resolve(number=n, name=f"name {n}"), 0.0, "")
    told = named.take()
    assert len(named.p.waiting) <= 64 and {identity for identity, _ in told} == {b"stranger"}
    assert all(isinstance(answer, messages.Unresolved) and not answer.final for _, answer in told)
    named.p.begin_prefill(prefill("r", "tx"), 0.0)
    assert named.told() == [(1, b"params")]


def test_what_p_remembers_of_ended_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "ENDED", 8)
    named = Names()
    for n in range(100):
        named.p.begin_prefill(prefill(f"r{n}", token=n.to_bytes(16, "big")), 0.0)
        named.end(0.0, n.to_bytes(16, "big"))
    assert len(named.p.prompts.ended) == 8 and not (named.p.prompts.table or named.p.prompts.by_name)
