"""D's part of the scheduler half: which prompts to load, from which P, and inside a step or beside the steps. Pure.

A load goes inside the step that computes with it where ``step_load_rule`` permits, else beside the engine's steps. Of
a load beside the steps, vLLM sees the end at the launch of a step, and schedules the request two steps later. So each
plan tells the ranks how long before its end they may report a load, and the next step joins it. Where P still computes
the prompt, an idle engine prepares the step that computes with it meanwhile.
"""

from __future__ import annotations

import enum
import math
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvferry.connector.geometry.engine_types import KVContent, RequestView
from kvferry.connector.scheduler.planning import EngineFacts, first_held, used_blocks
from kvferry.connector.scheduler.prefixes import LEAST_GAIN, prefix_digests, sources_of
from kvferry.connector.scheduler.step_load_rule import StepLoadRule
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.wire import params
from kvferry.connector.wire.messages import DIGEST_BYTES, PREFIX_TOKENS
from kvferry.connector.wire.metrics import LocalReason, PromptReason, PromptResult
from kvferry.connector.wire.params import RemotePrompt, UnusablePromptError
from kvferry.connector.wire.states import Moves, Phases
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeftAnswer,
    Load,
    LoadEnd,
    LookupResult,
    PeerEngine,
    PromptLookup,
    RemoteLease,
    StepPlan,
    UnneededLease,
    of_both,
    pack_ids,
)
from kvferry.connector.wire.transfer_estimate import EstimateKey, TransferEstimate, TransferEstimates
from kvferry.transport.errors import ProtocolError, quoted

_CHILD = re.compile(r"^\d+_.")
"""From a request with ``n > 1`` vLLM makes requests with the ids ``0_ID``, ``1_ID``, …; its scheduler sees neither
``n`` nor the parent. vLLM's servers put ``cmpl-`` or the like before a client's id. Without a server a client may give
an id of this form: its lease ends ``SIBLING_SECONDS`` later, as after any request with ``n > 1``."""
MAX_PATIENCE = 10
"""How many times ``handover_timeout_seconds`` a request waits at most for a prompt that P's engine has in its queue, or
under way: P says so again and again, and a P that never ends it may be one that means harm."""


class RequestPhase(enum.Enum):
    """Of a request of an engine, as far as it may load KV from P::

        NEW ──▶ LOCAL ─────────────────────────────────┐
         │        ▲                                    │
         │        │ refused                            ▼
         ├──▶ OFFERED ──▶ LOADING ──▶ SETTLED ──▶ ENDED
         │        ▲ └─────────────────────▲
         └──▶ AWAITED

    From AWAITED a refusal leads to LOCAL, too, and the request may end in every phase. In AWAITED, P has not sent the
    lease's token; the engine asks again later, and gives no blocks. vLLM asks again after a failed load and after
    preemption, and the same answer would loop for ever. So the engine is offered tokens only in OFFERED, and nothing
    leads back there. In SETTLED the load was declined or reported, or is inside a step; its end is ``handed_over``.
    """

    NEW = "new"
    AWAITED = "awaited"
    LOCAL = "computed here"
    OFFERED = "offered"
    LOADING = "loading"
    SETTLED = "settled"
    ENDED = "ended"


class RequestEvent(enum.Enum):
    NOTHING = "NothingOffered"
    OFFERED = "PromptOffered"
    AWAITED = "PromptAwaited"
    """P will hold the request's prompt, and must be asked for its lease."""
    REFUSED = "OfferRefused"
    """D cannot use P's prompt, or P has not told of it in time, or D's caches were reset."""
    DECLINED = "LoadDeclined"
    """The engine has decided to load nothing."""
    BESIDE = "BlocksAllocated"
    """The engine has allocated the blocks of a load beside the steps."""
    INSIDE = "BlocksAllocated inside a step"
    REPORTED = "LoadReported"
    """The workers have reported a load of this request, whether it failed or not."""
    ENDED = "RequestEnded"


