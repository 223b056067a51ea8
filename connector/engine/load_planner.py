"""D's part of the scheduler half: which prompts to load, from which P, and inside a step or beside the steps. Pure.

``request_lifetime.REQUEST`` decides what becomes of a request; its effects are the parts of the step plans.

A load goes inside the step that computes with it where ``step_load_rule`` permits, else beside the engine's steps. Of
a load beside the steps, vLLM sees the end at the launch of a step, and schedules the request two steps later.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.connector.engine import prompt_checks, request_lifetime
from kvferry.connector.engine.alternatives import alternatives
from kvferry.connector.engine.block_contents import first_held, used_blocks
from kvferry.connector.engine.plan_builder import StepPlanBuilder
from kvferry.connector.engine.rendezvous_params import prompt_of_answer, rendezvous_of
from kvferry.connector.engine.request_lifetime import RequestEffect, RequestEvent, RequestPhase, RequestState
from kvferry.connector.engine.transfer_params import RemotePrompt, check_reachable, from_transfer_params
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.step_loads.step_load_rule import StepLoadRule
from kvferry.connector.step_loads.steps_in_flight import StepsInFlight
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeftAnswer,
    Load,
    PeerEngine,
    RemoteLease,
    Rendezvous,
    RendezvousResult,
    StepPlan,
    pack_ids,
)
from kvferry.connector.wire.transfer_estimate import EstimateKey, TransferEstimate, TransferEstimates
from kvferry.transport.errors import ProtocolError, quoted
from kvferry.transport.wake import RateLimitedLog

logger = logging.getLogger("vllm.kvferry.scheduler")

_CHILD = re.compile(r"^\d+_.")
"""From a request with ``n > 1`` vLLM makes requests with the ids ``0_ID``, ``1_ID``, …; its scheduler sees neither
``n`` nor the parent. vLLM's servers put ``cmpl-`` or the like before a client's id. Without a server a client may give
an id of this form: its lease ends ``SIBLING_SECONDS`` later, as after any request with ``n > 1``."""


MAX_PATIENCE = 10
"""How many times ``handover_timeout_seconds`` a request waits at most for a prompt that P's engine has in its queue, or
under way: P says so again and again, and a P that never ends it may be one that means harm."""


@dataclass(slots=True)
class AwaitedPrompt:
    """A prompt that P will hold. ``deadline``: in seconds of the scheduler half's clock; each time P says that its
    engine has the prompt, it begins anew, up to ``end``. ``known``: P has said so. ``result``: P's answer."""

    request: RequestView
    wanted: Rendezvous
    deadline: float
    end: float
    known: bool = False
    result: RendezvousResult = field(default_factory=RendezvousResult)


@dataclass(slots=True)
class EngineRequest:
    """A request of the engine, from its first question to its end.

    ``remote_prompt``: what P holds for it; ``awaited``: what D asked P for, and P's answer; ``alternatives``: other P
    engines that hold the same.
    """

    request_id: str
    lifetime: Lifetime[RequestState, RequestEvent, RequestEffect]
    remote_prompt: RemotePrompt | None = None
    awaited: AwaitedPrompt | None = None
    alternatives: tuple[RemoteLease, ...] = ()
    traceparent: str = ""


