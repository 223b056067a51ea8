"""The scheduler half: which prompts to hand over, which to fetch, what each step tells the workers. No vLLM, no I/O.

On D a request is *offered* until vLLM has decided, then *loading* or *settled*, once for good: vLLM asks again after a
failed load and after preemption, and the same answer would loop for ever.

Most hand-overs go on beside the engine's steps: vLLM schedules the request again once it hears that it has ended, two
steps later. An engine that has no other request gains by waiting for it inside the step that computes with it.
"""

from __future__ import annotations

import enum
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.config import Settings
from kvferry.connector.engine.transfer_params import (
    RemotePrompt,
    check_reachable,
    from_transfer_params,
    prompt_digest,
    to_transfer_params,
    wants_prefill,
)
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.protocol.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    RankAddress,
    StepPlan,
    pack_ids,
)
from kvferry.connector.protocol.transfer_estimate import EstimateKey, TransferEstimate, TransferEstimates
from kvferry.transport.errors import ProtocolError

logger = logging.getLogger("vllm.kvferry.scheduler")

SPARE_BLOCKS = 16
"""Free blocks beside those of a request that is loaded inside a step: with fewer, vLLM 0.26 may preempt it in the next
step, before it hears how the load went, and then deliver what was computed with a failed one."""
NULL_BLOCK = 0
"""What vLLM puts in a block table in place of a block that it gave back."""
_CHILD = re.compile(r"^\d+_.")
"""vLLM names the requests that it makes of one with ``n > 1`` ``0_ID``, ``1_ID``, …"""


class Stage(enum.Enum):
    OFFERED = "offered"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class IncomingRequest:
    """A request on D that may load. ``start``: the first token that the engine does not have, as last asked; ``now``:
    the step that it is scheduled in computes with it."""

    remote_prompt: RemotePrompt
    stage: Stage = Stage.OFFERED
    start: int = 0
    now: bool = False