_R, _E = RequestPhase, RequestEvent
ACTIVE = (_R.AWAITED, _R.OFFERED, _R.LOADING)
"""The request waits for P or for its load."""
MOVES: Moves[RequestPhase] = {
    _R.NEW: {
        _E.NOTHING: _R.LOCAL, _E.REFUSED: _R.LOCAL, _E.OFFERED: _R.OFFERED, _E.AWAITED: _R.AWAITED, _E.ENDED: _R.ENDED,
    },
    # A report before LOADING concerns an earlier request with this id. The engine takes it for this request's load.
    _R.AWAITED: {_E.OFFERED: _R.OFFERED, _E.REFUSED: _R.LOCAL, _E.REPORTED: _R.SETTLED, _E.ENDED: _R.ENDED},
    _R.OFFERED: {
        _E.REFUSED: _R.LOCAL, _E.DECLINED: _R.SETTLED, _E.REPORTED: _R.SETTLED, _E.BESIDE: _R.LOADING,
        _E.INSIDE: _R.SETTLED, _E.ENDED: _R.ENDED,
    },
    _R.LOADING: {_E.REPORTED: _R.SETTLED, _E.ENDED: _R.ENDED},
    # Once the engine has decided, or D has refused, nothing changes until the request ends.
    _R.LOCAL: {_E.ENDED: _R.ENDED},
    _R.SETTLED: {_E.ENDED: _R.ENDED},
}  # fmt: skip


@dataclass(slots=True)
class AwaitedPrompt:
    """A prompt that P will hold; or one of which sources may have a prefix."""

    request: RequestView
    wanted: PromptLookup
    deadline: float
    """By the scheduler half's clock. Each time P says that its engine has the prompt, it begins anew, up to ``end``."""
    end: float
    sources: tuple[PromptLookup, ...] | None = None
    """Of a prefix: those of the sources that the request names which have not been asked. The first is asked once D
    knows what it has itself; the next one where that has too little."""
    digests: bytes = b""
    """Of a prefix: of all prefixes of the prompt, once a source is asked."""
    known: bool = False
    """P has said so."""
    result: LookupResult = field(default_factory=LookupResult)
    """P's answer."""


@dataclass(slots=True)
class EngineRequest:
    """A request of the engine, from its first question to its end."""

    request_id: str
    life: Phases[RequestPhase]
    remote_prompt: RemotePrompt | None = None
    """What P holds for it."""
    awaited: AwaitedPrompt | None = None
    """What D asked P for, and P's answer."""
    leases: tuple[RemoteLease, ...] = ()
    """That are kept: of ``remote_prompt``, then those of other P engines that hold the same."""
    start: int = 0
    """The first token that the engine does not have, as the engine asked last."""
    in_step: bool = False
    """The step in which it is scheduled computes with the load, by D's last answer to the engine."""
    cached: bool = False
    """D had the prompt in its prefix cache, as the engine asked last."""
    tokens: int = 0
    """Of its load."""
    end: LoadEnd | None = None
    """Of its load, by the ranks that have reported its end."""
    load: Load | None = None
    """One beside the steps."""
    seconds: float = math.inf
    """Of its load, as ``Load.seconds``."""
    handed_over: dict[str, Any] = field(default_factory=dict)
    """What became of its prompt, as ``HANDED_OVER`` has it; empty until that is known."""
    traceparent: str = ""

    @property
    def is_prefix(self) -> bool:
        """Whether it names sources of a prefix of its prompt, and no P that was to compute it."""
        return self.awaited is not None and self.awaited.sources is not None