class LoadPlanner:
    """The requests of the engine, and their loads."""

    def __init__(
        self,
        tables: Sequence[BlockTable],
        plan: StepPlanBuilder,
        rule: StepLoadRule,
        steps: StepsInFlight | None,
        *,
        tp_size: int,
        consumes: bool,
        host_id: str,
        max_sizes: tuple[int, int],
        lookahead: int,
        shares_steps: bool,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            plan: where the parts of the step plans go.
            rule: which loads go inside a step.
            timeout: seconds that a request waits for P's answer, the time not counted for which P says that it comes.
            tables, steps, tp_size, consumes, host_id, max_sizes, lookahead, shares_steps, clock: as ``SchedulerHalf``
                takes them.
        """
        self._tables = tuple(tables)
        self._whole = all(table.whole for table in self._tables)
        self._plan = plan
        self._rule = rule
        self._steps = steps
        self._consumes = consumes
        self._host_id = host_id
        self._max_sizes = max_sizes
        self._lookahead = lookahead
        self._others = shares_steps
        self._timeout = timeout
        self._clock = clock
        self._estimates = TransferEstimates(tp_size)
        self._requests: dict[str, EngineRequest] = {}  # all requests of the engine
        self._phases: Counter[RequestPhase] = Counter()  # how many requests are in each phase but the first and last
        self._log = RateLimitedLog(logger)

    def __contains__(self, request_id: str) -> bool:
        """Whether this is a request of the engine."""
        return request_id in self._requests

    def new_request(self, request: RequestView) -> None:
        """Check whether P holds this request's KV. If so, its lease is renewed from now on."""
        now = self._clock()
        lifetime = Lifetime(request_lifetime.REQUEST, RequestState(), now)
        entry = EngineRequest(request.request_id, lifetime, traceparent=request.traceparent)
        self._requests[request.request_id] = entry
        try:
            wanted = rendezvous_of(request.request_id, request.params) if self._consumes else None
            if wanted is not None:
                wanted = msgspec.structs.replace(wanted, traceparent=request.traceparent)
                end = now + MAX_PATIENCE * self._timeout
                entry.awaited = AwaitedPrompt(request, wanted, now + self._timeout, end)
                self._advance(entry, request_lifetime.PromptAwaited(wanted))
                return
            remote_prompt = from_transfer_params(request.params, self._max_sizes) if self._consumes else None
            if remote_prompt is None:
                self._advance(entry, request_lifetime.NothingOffered())
            else:
                self._offer(entry, request, remote_prompt)
        except ProtocolError as error:
            self._refuse(entry, error)

    def _offer(self, entry: EngineRequest, request: RequestView, remote_prompt: RemotePrompt) -> None:
        """Keep the leases of a request's prompt, if D can use it. Raises ProtocolError: it cannot. Such a lease may be
        another request's, so D neither keeps nor releases it, unless only the adapter is another one."""
        check_reachable(remote_prompt.peer, self._host_id)
        # The prompt of a rejected request is a placeholder. Where P's token came with it, the lease is its own.
        if not request.rejected or entry.awaited is not None:
            prompt_checks.check_prompt(request, remote_prompt)
        entry.remote_prompt = remote_prompt
        usable, left_out = alternatives(request.params, remote_prompt, self._max_sizes, self._host_id)
        for why in left_out:
            self._log.warning("alternative", "kvferry: %s has one P less to load from: %s", request.request_id, why)
        entry.alternatives = usable
        siblings = _CHILD.match(request.request_id) is not None
        leases = (RemoteLease(remote_prompt.token, remote_prompt.peer), *usable)
        keeps = tuple(KeepLease(request.request_id, lease.token, lease.peer, siblings) for lease in leases)
        self._advance(entry, request_lifetime.PromptOffered(keeps))
        prompt_checks.check_adapter(request, remote_prompt)  # the lease is this request's, and is released

    def rendezvous_told(self, results: Mapping[str, RendezvousResult]) -> None:
        """As ``SchedulerHalf.rendezvous_told``."""
        for request_id, result in results.items():
            entry = self._requests.get(request_id)
            awaited = None if entry is None else entry.awaited
            if entry is None or awaited is None or entry.lifetime.state.phase is not RequestPhase.AWAITED:
                continue  # the ranks know that the answer is not needed, and release the lease
            if result.known:
                awaited.known = True
                awaited.deadline = min(self._clock() + self._timeout, awaited.end)
                continue
            try:
                if result.error:
                    raise ProtocolError(result.error)
                awaited.result = result
                self._offer(entry, awaited.request, prompt_of_answer(result.params, self._max_sizes))
                if awaited.request.whole_prompt:  # the engine computes it, and does not ask again
                    self._advance(entry, request_lifetime.LoadDeclined())
            except ProtocolError as error:
                self._refuse(entry, error)

    def reset(self) -> bool:
        """D's caches were reset: what P has computed before is not loaded. Loads that run are cancelled; they are
        reported as any other. Returns whether none runs."""
        phases = RequestPhase.AWAITED, RequestPhase.OFFERED, RequestPhase.LOADING
        for entry in [each for each in self._requests.values() if each.lifetime.state.phase in phases]:
            self._plan.urgent = True
            self._refuse(entry, ProtocolError("this engine's caches were reset"))
        return not self.num_in(RequestPhase.LOADING)

    def loads_itself(self, request_id: str) -> bool:
        """Whether tokens of a request come from a load, or may."""
        entry = self._requests.get(request_id)
        return entry is not None and (entry.remote_prompt is not None or entry.awaited is not None)

    def _refuse(self, entry: EngineRequest, why: ProtocolError) -> None:
        self._advance(entry, request_lifetime.OfferRefused())
        story = entry.lifetime.story()
        logger.warning("kvferry: %s prefills locally: %s; the request: %s", entry.request_id, why, story)

    def _advance(self, entry: EngineRequest, event: RequestEvent) -> None:
        before = entry.lifetime.state.phase
        for effect in entry.lifetime.step(event, self._clock()):
            if isinstance(effect, request_lifetime.PlanLeave) and entry.awaited is not None:
                self._plan.leave(LeftAnswer(entry.request_id, prompt_checks.possible_digests(entry.awaited.request)))
            else:
                self._plan.add(entry.request_id, effect)
        self._phases[before] -= 1
        self._phases[entry.lifetime.state.phase] += 1

    @property
    def active(self) -> bool:
        """Whether a request waits for P or for its load."""
        phases = self._phases
        return bool(phases[RequestPhase.AWAITED] or phases[RequestPhase.OFFERED] or phases[RequestPhase.LOADING])

    def num_in(self, phase: RequestPhase) -> int:
        """How many requests are in one of the phases from AWAITED to SETTLED."""
        return self._phases[phase]

    def num_new_matched_tokens(self, request: RequestView, num_local: int) -> tuple[int | None, bool]:
        """As ``SchedulerHalf.num_new_matched_tokens``, of a request of the engine."""
        entry = self._requests[request.request_id]
        if self._awaits(entry):
            return (0 if request.whole_prompt else None), False
        remote_prompt = entry.remote_prompt
        if entry.lifetime.state.phase is not RequestPhase.OFFERED or remote_prompt is None:
            return 0, False
        prompt = request.num_prompt_tokens
        stop = min(remote_prompt.num_tokens, prompt - max(self._lookahead, 0 if self._whole else 1))
        if min(stop, prompt - 1) <= num_local or request.whole_prompt:
            self._advance(entry, request_lifetime.EngineAnswered(num_local))
            return 0, False
        try:
            prompt_checks.check_kept(self._tables, remote_prompt, num_local, stop)
        except ProtocolError as error:
            self._refuse(entry, error)
            return 0, False
        streams = entry.awaited is not None and entry.awaited.result.streams  # it ends when P has computed the prompt
        in_step = not streams and self._in_step(remote_prompt.peer, stop - num_local)
        self._advance(entry, request_lifetime.EngineAnswered(num_local, in_step))
        if in_step:
            return min(stop, prompt - 1) - num_local, False  # vLLM schedules it at once, with a token to compute
        return stop - num_local, True

    def _awaits(self, entry: EngineRequest) -> bool:
        """Whether a request waits for P's answer. Ends the wait when it has lasted long enough."""
        if entry.lifetime.state.phase is not RequestPhase.AWAITED or entry.awaited is None:
            return False
        wanted, deadline = entry.awaited.wanted, entry.awaited.deadline
        if self._clock() < deadline:
            return True
        name = quoted(wanted.name)
        if deadline == entry.awaited.end:
            patience = MAX_PATIENCE * self._timeout
            text = f"P at {wanted.host}:{wanted.port} has had {name} for {patience:g} s, and has not computed it"
        else:
            text = f"P at {wanted.host}:{wanted.port} has told nothing of {name} in {self._timeout:g} s; "
            asked = "does the router send both legs, with one transfer_id?"
            text += "it had the prompt: has its engine stopped?" if entry.awaited.known else asked
        self._refuse(entry, ProtocolError(text))
        return False

    def _in_step(self, peer: PeerEngine, tokens: int) -> bool:
        """Whether a load of ``tokens`` may go inside the step that is being scheduled."""
        if not self._whole or self._steps is None:
            return False  # vLLM copies a state to where the step works on it before the connector sees the step
        now = self._clock()
        seconds = self._estimates.seconds(peer.engine_id, tokens, now)
        # Copies that must wait for the steps in flight gain nothing from the time that these take.
        left = 0.0 if self._steps.unknown_freed else self._steps.seconds_left(now)
        return self._rule.fits(seconds, left, others=self._others or len(self._requests) > 1)

    def after_alloc(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM has decided: load ``num_external`` tokens into these blocks, or nothing."""
        entry = self._requests.get(request.request_id)
        if entry is None or entry.lifetime.state.phase is not RequestPhase.OFFERED or entry.remote_prompt is None:
            return
        if num_external == 0:
            self._advance(entry, request_lifetime.LoadDeclined())
        else:
            load = self._load(entry, entry.remote_prompt, block_ids, num_external)
            if load.now:
                self._rule.planned(self._estimates.seconds(load.peer.engine_id, num_external, self._clock()))
            self._advance(entry, request_lifetime.BlocksAllocated(load))

    def _load(
        self,
        entry: EngineRequest,
        remote_prompt: RemotePrompt,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
    ) -> Load:
        state = entry.lifetime.state
        stop = state.start + num_external
        tables = list(zip(self._tables, block_ids, strict=True))
        result = RendezvousResult() if entry.awaited is None else entry.awaited.result
        written = (block_id for table, ids in tables for block_id in ids[state.start // table.block_size :])
        return Load(
            request_id=entry.request_id,
            token=remote_prompt.token,
            peer=remote_prompt.peer,
            block_ids=tuple(pack_ids(used_blocks(table, ids, stop)) for table, ids in tables),
            tokens=tuple(
                (0, 1) if table.kind == "state" else (max(state.start, first_held(table, ids)), stop)
                for table, ids in tables
            ),
            prompt=remote_prompt.prompt,
            now=state.in_step,
            behind=self._steps is None or self._steps.may_use(written),
            alternatives=entry.alternatives,
            found=result.found,
            step_tokens=result.step_tokens,
            traceparent=entry.traceparent,
        )

    def loads_finished(
        self, request_ids: Iterable[str], estimates: Mapping[EstimateKey, TransferEstimate] | None = None
    ) -> None:
        """The workers have reported these loads, whether they failed or not. ``estimates``: how long loads took that
        the ranks measured, also loads inside a step."""
        if estimates:
            self._estimates.observe(estimates, self._clock())
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None:
                self._advance(entry, request_lifetime.LoadReported())

    def request_finished(self, request_id: str) -> None:
        """A request ended. A load that has not begun never does, and a lease that is not needed is released."""
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self._advance(entry, request_lifetime.RequestEnded())

    def step_planned(self, plan: StepPlan, preempted: Collection[str]) -> StepPlan:
        """The step of ``plan`` was scheduled. Returns its plan. ``preempted``: as ``SchedulerHalf.take_plan``."""
        self._rule.next_step()
        if self._steps is not None:
            if preempted:
                self._steps.freed(None)
                plan = self._behind_all(plan, self._steps)
            self._steps.scheduled(loads=not plan.nothing and any(load.now for load in plan.loads))
        return plan

    @staticmethod
    def _behind_all(plan: StepPlan, steps: StepsInFlight) -> StepPlan:
        """The plan with its loads behind the steps in flight: the engine may have preempted a request before it gave
        blocks to the loads, and says so only now."""
        behind = steps.may_use(())
        loads = tuple(msgspec.structs.replace(load, behind=load.behind or behind) for load in plan.loads)
        return msgspec.structs.replace(plan, loads=loads)
