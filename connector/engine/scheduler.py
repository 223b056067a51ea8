"""The scheduler half: which prompts to hand over, which to load, and the plan of each step. No vLLM, no I/O.

On D, ``request_lifetime.REQUEST`` decides what becomes of a request; its effects are the parts of the step plans.

A load goes inside the step that computes with it where ``step_load_rule`` permits, else beside the engine's steps. Of
a load beside the steps, vLLM sees the end at the launch of a step, and schedules the request two steps later.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connector.config import Settings
from kvferry.connector.engine.alternatives import alternatives
from kvferry.connector.engine.block_contents import covers, first_held, used_blocks
from kvferry.connector.engine.plan_builder import StepPlanBuilder
from kvferry.connector.engine.prefills import Prefills
from kvferry.connector.engine.prompt_checks import check_kept, check_prompt
from kvferry.connector.engine.rendezvous_params import prompt_of_answer, rendezvous_of
from kvferry.connector.engine.step_load_rule import StepLoadRule
from kvferry.connector.engine.steps_in_flight import StepsInFlight
from kvferry.connector.engine.transfer_params import (
    RemotePrompt,
    check_reachable,
    from_transfer_params,
    wants_load,
    wants_prefill,
)
from kvferry.connector.geometry.engine_types import BlockTable, RequestView, ScheduledTokens
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.protocol import request_lifetime
from kvferry.connector.protocol.request_lifetime import RequestEffect, RequestEvent, RequestPhase, RequestState
from kvferry.connector.protocol.state_machine import Lifetime
from kvferry.connector.protocol.step_plan import (
    KeepLease,
    Load,
    PeerEngine,
    RankAddress,
    RemoteLease,
    Rendezvous,
    RendezvousResult,
    StepPlan,
    pack_ids,
)
from kvferry.connector.protocol.transfer_estimate import EstimateKey, TransferEstimate, TransferEstimates
from kvferry.transport.errors import ProtocolError, quoted
from kvferry.transport.wake import RateLimitedLog

logger = logging.getLogger("vllm.kvferry.scheduler")

_CHILD = re.compile(r"^\d+_.")
"""From a request with ``n > 1`` vLLM makes requests with the ids ``0_ID``, ``1_ID``, …"""


@dataclass(slots=True)
class AwaitedPrompt:
    """D: a prompt that P will hold. ``deadline``: in seconds of the scheduler half's clock. ``result``: P's answer."""

    request: RequestView
    wanted: Rendezvous
    deadline: float
    result: RendezvousResult = field(default_factory=RendezvousResult)


@dataclass(slots=True)
class EngineRequest:
    """A request of the engine, from its first question to its end.

    ``remote_prompt``: what P holds for it; ``awaited``: what D asked P for, and P's answer; ``alternatives``: other P
    engines that hold the same. ``computed_in``: the last step that computed tokens of it; counted only for requests
    that are handed over from here.
    """

    request_id: str
    lifetime: Lifetime[RequestState, RequestEvent, RequestEffect]
    remote_prompt: RemotePrompt | None = None
    awaited: AwaitedPrompt | None = None
    alternatives: tuple[RemoteLease, ...] = ()
    computed_in: int = 0


class SchedulerHalf:
    """One engine's decisions. Called from the engine's scheduler, by one thread."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        tables: Sequence[BlockTable],
        *,
        tp_size: int,
        pp_size: int,
        produces: bool,
        consumes: bool,
        host_id: str = "",
        max_sizes: tuple[int, int] = (MAX_RANKS, MAX_RANKS),
        lookahead: int = 0,
        step_loads: bool = False,
        steps: StepsInFlight | None = None,
        shares_steps: bool = False,
        streams: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            settings: of this engine.
            engine_id: by which its log lines and its peers name it.
            tables: the block tables of a request whose contents are handed over.
            tp_size: tensor-parallel ranks of this engine.
            pp_size: pipeline stages of this engine.
            produces: this engine hands prompts over, as P.
            consumes: this engine loads prompts, as D.
            host_id: names this host; empty where that is unknown.
            max_sizes: the largest tensor- and pipeline-parallel sizes that an engine of this model can have.
            lookahead: prompt tokens at the end that D must compute itself, for the model that drafts.
            step_loads: the engine copes with loads that end in the step that computes with them, also where they fail.
            steps: the engine's steps in flight, to which the caller reports the steps that were processed and the
                blocks that were freed. ``None`` where it cannot report all: then copies wait for the engine's device,
                and no load goes inside a step.
            shares_steps: other engines' steps wait for this engine's, as with data-parallel ranks.
            streams: whether no tokens of the engine come from elsewhere, such as another connector, so that all tokens
                stand that it computes.
            clock: seconds, never going back.
        """
        self._settings = settings
        self._engine_id = engine_id
        self._tables = tuple(tables)
        self._whole = all(table.whole for table in self._tables)
        self._has_states = any(table.kind == "state" for table in self._tables)
        self._lookahead = lookahead
        self._sizes, self._max_sizes = (tp_size, pp_size), max_sizes
        self._log = RateLimitedLog(logger)
        self._produces, self._consumes = produces, consumes
        self._host_id = host_id
        self._requests: dict[str, EngineRequest] = {}  # all requests of the engine
        self._prefills: dict[str, EngineRequest] = {}  # the requests that are handed over from here
        self._plan = StepPlanBuilder(secrets.token_bytes(16))
        self._clock = clock
        self._prompts = Prefills(self._tables, self._plan, clock)
        self._streams = streams
        self._estimates = TransferEstimates(tp_size)
        self._rule = StepLoadRule(settings.step_hold_seconds if step_loads and consumes and steps else 0.0)
        self._steps = steps
        self._others = shares_steps
        self._leases: set[str] = set()  # requests whose lease some rank holds
        self._draining = False

    def set_ranks(self, ranks: Iterable[RankAddress]) -> None:
        """Take the addresses at which this engine's ranks listen."""
        tp_size, pp_size = self._sizes
        ordered = tuple(sorted(ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank)))
        shardings = tuple(sorted({table.sharding for table in self._tables}))
        self._prompts.us = PeerEngine(
            self._engine_id, tp_size, pp_size, self._settings.lease_seconds, ordered, self._host_id, shardings
        )

    # --- D ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Check whether P holds this request's KV. If so, its lease is renewed from now on; if the KV cannot be used,
        the lease is released. Idempotent."""
        if request.request_id in self._requests:
            return
        now = self._clock()
        entry = EngineRequest(request.request_id, Lifetime(request_lifetime.REQUEST, RequestState(), now))
        self._requests[request.request_id] = entry
        if self._produces and wants_prefill(request.params):
            self._prefills[request.request_id] = entry
            self._prompts.add(request)
        try:
            self._check_role(request)
            wanted = rendezvous_of(request.request_id, request.params) if self._consumes else None
            if wanted is not None and not request.whole_prompt:
                entry.awaited = AwaitedPrompt(request, wanted, now + self._settings.handover_timeout_seconds)
                self._advance(entry, request_lifetime.PromptAwaited(wanted))
                return
            remote_prompt = from_transfer_params(request.params, self._max_sizes) if self._consumes else None
            if remote_prompt is None:
                self._advance(entry, request_lifetime.NothingOffered())
                return
            self._offer(entry, request, remote_prompt)
        except ProtocolError as error:
            self._refuse(entry, error)

    def _offer(self, entry: EngineRequest, request: RequestView, remote_prompt: RemotePrompt) -> None:
        """Keep the leases of a request's prompt, and check whether D can use it. Raises ProtocolError: it cannot."""
        entry.remote_prompt = remote_prompt
        check_reachable(remote_prompt.peer, self._host_id)
        usable, left_out = alternatives(request.params, remote_prompt, self._max_sizes, self._host_id)
        for why in left_out:
            self._log.warning("alternative", "kvferry: %s has one P less to load from: %s", request.request_id, why)
        entry.alternatives = usable
        siblings = _CHILD.match(request.request_id) is not None
        leases = (RemoteLease(remote_prompt.token, remote_prompt.peer), *usable)
        keeps = tuple(KeepLease(request.request_id, lease.token, lease.peer, siblings) for lease in leases)
        self._advance(entry, request_lifetime.PromptOffered(keeps))
        if not request.rejected:
            check_prompt(request, remote_prompt)

    def rendezvous_ended(self, results: Mapping[str, RendezvousResult]) -> None:
        """P has answered where its lease was known by name only, or D has given up. By request."""
        for request_id, result in results.items():
            entry = self._requests.get(request_id)
            awaited = None if entry is None else entry.awaited
            if entry is None or awaited is None or entry.lifetime.state.phase is not RequestPhase.AWAITED:
                self._release_unneeded(request_id, entry, result)
                continue
            try:
                if result.error:
                    raise ProtocolError(result.error)
                awaited.result = result
                self._offer(entry, awaited.request, prompt_of_answer(result.params, self._max_sizes))
            except ProtocolError as error:
                self._refuse(entry, error)

    def _release_unneeded(self, request_id: str, entry: EngineRequest | None, result: RendezvousResult) -> None:
        """The request was left, or has ended, while P's answer came: no other request of its id reads under it."""
        with suppress(ProtocolError):  # of an answer that is not used
            prompt = prompt_of_answer(result.params, self._max_sizes)
            if entry is not None and entry.remote_prompt is not None and entry.remote_prompt.token == prompt.token:
                return
            keep = KeepLease(request_id, prompt.token, prompt.peer, siblings=False)
            self._plan.add(request_id, request_lifetime.PlanKeep(keep))
            self._plan.add(request_id, request_lifetime.PlanRelease(prompt.token))

    def _check_role(self, request: RequestView) -> None:
        """One line where a router sends a request of one role to an engine that has only the other."""
        if wants_prefill(request.params) and not self._produces:
            wrong, role, right = "to hand its prompt over (do_remote_decode)", "kv_consumer", "kv_producer"
        elif wants_load(request.params) and not self._consumes:
            wrong, role, right = "to load its prompt (do_remote_prefill)", "kv_producer", "kv_consumer"
        else:
            return
        self._log.warning(
            role,
            "kvferry: %s asks this engine %s, but its kv_role is %s: nothing is handed over; start it as %s or kv_both",
            request.request_id, wrong, role, right,
        )  # fmt: skip

    def _refuse(self, entry: EngineRequest, why: ProtocolError) -> None:
        self._advance(entry, request_lifetime.OfferRefused())
        story = entry.lifetime.story()
        logger.warning("kvferry: %s prefills locally: %s; the request: %s", entry.request_id, why, story)

    def _advance(self, entry: EngineRequest, event: RequestEvent) -> None:
        for effect in entry.lifetime.step(event, self._clock()):
            self._plan.add(entry.request_id, effect)

    def num_new_matched_tokens(self, request: RequestView, num_local: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the ``num_local`` that the engine has, and whether asynchronously. ``None``: P has not
        told of the prompt yet, and the engine must ask again in its next step.

        The engine computes the last prompt token in any case. Where all tables are whole, the result may include this
        token. Otherwise it must not: the engine would free blocks of a window that only that token needs, and a state
        would process that token twice.
        """
        self.on_new_request(request)
        entry = self._requests[request.request_id]
        if self._awaits(entry):
            return None, False
        remote_prompt = entry.remote_prompt
        if entry.lifetime.state.phase is not RequestPhase.OFFERED or remote_prompt is None:
            return 0, False
        prompt = request.num_prompt_tokens
        stop = min(remote_prompt.num_tokens, prompt - max(self._lookahead, 0 if self._whole else 1))
        if min(stop, prompt - 1) <= num_local or request.whole_prompt:
            self._advance(entry, request_lifetime.EngineAnswered(num_local))
            return 0, False
        try:
            check_kept(self._tables, remote_prompt, num_local, stop)
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
        if self._clock() < entry.awaited.deadline:
            return True
        wanted, seconds = entry.awaited.wanted, self._settings.handover_timeout_seconds
        text = f"P at {wanted.host}:{wanted.port} has told nothing of {quoted(wanted.name)} in {seconds:g} s"
        self._refuse(entry, ProtocolError(f"{text}; does the router send both legs, with one transfer_id?"))
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

    # --- P, and the end of every request ------------------------------------------------------------------------

    def num_tokens_for_d(self, request: RequestView) -> int:
        """How many of a new request's last prompt tokens P must not compute, because D computes them.

        A state after the last prompt token cannot be taken back by one token. And the engine gives back the blocks
        outside the window of the *next* token: where a block ends there, D lacks it to compute the last prompt token.
        """
        prompt = request.num_prompt_tokens
        if not (self._produces and wants_prefill(request.params)) or request.whole_prompt or request.rejected:
            return 0
        count = max(self._lookahead, 1 if self._has_states else 0)
        for table in self._tables:
            if table.first_needed(prompt) // table.block_size != table.first_needed(prompt - 1) // table.block_size:
                count = max(count, 1)
        return count if count < prompt else 0

    def request_finished(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are still its own.

        Args:
            request: the request.
            block_ids: its blocks, per block table.
            completed: it ended by itself (stop or length), not by abort or error.

        Returns:
            Whether the blocks stay held until ``finished_sending``, and the parameters for D.
        """
        entry = self._requests.pop(request.request_id, None)
        computed_in = self._plan.step
        if entry is not None:
            self._advance(entry, request_lifetime.RequestEnded())
            if self._prefills.pop(request.request_id, None) is not None:
                computed_in = entry.computed_in
        params = None
        if self._produces and completed and wants_prefill(request.params):
            params = self._lease(request, block_ids, computed_in)
        if params is None:
            self._prompts.give_up(request.request_id)
        return params is not None, params

    def _lease(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], computed_in: int
    ) -> dict[str, Any] | None:
        why = self._cannot_lease(request, block_ids)
        if why is not None:
            logger.warning("kvferry: no hand-over of %s: %s", request.request_id, why)
            return None
        num_tokens = request.num_prompt_tokens
        tables = list(zip(self._tables, block_ids, strict=True))
        packed = tuple(pack_ids(used_blocks(table, ids, num_tokens)) for table, ids in tables)
        self._leases.add(request.request_id)
        kept = tuple((table.kind, table.window, first_held(table, ids)) for table, ids in tables if table.window)
        return self._prompts.lease(request, packed, kept, computed_in)

    def drain(self) -> None:
        """Give no more leases. The leases that are held are served until they end; ``leases_held`` counts them. For an
        engine that is about to end: D prefills what would have been handed over. ``stop_draining`` gives leases again.
        """
        if not self._draining:
            logger.info("kvferry: no more prompts are handed over from here; %d lease(s) are served", len(self._leases))
        self._draining = True

    def stop_draining(self) -> None:
        """Give leases again."""
        self._draining = False

    @property
    def leases_held(self) -> int:
        """The number of leases that have not ended on all ranks. With ``drain`` it falls to 0, at the latest when
        ``lease_cap_seconds`` have passed."""
        return len(self._leases)

    def leases_ended(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported the end of these requests' leases."""
        self._leases.difference_update(request_ids)

    def _cannot_lease(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> str | None:
        tokens, computed = request.num_prompt_tokens, request.num_computed_tokens
        if self._draining:
            return "this engine hands nothing over any more, it is being drained"
        if self._prompts.us is None:
            return "the workers' addresses are unknown"
        if request.prompt_token_ids is None:
            return "its prompt is given as embeddings"
        if computed < tokens:
            return f"{computed} of its {tokens} prompt tokens are computed"
        if self._has_states and computed > tokens:
            return f"its state is that after {computed} tokens, its prompt has {tokens}"
        if any(not covers(table, ids, tokens) for table, ids in zip(self._tables, block_ids, strict=True)):
            return f"its blocks do not cover its {tokens} prompt tokens"
        return None

    # --- every step ---------------------------------------------------------------------------------------------

    def take_plan(
        self,
        *,
        idle: bool = False,
        computed: Collection[str] = (),
        preempted: Collection[str] = (),
        scheduled: Iterable[ScheduledTokens] = (),
    ) -> StepPlan:
        """The work of the workers since the last step.

        Args:
            idle: the engine computes nothing in this step.
            computed: the requests that the engine computes tokens of in this step.
            preempted: the requests whose blocks the engine has taken since the last step.
            scheduled: which tokens the step computes, of the requests in ``computed`` that ``prefills`` names. Without
                them D learns of a prompt when all of it is computed.
        """
        self._prompts.step(scheduled, preempted, streams=self._may_stream, may_lease=not self._draining)
        loads_inside = self._plan.loads_inside
        last = self._plan.step
        after_prefill = any(entry.computed_in == last for entry in self._prefills.values())
        plan = self._plan.take(idle=idle, after_prefill=after_prefill)
        self._rule.next_step()
        if self._steps is not None:
            if preempted:
                self._steps.freed(None)
                plan = self._behind_all(plan, self._steps)
            self._steps.scheduled(loads=loads_inside)
        if self._prefills:
            for request_id in self._prefills.keys() & computed:
                self._prefills[request_id].computed_in = plan.step
        return plan

    @property
    def prefills(self) -> Set[str]:
        """The requests whose prompts are handed over from here, once they are computed."""
        return self._prefills.keys()

    def _may_stream(self, request_id: str) -> bool:
        """Whether the tokens of a prompt stand once they are computed. Those that a load brings may prove to be
        missing, also where the prompt finds them in the prefix cache: a load inside a step ends after that step."""
        loads = self._plan.loads_inside or (self._steps is not None and self._steps.loads_inside)
        return self._streams() and not loads and self._requests[request_id].remote_prompt is None

    @staticmethod
    def _behind_all(plan: StepPlan, steps: StepsInFlight) -> StepPlan:
        """The plan with its loads behind the steps in flight: the engine may have preempted a request before it gave
        blocks to the loads, and says so only now."""
        behind = steps.may_use(())
        loads = tuple(msgspec.structs.replace(load, behind=load.behind or behind) for load in plan.loads)
        return msgspec.structs.replace(plan, loads=loads)