@dataclass(eq=False)
class LoadPlanner(EngineFacts):
    """The requests of the engine, and their loads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = self.step_loads and self.consumes and self.steps
        self.step_load_rule = StepLoadRule(self.settings.step_hold_seconds if inside else 0.0)
        """Which loads go inside a step."""
        self._timeout = self.settings.handover_timeout_seconds
        self._estimates = TransferEstimates(self.tp_size)
        self._joining = 0, 0.0  # tokens of the last load that a step joins, and since when it is known
        self._requests: dict[str, EngineRequest] = {}  # all requests of the engine
        self._unreported: dict[str, EngineRequest] = {}  # that have ended before their load
        self._phases: Counter[RequestPhase] = Counter()  # how many requests are in each phase but the first and last

    # --- whether P holds the prompt -----------------------------------------------------------------------------

    def _new_load(self, request: RequestView) -> None:
        """Check whether P holds a new request's KV. If so, its lease is renewed from now on."""
        now = self.clock()
        entry = EngineRequest(request.request_id, Phases(MOVES, RequestPhase.NEW, now), traceparent=request.traceparent)
        self._requests[request.request_id] = entry
        if (earlier := self._unreported.pop(request.request_id, None)) is not None:  # an id comes again
            self._load_ended(earlier, LoadEnd("cancelled"))
        try:
            if request.content is not None and not params.wants_load(request.params):
                if self.consumes and not params.wants_prefill(request.params):
                    self._stats.prompt("plain", "no_params")
                    self._quiet = False
                self._new_prefix(entry, request)
            elif not self.consumes:
                self._advance(entry, RequestEvent.NOTHING)
            elif (wanted := params.lookup_of(request.request_id, request.params)) is not None:
                params.check_hosts((request.params or {}).get("remote_host_id"), (wanted.host,), self.host_id)
                end = now + MAX_PATIENCE * self._timeout
                entry.awaited = AwaitedPrompt(request, wanted, now + self._timeout, end)
                self._plan.lookups.append(wanted)
                self._advance(entry, RequestEvent.AWAITED)
            elif remote_prompt := params.from_transfer_params(request.params, self.max_sizes):
                self._offer(entry, request, remote_prompt)
            else:
                self._advance(entry, RequestEvent.NOTHING)
                if not params.wants_prefill(request.params):
                    self._settle(entry, "plain", "no_params")
        except ProtocolError as error:
            self._refuse(entry, error)

    def _new_prefix(self, entry: EngineRequest, request: RequestView) -> None:
        """A request names sources of a prefix of its prompt. Raises ProtocolError: they cannot be asked."""
        nobody = PromptLookup(request.request_id, "", 0, "", "")
        entry.awaited = AwaitedPrompt(request, nobody, math.inf, math.inf, sources=())
        entry.awaited.sources = sources_of(request.request_id, request.params)
        if not entry.awaited.sources:
            entry.awaited = None
            self._advance(entry, RequestEvent.NOTHING)
        elif not self.consumes:
            raise UnusablePromptError("wrong_role", "its kv_role is kv_producer, which reads nothing; use kv_both")
        else:
            self._advance(entry, RequestEvent.AWAITED)

    def _ask_first(self, entry: EngineRequest, awaited: AwaitedPrompt) -> None:
        """Ask how much of the prompt a source has. Raises ProtocolError: that would gain too little."""
        request = awaited.request
        assert request.content is not None
        if request.whole_prompt:
            raise UnusablePromptError("whole_prompt", "the engine computes all of its prompt")
        if request.num_prompt_tokens - 1 - entry.start < LEAST_GAIN:
            raise UnusablePromptError("cached", f"this engine has {entry.start} tokens of it")
        awaited.deadline = awaited.end = self.clock() + self.settings.prefix_wait_seconds
        awaited.digests = prefix_digests(self.prefix_seed, request.content)
        alone = self._alone
        self._ask_source(awaited)
        if alone and (told := self.look_up(awaited.wanted)) is not None:
            self._plan.lookups.clear()
            self.lookups_answered(told)

    @property
    def _alone(self) -> bool:
        """Whether an answer may be waited for here, as the engine waits for a millisecond after a step without tokens:
        nobody else waits meanwhile, and peers get first what is planned for them."""
        parts = self._plan
        return not (self.shares_steps or len(self._requests) > 1 or parts.leases or parts.left or parts.lookups)

    def _ask_source(self, awaited: AwaitedPrompt) -> bool:
        """Ask the next source. Returns whether there is one."""
        if not awaited.sources:
            return False
        awaited.wanted = replace(awaited.sources[0], prefix=awaited.digests)
        awaited.sources = awaited.sources[1:]
        self._plan.lookups.append(awaited.wanted)
        return True

    def asked_prefixes(self, request_id: str) -> tuple[KVContent, bytes] | None:
        """The content of a prompt and the digests of its prefixes, where they are known as a source was asked."""
        entry = self._requests.get(request_id)
        awaited = None if entry is None else entry.awaited
        if awaited is None or awaited.request.content is None or not awaited.digests:
            return None
        return awaited.request.content, awaited.digests

    def _take_prefix(self, entry: EngineRequest, awaited: AwaitedPrompt) -> None:
        """A source has so much of the prompt. From here on it is a prompt that a P holds, under a token that the ranks
        of D send with the digests. Raises ProtocolError: it is too little, or D cannot use it."""
        digests, result = awaited.digests, awaited.result
        count = min(result.found // PREFIX_TOKENS, len(digests) // DIGEST_BYTES)
        tokens = count * PREFIX_TOKENS
        if tokens - entry.start < LEAST_GAIN:
            text = f"the source has {tokens} tokens of it, this engine {entry.start}"
            raise UnusablePromptError("cached" if tokens > LEAST_GAIN else "no_lease", text)
        peer = params.prompt_of_answer(result.params, self.max_sizes).peer
        params.check_reachable(peer, self.host_id)
        token, digest = secrets.token_bytes(16), digests[: count * DIGEST_BYTES][-DIGEST_BYTES:]
        entry.remote_prompt = RemotePrompt(token, tokens, digest.hex(), peer)
        entry.leases = (RemoteLease(token, peer),)
        self._plan.keeps.append(KeepLease(entry.request_id, token, peer, siblings=False))
        self._advance(entry, RequestEvent.OFFERED)

    def _offer(self, entry: EngineRequest, request: RequestView, remote_prompt: RemotePrompt) -> None:
        """Keep the leases of a request's prompt, if D can use it. Raises ProtocolError: it cannot. Such a lease may be
        another request's, so D neither keeps nor releases it, unless only the adapter is another one."""
        params.check_reachable(remote_prompt.peer, self.host_id)
        # The prompt of a rejected request is a placeholder. Where P's token came with it, the lease is its own.
        if not request.rejected or entry.awaited is not None:
            params.check_prompt(request, remote_prompt)
        usable, left_out = params.alternatives(request.params, remote_prompt, self.max_sizes, self.host_id)
        for why in left_out:
            self._log.warning(
                "alternative", "kvferry: %s has one prefill engine less to load from: %s", request.request_id, why
            )
        siblings = _CHILD.match(request.request_id) is not None
        entry.remote_prompt = remote_prompt
        entry.leases = (RemoteLease(remote_prompt.token, remote_prompt.peer), *usable)
        self._plan.keeps += [KeepLease(request.request_id, lease.token, lease.peer, siblings) for lease in entry.leases]
        self._advance(entry, RequestEvent.OFFERED)
        params.check_adapter(request, remote_prompt)  # the lease is this request's, and is released

    def lookups_answered(self, results: Mapping[str, LookupResult]) -> None:
        """P has answered where its lease was known by name only, or has said that its engine has the prompt, or cannot
        be asked. ``results``: by request, as the first rank's worker half has returned them."""
        for request_id, result in results.items():
            entry = self._requests.get(request_id)
            awaited = None if entry is None else entry.awaited
            if entry is None or awaited is None or entry.life.phase is not RequestPhase.AWAITED:
                continue  # the ranks know that the answer is not needed, and release the lease
            if result.known:
                awaited.known = True
                awaited.deadline = min(self.clock() + self._timeout, awaited.end)
                continue
            try:
                if result.error:
                    raise UnusablePromptError(result.reason, result.error)
                awaited.result = result
                if entry.is_prefix:
                    self._take_prefix(entry, awaited)
                    continue
                self._offer(entry, awaited.request, params.prompt_of_answer(result.params, self.max_sizes))
                if awaited.request.whole_prompt:  # the engine computes it, and does not ask again
                    self._advance(entry, RequestEvent.DECLINED)
                    self._settle(entry, "local", "whole_prompt")
            except ProtocolError as error:
                if not self._ask_source(awaited):
                    self._refuse(entry, error)

    def _awaits(self, entry: EngineRequest) -> bool:
        """Whether a request waits for P's answer. Ends the wait when it has lasted long enough."""
        if entry.life.phase is not RequestPhase.AWAITED or entry.awaited is None:
            return False
        if entry.is_prefix and not entry.awaited.digests:
            try:
                self._ask_first(entry, entry.awaited)
            except ProtocolError as error:
                self._refuse(entry, error)
            if entry.life.phase is not RequestPhase.AWAITED:
                return False
        elif self._alone and (told := self.look_up(None)) is not None:
            self.lookups_answered(told)
            if entry.life.phase is not RequestPhase.AWAITED:
                return False
        wanted, deadline = entry.awaited.wanted, entry.awaited.deadline
        if self.clock() < deadline:
            return True
        name = quoted(wanted.name)
        if entry.is_prefix:
            wait = self.settings.prefix_wait_seconds
            text = f"the source at {wanted.host}:{wanted.port} has not answered in {wait:g} s"
        elif deadline == entry.awaited.end:
            patience = MAX_PATIENCE * self._timeout
            text = (
                f"the prefill engine at {wanted.host}:{wanted.port} has had {name} for {patience:g} s, and "
                "has not computed it"
            )
        else:
            text = (
                f"the prefill engine at {wanted.host}:{wanted.port} has told nothing of {name} in {self._timeout:g} s; "
            )
            asked = "does the router send both legs, with one transfer_id?"
            text += "it had the prompt: has its engine stopped?" if entry.awaited.known else asked
        self._refuse(entry, UnusablePromptError("no_answer", text))
        return False

    def _loads_itself(self, request_id: str) -> bool:
        """Whether tokens of a request come from a load that may still fail, or may come from one."""
        entry = self._requests.get(request_id)
        if entry is None:
            return False
        if entry.is_prefix:  # the engine computes the rest once this is settled
            return entry.remote_prompt is not None and entry.handed_over.get("result") != "loaded"
        return entry.remote_prompt is not None or entry.awaited is not None

    # --- phases -------------------------------------------------------------------------------------------------

    def _advance(self, entry: EngineRequest, event: RequestEvent) -> None:
        """Every lease that is kept is released once, or is part of the load. A question to P is answered or left."""
        before, parts = entry.life.step(event, self.clock()), self._plan
        after = entry.life.phase
        self._phases[before] -= 1
        self._phases[after] += 1
        if before is RequestPhase.AWAITED and after is not before and (awaited := entry.awaited) is not None:
            if awaited.digests:
                waited = self.settings.prefix_wait_seconds - (awaited.deadline - self.clock())
                self._stats.count("prefix_wait_seconds", by=round(waited * 1e6))
            if after is not RequestPhase.OFFERED and (awaited.digests or not entry.is_prefix):
                leases = () if entry.is_prefix else params.possible_digests(awaited.request)
                self._plan.leave(LeftAnswer(entry.request_id, leases))
        elif before is RequestPhase.OFFERED and after is not before and event not in (_E.BESIDE, _E.INSIDE):
            parts.releases += [UnneededLease(entry.request_id, lease.token) for lease in entry.leases]
        elif before is RequestPhase.LOADING and event in (_E.REFUSED, _E.ENDED) and not entry.handed_over:
            parts.cancels.append(entry.request_id)  # else a reset has cancelled it

    def _refuse(self, entry: EngineRequest, why: ProtocolError) -> None:
        self._advance(entry, RequestEvent.REFUSED)
        if entry.life.phase is RequestPhase.LOADING:
            self._settle(entry, "failed", "cancelled")
        reason: LocalReason = why.reason if isinstance(why, UnusablePromptError) else "malformed"
        self._settle(entry, "local", reason)
        if entry.is_prefix:  # any client may name sources
            text = "kvferry: nothing is read for %s from the source that it names: %s"
            self._log.info("no prefix", text, entry.request_id, why)
            return
        text = "kvferry: %s prefills locally: %s; the request: %s"
        self._failed.warning(reason, text, entry.request_id, why, entry.life.story())

    def _reset_loads(self) -> bool:
        """D's caches were reset: what P has computed before is not loaded. Loads that run are cancelled; they are
        reported as any other. Returns whether none runs."""
        active = [each for each in self._requests.values() if each.life.phase in ACTIVE]
        for entry in [each for each in active if not each.handed_over]:  # else a reset has cancelled its load
            self._plan.urgent = True
            self._refuse(entry, UnusablePromptError("reset", "this engine's caches were reset"))
        return not self._phases[RequestPhase.LOADING]

    # --- the engine schedules a request -------------------------------------------------------------------------

    def _matched_tokens(self, request: RequestView, num_local: int) -> tuple[int | None, bool]:
        """As ``SchedulerHalf.num_new_matched_tokens``, of a request of the engine."""
        entry = self._requests[request.request_id]
        entry.start = num_local
        if self._awaits(entry):
            return (0 if request.whole_prompt else None), False
        remote_prompt = entry.remote_prompt
        if entry.life.phase is not RequestPhase.OFFERED or remote_prompt is None:
            return 0, False
        prompt = request.num_prompt_tokens
        stop = min(remote_prompt.num_tokens, prompt - max(self.lookahead, 0 if self._whole else 1))
        entry.in_step = False
        entry.cached = min(stop, prompt - 1) <= num_local
        if entry.cached or request.whole_prompt:
            return 0, False
        try:
            params.check_kept(self.tables, remote_prompt, num_local, stop)
        except ProtocolError as error:
            self._refuse(entry, error)
            return 0, False
        streams = entry.awaited is not None and entry.awaited.result.streams  # it ends when P has computed the prompt
        beside = params.wants_report(request.params)  # it ends with its plane and its time known
        inside = min(stop, prompt - 1)  # vLLM schedules it at once, with a token to compute
        # vLLM moves a state to where the step works on it before the connector sees the step.
        beside = beside or any(table.moves_state(inside, prompt + self.drafts) for table in self.tables)
        early = not beside and bool(self.step_load_rule.hold_seconds)
        entry.seconds, entry.in_step = 0.0 if early else math.inf, False
        if early and not streams:
            entry.seconds, entry.in_step = self._in_step(remote_prompt.peer, stop - num_local)
        if entry.in_step:
            return inside - num_local, False
        return stop - num_local, True

    def _in_step(self, peer: PeerEngine, tokens: int) -> tuple[float, bool]:
        """``Load.seconds`` of a load of ``tokens``, and whether it may go inside the step that is being scheduled."""
        steps, now = self.steps, self.clock()
        assert steps is not None, "else the rule has no hold"
        seconds = self._estimates.seconds(peer.engine_id, tokens, now)
        # Copies that must wait for the steps in flight gain nothing from the time that these take.
        left = 0.0 if self.clears_blocks or steps.unknown_freed else steps.seconds_left(now)
        others = self.shares_steps or len(self._requests) > 1
        # The scheduler may take longer to admit a long prompt than the device is busy.
        admission = max(0.0, steps.admission_seconds(tokens) - steps.seconds_until_seen(now))
        return seconds - admission, self.step_load_rule.fits(seconds, left, steps.step_seconds, others=others)

    def after_alloc(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM has decided: load ``num_external`` tokens into these blocks, or nothing."""
        entry = self._requests.get(request.request_id)
        if entry is None or entry.life.phase is not RequestPhase.OFFERED or entry.remote_prompt is None:
            return
        if num_external == 0:
            self._advance(entry, RequestEvent.DECLINED)
            others: LocalReason = "cached" if entry.cached or self.streams() else "other_connector"
            self._settle(entry, "local", "whole_prompt" if request.whole_prompt and not entry.cached else others)
            return
        entry.tokens = num_external
        load = self._load(entry, entry.remote_prompt, block_ids, num_external)
        if not load.now:
            entry.load = load
        else:
            self.step_load_rule.planned(self._estimates.seconds(load.peer.engine_id, num_external, self.clock()))
        self._plan.loads.append(load)
        self._advance(entry, RequestEvent.INSIDE if load.now else RequestEvent.BESIDE)

    def _load(
        self, entry: EngineRequest, remote_prompt: RemotePrompt, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> Load:
        start, stop, steps = entry.start, entry.start + num_external, self.steps
        tables = list(zip(self.tables, block_ids, strict=True))
        result = LookupResult() if entry.awaited is None or entry.is_prefix else entry.awaited.result
        digests = b"" if entry.awaited is None else entry.awaited.digests
        written = (block_id for table, ids in tables for block_id in ids[table.lacks_from(start) // table.block_size :])
        behind = self.clears_blocks or steps is None or steps.may_use(written)
        return Load(
            request_id=entry.request_id,
            token=remote_prompt.token,
            peer=remote_prompt.peer,
            block_ids=tuple(pack_ids(used_blocks(table, ids, stop)) for table, ids in tables),
            tokens=tuple(
                (0, 1) if table.kind == "state" else (max(table.lacks_from(start), first_held(table, ids)), stop)
                for table, ids in tables
            ),
            digest=remote_prompt.digest,
            now=entry.in_step,
            behind=behind,
            seconds=math.inf if behind else entry.seconds,  # nobody knows when its copies begin
            alternatives=entry.leases[1:],
            found=result.found,
            step_tokens=result.step_tokens,
            traceparent=entry.traceparent,
            prefix=digests[: remote_prompt.num_tokens // PREFIX_TOKENS * DIGEST_BYTES],
        )

    def loads_finished(
        self,
        request_ids: Iterable[str],
        ends: Mapping[str, LoadEnd],
        estimates: Mapping[EstimateKey, TransferEstimate] | None = None,
    ) -> None:
        """The workers have reported these loads, whether they failed or not. ``ends``: of loads beside the steps, on
        the ranks on which they have ended since the last call: ``StepResults.ends``. A load that has ended on fewer
        ranks than there are is one that the others have reported early: the next step joins it. ``estimates``: how long
        loads took that the ranks measured, also loads inside a step."""
        if estimates:
            self._estimates.observe(estimates, self.clock())
        for request_id, end in ends.items():
            entry = self._loading(request_id)
            if entry is not None:
                entry.end = end if entry.end is None else of_both(end, entry.end)
        for request_id in request_ids:
            loading = self._loading(request_id)
            if (entry := self._requests.get(request_id)) is not None:
                self._advance(entry, RequestEvent.REPORTED)
            if loading is None:
                continue
            ranks = 0 if loading.end is None else loading.end.ranks
            if loading.load is not None and loading.load.seconds < math.inf and ranks < self.tp_size * self.pp_size:
                self._plan.joins.append(loading.load)
                self._joining = loading.tokens, self.clock()
                if loading.end is not None and loading.end.failed:
                    self._load_ended(loading, loading.end)
            else:
                self._load_ended(loading, loading.end or LoadEnd())

    def reports_due(self, reports: Iterable[str], ends: Mapping[str, LoadEnd]) -> set[str]:
        """Of the reports of loads that the engine has counted, by request, those that stand, beside other connectors:
        one of these may report a load of this connector while ranks of ours still write. So a load of ours is reported
        when ``ends``, which comes before ``loads_finished``, has come from all ranks, and not otherwise."""
        due = set(reports)
        for request_id in due | ends.keys():
            entry = self._loading(request_id)
            if entry is None or not (request_id in self._unreported or entry.life.phase is _R.LOADING):
                continue
            ranks = sum(end.ranks for end in (entry.end, ends.get(request_id)) if end is not None)
            (due.add if ranks >= self.tp_size * self.pp_size else due.discard)(request_id)
        return due

    def step_load_ended(self, request_id: str, end: LoadEnd) -> None:
        """A load inside a step has ended on all ranks, and the engine is about to use the output of the step."""
        entry = self._loading(request_id)
        if entry is not None:
            self._load_ended(entry, end)

    def _loading(self, request_id: str) -> EngineRequest | None:
        """The request of a load whose end is not known here. It, or its load, may be given up; ranks may yet write."""
        entry = self._unreported.get(request_id) or self._requests.get(request_id)
        if entry is None or not entry.tokens:
            return None
        given_up = request_id in self._unreported or entry.life.phase is _R.LOADING
        return entry if given_up or not entry.handed_over else None

    def _load_ended(self, entry: EngineRequest, end: LoadEnd) -> None:
        self._unreported.pop(entry.request_id, None)
        self._settle(entry, "failed" if end.failed else "loaded", end.failed, end)

    def _settle(
        self, entry: EngineRequest, result: PromptResult, reason: PromptReason, end: LoadEnd | None = None
    ) -> None:
        """It is known what became of a request's prompt. What was known first is counted, and nothing after it."""
        if entry.handed_over:
            return
        self._quiet = False
        if entry.is_prefix and result != "plain":
            self._stats.prefix(result, reason)
            if result != "local":
                self._stats.count(f"prefix_tokens_{'read' if result == 'loaded' else 'wasted'}", by=entry.tokens)
        else:
            self._stats.prompt(result, reason)
        end = end or LoadEnd()
        entry.handed_over = {
            "result": result, "reason": reason, "tokens": entry.tokens if result == "loaded" else 0,
            "plane": end.plane, "milliseconds": round(end.milliseconds, 3), "peer": end.peer,
        }  # fmt: skip

    def _end_load(self, request: RequestView) -> dict[str, Any] | None:
        """A request ended. A load that has not begun never does, and a lease that is not needed is released. Returns
        what became of its prompt, where the request asks for it and that is known."""
        entry = self._requests.pop(request.request_id, None)
        if entry is None:
            return None
        awaited = entry.awaited if entry.life.phase is RequestPhase.AWAITED else None
        unanswered = awaited is not None and not (awaited.known or request.rejected or entry.is_prefix)
        loading = entry.life.phase is _R.LOADING
        self._advance(entry, RequestEvent.ENDED)
        if entry.tokens and (loading or not entry.handed_over):
            self._unreported[request.request_id] = entry
        elif params.wants_load(request.params) or entry.is_prefix:
            left: LocalReason = "no_answer" if unanswered else "ended"
            self._settle(entry, "local", "whole_prompt" if awaited is not None and request.whole_prompt else left)
        return entry.handed_over or None if params.wants_report(request.params) else None

    def _loads_planned(self, plan: StepPlan, preempted: Collection[str]) -> StepPlan:
        """The step of ``plan`` was scheduled. Returns its plan. ``preempted``: as ``SchedulerHalf.take_plan``."""
        self.step_load_rule.next_step()
        if (steps := self.steps) is not None:
            if preempted:
                # The engine may have preempted a request before it gave blocks to the loads, and says so only now.
                steps.freed(None)
                if steps.may_use(()):
                    plan = replace(plan, loads=tuple(replace(one, behind=True, seconds=math.inf) for one in plan.loads))
            if self._phases[RequestPhase.LOADING]:
                now = self.clock()
                times = (0.0, math.inf) if plan.idle else (steps.seconds_until_seen(now), steps.step_seconds)
                plan = replace(plan, lead=self.step_load_rule.lead(*times))
            steps.scheduled(loads=not plan.nothing and self._computes_with_loads(plan, steps))
        return plan

    def _computes_with_loads(self, plan: StepPlan, steps: StepsInFlight) -> bool:
        """Whether the step of ``plan`` computes with loads. Where it joins one, note how long that took."""
        if len(plan.joins) == 1:
            tokens, since = self._joining
            steps.admitted(tokens, self.clock() - since)
        return bool(plan.joins) or any(load.now for load in plan.loads)
