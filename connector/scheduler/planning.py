"""What the two planners of the scheduler half share: the engine as they know it, the next step plan, and the blocks
that go into it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.wire.metrics import HandoverStats
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    LeftAnswer,
    Load,
    LookupResult,
    Prefill,
    PrefillChunk,
    PrefillStop,
    PrefixOffer,
    PromptLookup,
    QueuedPrompt,
    StepPlan,
    UnneededLease,
    pack_ids,
)
from kvferry.transport.limited_log import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.scheduler")

NULL_BLOCK = 0
"""vLLM puts this number in a block table in place of a block that it freed."""


@dataclass(eq=False)
class EngineFacts:
    """One engine, and the plan of its next step."""

    settings: Settings  # As ``load_settings`` gives them
    engine_id: str
    """By which its log lines and its peers name it."""
    tables: Sequence[BlockTable]
    """The block tables of a request whose contents are handed over."""
    _: KW_ONLY
    tp_size: int  # Tensor-parallel ranks of a stage
    pp_size: int  # Pipeline stages
    produces: bool
    """It hands prompts over, as P."""
    consumes: bool
    """It loads prompts, as D."""
    host_id: str = ""
    """Names this host; empty where that is unknown."""
    max_sizes: tuple[int, int] = (MAX_RANKS, MAX_RANKS)
    """The largest tensor- and pipeline-parallel sizes that an engine of this model can have."""
    lookahead: int = 0
    """Prompt tokens at the end that D must compute itself, for the model that drafts."""
    step_loads: bool = False
    """The engine copes with loads that end in the step that computes with them, also where they fail."""
    steps: StepsInFlight | None = None
    """The engine's steps in flight, to which the caller reports the steps that were processed and the blocks that were
    freed. ``None`` where it cannot report all: then copies wait for the engine's device, and no load goes inside a
    step."""
    clears_blocks: bool = False
    """The engine fills new blocks with zeros before a step that computes with them, also those of a load inside it."""
    drafts: int = 0
    """Tokens that the engine drafts for a step at most."""
    shares_steps: bool = False
    """Other engines' steps wait for this engine's, as with data-parallel ranks."""
    streams: Callable[[], bool] = lambda: True
    """Whether no tokens of the engine come from elsewhere, such as another connector, so that all tokens stand that it
    computes."""
    is_paused: Callable[[], bool] = lambda: False
    """Whether the engine begins no new request. Once this has lasted ``PAUSE_SECONDS``, leases end."""
    prefix_seed: bytes = b""
    """A digest of the model, by which prefixes are told from those of others; empty where none is offered or read."""
    watch_blocks: Callable[[Iterable[int]], None] = lambda blocks: None
    """Has the engine call ``block_reused`` when it gives one of these blocks to another request."""
    look_up: Callable[[PromptLookup | None], Mapping[str, LookupResult] | None] = lambda wanted: None
    """Has the engine's only rank ask at once, before the step is scheduled, or wait for what it has asked. Returns the
    answers that have come; ``None``: the rank is in another process, and asks with the step's plan."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, never going back."""

    def __post_init__(self) -> None:
        self._whole = all(table.whole for table in self.tables)
        self._plan = StepPlanBuilder(secrets.token_bytes(16))
        self._log, self._failed = RateLimitedLog(logger), RateLimitedLog(logger, per_key=FAILED_LINES)
        self._stats = HandoverStats("scheduler")
        self._quiet = False  # there was nothing to report when the metrics were taken last


@dataclass(eq=False)
class StepPlanBuilder:
    """Collects the parts of one step plan after the other; each list is one of ``StepPlan``."""

    decode_engine: bytes
    """Names this life of this engine to P."""
    step: int = 0
    """The number of the last plan that was taken."""
    ends_leases: bool = False
    urgent: bool = False
    """Whether the engine must take the next plan also where it has no request."""
    leases: list[LeaseGrant] = field(default_factory=list)
    keeps: list[KeepLease] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[UnneededLease] = field(default_factory=list)
    queued: list[QueuedPrompt] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)
    stops: list[PrefillStop] = field(default_factory=list)
    lookups: list[PromptLookup] = field(default_factory=list)
    left: list[LeftAnswer] = field(default_factory=list)
    offers: list[PrefixOffer] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    joins: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nothing = {
            idle: StepPlan(decode_engine=self.decode_engine, idle=idle, nothing=True) for idle in (False, True)
        }

    def leave(self, left: LeftAnswer) -> None:
        """Add that a request does not need P's answer any more."""
        for number, asked in enumerate(self.lookups):
            if asked.request_id == left.request_id:
                self.lookups[number] = replace(asked, ended=left)
                return
        self.left.append(left)

    @property
    def loads_inside(self) -> bool:
        """Whether the next step computes with the tokens of a load that may fail yet."""
        return bool(self.joins) or any(load.now for load in self.loads)

    def take(self, *, idle: bool, after_prefill: bool) -> StepPlan:
        """The plan of the next step, with everything that was added since the last one."""
        self.step += 1
        self.urgent = False
        if not (after_prefill or self.ends_leases or any(map(vars(self).get, _LISTS))):  # as in most steps
            return self._nothing[idle]
        parts: dict[str, Any] = {name: tuple(vars(self)[name]) for name in _LISTS}
        plan = StepPlan(
            decode_engine=self.decode_engine, idle=idle, step=self.step, after_prefill=after_prefill,
            ends_leases=self.ends_leases, **parts | {"reused": pack_ids(self.reused)},
        )  # fmt: skip
        self.ends_leases = False
        for name in _LISTS:
            setattr(self, name, [])
        return plan


_LISTS = tuple(each.name for each in fields(StepPlanBuilder) if each.default_factory is list)


def first_held(table: BlockTable, block_ids: Sequence[int]) -> int:
    """The first token from which on the engine has freed no block of a request outside a window."""
    if table.whole:
        return 0
    gone = next((place for place in reversed(range(len(block_ids))) if block_ids[place] == NULL_BLOCK), -1)
    return (gone + 1) * table.block_size


def used_blocks(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> list[int]:
    """The blocks that matter once ``num_computed`` tokens are computed: of a table of tokens the blocks of these
    tokens, without those behind them, which the engine may have for drafts; of a table of states the one block that
    holds the state after these tokens."""
    place = (num_computed - 1) // table.block_size
    return list(block_ids[place if table.kind == "state" else 0 : place + 1])


def covers(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> bool:
    """Whether the blocks reach as far as ``num_computed`` tokens, and the engine still holds the last of them."""
    place = (num_computed - 1) // table.block_size
    return place < len(block_ids) and (table.whole or block_ids[place] != NULL_BLOCK)