class SchedulerHalf:
    """One engine's decisions. ``tables``: the block tables of a request whose contents are handed over."""

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
        lookahead: int = 0,
        step_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            lookahead: prompt tokens at the end that D must compute itself, for what it drafts with.
            step_loads: the engine copes with loads that end in the step that computes with them, also where they fail.
        """
        self._settings = settings
        self._engine_id = engine_id
        self._tables = tuple(tables)
        self._whole = all(table.whole for table in self._tables)
        self._has_states = any(table.kind == "state" for table in self._tables)
        self._lookahead = lookahead
        self._sizes = tp_size, pp_size
        self._produces, self._consumes = produces, consumes
        self._host_id = host_id
        self._consumer = secrets.token_bytes(16)
        self._us: PeerEngine | None = None
        self._incoming: dict[str, IncomingRequest | None] = {}
        self._step = 0
        self._clock = clock
        self._estimates = TransferEstimates(tp_size)
        self._step_seconds = settings.step_load_seconds if step_loads and consumes else 0.0
        self.free_blocks: Callable[[], int] = lambda: 0
        """Of the engine's block pool, where that is known."""
        self._alive: set[str] = set()  # all requests of the engine
        self._ran: dict[str, int] = {}  # requests that will be handed over, and the last step that computed them
        self._reset()

    def _reset(self) -> None:
        self._leases: list[LeaseGrant] = []
        self._keeps: list[KeepLease] = []
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        self._releases: list[str] = []

    def set_ranks(self, ranks: Iterable[RankAddress]) -> None:
        """Where this engine's ranks listen, once they do."""
        tp_size, pp_size = self._sizes
        ordered = tuple(sorted(ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank)))
        shardings = tuple(sorted({table.sharding for table in self._tables}))
        self._us = PeerEngine(
            self._engine_id, tp_size, pp_size, self._settings.lease_seconds, ordered, self._host_id, shardings
        )

    # --- D ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """See whether P holds this request's KV; if so, renew its lease from now on, and release it if it is no use."""
        self._alive.add(request.request_id)
        if self._produces and wants_prefill(request.params):
            self._ran.setdefault(request.request_id, 0)
        if request.request_id in self._incoming or not self._consumes:
            return
        try:
            remote_prompt = from_transfer_params(request.params)
            if remote_prompt is not None:
                check_reachable(remote_prompt.peer, self._host_id)
        except ProtocolError as error:
            self._refuse(request, error)
            return
        if remote_prompt is None:
            if request.params:
                self._incoming[request.request_id] = None
            return
        siblings = _CHILD.match(request.request_id) is not None
        self._keeps.append(KeepLease(request.request_id, remote_prompt.token, remote_prompt.peer, siblings))
        if not request.rejected:
            try:
                self._check_prompt(request, remote_prompt)
            except ProtocolError as error:
                self._refuse(request, error)
                self._releases.append(request.request_id)
                return
        self._incoming[request.request_id] = IncomingRequest(remote_prompt)

    def _refuse(self, request: RequestView, why: ProtocolError) -> None:
        logger.warning("kvferry: %s prefills locally: %s", request.request_id, why)
        self._incoming[request.request_id] = None  # said once, not at every question

    def num_new_matched_tokens(self, request: RequestView, num_local: int) -> tuple[int, bool]:
        """Tokens to load beyond the ``num_local`` that the engine has, and whether asynchronously.

        The engine computes the last prompt token in any case. Where all tables are whole it may be told of it; else it
        must not: it would give back what only that token needs of a window, and a state would have seen it twice.
        """
        self.on_new_request(request)
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.stage is not Stage.OFFERED:
            return 0, False
        incoming.start, incoming.now = num_local, False
        prompt = request.num_prompt_tokens
        stop = min(incoming.remote_prompt.num_tokens, prompt - max(self._lookahead, 0 if self._whole else 1))
        if min(stop, prompt - 1) <= num_local:
            return 0, False
        try:
            self._check_kept(incoming.remote_prompt, num_local, stop)
        except ProtocolError as error:
            self._refuse(request, error)
            self._releases.append(request.request_id)
            return 0, False
        if self._in_step(incoming, prompt, stop - num_local):
            incoming.now = True
            return min(stop, prompt - 1) - num_local, False  # vLLM schedules it at once, with a token to compute
        return stop - num_local, True

    def _in_step(self, incoming: IncomingRequest, prompt: int, tokens: int) -> bool:
        """Whether the engine has nothing else to do until a load of ``tokens`` has ended, and that is soon."""
        if not self._step_seconds or len(self._alive) > 1 or not self._whole:
            return False  # a state is copied to where the step works on it before we hear of the step
        if self.free_blocks() < sum(-(-prompt // table.block_size) for table in self._tables) + SPARE_BLOCKS:
            return False
        return (
            self._estimates.seconds(incoming.remote_prompt.peer.engine_id, tokens, self._clock()) <= self._step_seconds
        )

    def after_alloc(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM has decided: load ``num_external`` tokens into these blocks, or nothing."""
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.stage is not Stage.OFFERED:
            return
        if num_external == 0:
            incoming.stage = Stage.SETTLED
            self._releases.append(request.request_id)
            return
        incoming.stage = Stage.SETTLED if incoming.now else Stage.LOADING
        stop = incoming.start + num_external
        tables = list(zip(self._tables, block_ids, strict=True))
        self._loads.append(
            Load(
                request_id=request.request_id,
                token=incoming.remote_prompt.token,
                peer=incoming.remote_prompt.peer,
                block_ids=tuple(pack_ids(_used(table, ids, stop)) for table, ids in tables),
                tokens=tuple(
                    (0, 1) if table.kind == "state" else (max(incoming.start, _first_held(table, ids)), stop)
                    for table, ids in tables
                ),
                prompt=incoming.remote_prompt.prompt,
                now=incoming.now,
            )
        )

    def loads_finished(
        self, request_ids: Iterable[str], estimates: Mapping[EstimateKey, TransferEstimate] | None = None
    ) -> None:
        """These loads were reported, well or ill. ``estimates``: what ranks told, also of loads inside a step."""
        if estimates:
            self._estimates.told(estimates, self._clock())
        for request_id in request_ids:
            incoming = self._incoming.get(request_id)
            if incoming is not None:
                incoming.stage = Stage.SETTLED

    def _check_kept(self, remote_prompt: RemotePrompt, num_local: int, stop: int) -> None:
        """That P still has what our blocks must be filled with: a block is filled whole or not loaded, for the engine
        would offer it to other requests. Where P's blocks are smaller than ours it may have given a part back.

        Raises:
            ProtocolError: it has not; says what is missing.
        """
        if self._has_states and remote_prompt.num_tokens != stop:
            raise ProtocolError(
                f"P's state is that after {remote_prompt.num_tokens} tokens, needed is the one after {stop}"
            )
        for kind, window, kept in remote_prompt.kept:
            ours = [table for table in self._tables if (table.kind, table.window) == (kind, window)]
            first = min(
                (max(num_local, t.first_needed(stop) // t.block_size * t.block_size) for t in ours), default=num_local
            )
            if kept > first:
                raise ProtocolError(
                    f"P kept the window of {window} tokens from token {kept} on, our blocks begin at {first}"
                )

    @staticmethod
    def _check_prompt(request: RequestView, remote_prompt: RemotePrompt) -> None:
        ours = request.num_prompt_tokens
        if remote_prompt.num_tokens > ours:  # fewer are fine: P may have left the last ones to D
            raise ProtocolError(f"P prefilled {remote_prompt.num_tokens} prompt tokens, this request has {ours}")
        if request.prompt_token_ids is None:
            raise ProtocolError("its prompt is given as embeddings, which cannot be told apart from P's")
        prefilled = request.prompt_token_ids
        if remote_prompt.num_tokens < ours:
            prefilled = prefilled[: remote_prompt.num_tokens]
        if prompt_digest(prefilled, request.extra) != remote_prompt.prompt:
            raise ProtocolError("P prefilled another prompt (tokens, LoRA adapter or multi-modal inputs differ)")

    # --- P, and the end of every request ------------------------------------------------------------------------

    def num_tokens_for_d(self, request: RequestView) -> int:
        """How many of a new request's last prompt tokens P must not compute, because D does.

        A state after the last prompt token cannot be taken back by one. And the engine gives back what is outside the
        window of the *next* token, one block too many for computing the last prompt token where a block ends there.
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
        self._alive.discard(request.request_id)
        ran = self._ran.pop(request.request_id, self._step)
        incoming = self._incoming.pop(request.request_id, None)
        if incoming is not None and incoming.stage is Stage.OFFERED:
            self._releases.append(request.request_id)
        elif incoming is not None and incoming.stage is Stage.LOADING:
            self._cancels.append(request.request_id)
        if not (self._produces and completed and wants_prefill(request.params)):
            return False, None
        return self._lease(request, block_ids, ran)

    def _lease(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], ran: int
    ) -> tuple[bool, dict[str, Any] | None]:
        tokens = request.num_prompt_tokens
        why = None
        if self._us is None:
            why = "the workers have not told their addresses"
        elif request.prompt_token_ids is None:
            why = "its prompt is given as embeddings"
        elif request.num_computed_tokens < tokens:
            why = f"{request.num_computed_tokens} of its {tokens} prompt tokens are computed"
        elif self._has_states and request.num_computed_tokens > tokens:
            why = f"its state is that after {request.num_computed_tokens} tokens, its prompt has {tokens}"
        elif any(not _covers(table, ids, tokens) for table, ids in zip(self._tables, block_ids, strict=True)):
            why = f"its blocks do not cover its {tokens} prompt tokens"
        if why is not None:
            logger.warning("kvferry: no hand-over of %s: %s", request.request_id, why)
            return False, None
        assert self._us is not None and request.prompt_token_ids is not None
        token = secrets.token_bytes(16)
        tables = list(zip(self._tables, block_ids, strict=True))
        packed = tuple(pack_ids(_used(table, ids, tokens)) for table, ids in tables)
        digest = prompt_digest(request.prompt_token_ids, request.extra)
        self._leases.append(LeaseGrant(request.request_id, token, tokens, packed, digest, ran))
        kept = tuple((table.kind, table.window, _first_held(table, ids)) for table, ids in tables if table.window)
        return True, to_transfer_params(RemotePrompt(token, tokens, digest, self._us, kept))

    # --- every step ---------------------------------------------------------------------------------------------

    def take_plan(self, *, idle: bool = False, computed: Collection[str] = ()) -> StepPlan:
        """What the workers are to do since the last step. ``idle``: the engine computes nothing in this one;
        ``computed``: the requests that it computes tokens of."""
        self._step += 1
        if self._ran:
            self._ran |= dict.fromkeys(self._ran.keys() & computed, self._step)
        plan = StepPlan(
            consumer=self._consumer,
            leases=tuple(self._leases),
            keeps=tuple(self._keeps),
            loads=tuple(self._loads),
            cancels=tuple(self._cancels),
            releases=tuple(self._releases),
            idle=idle,
            step=self._step,
        )
        self._reset()
        return plan


def _first_held(table: BlockTable, block_ids: Sequence[int]) -> int:
    """The first token from which on no block was given back."""
    if table.whole:
        return 0
    gone = next((place for place in reversed(range(len(block_ids))) if block_ids[place] == NULL_BLOCK), -1)
    return (gone + 1) * table.block_size


def _used(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> list[int]:
    """The blocks that matter once ``num_computed`` tokens are: all, or the one that holds the state after them."""
    if table.kind == "state":
        place = (num_computed - 1) // table.block_size
        return list(block_ids[place : place + 1])
    return list(block_ids)


def _covers(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> bool:
    """Whether the blocks reach as far as ``num_computed`` tokens, and the last of them is still held."""
    place = (num_computed - 1) // table.block_size
    return place < len(block_ids) and (table.whole or block_ids[place] != NULL_BLOCK)
