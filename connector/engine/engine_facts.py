"""What both planners of the scheduler half know of their engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.step_loads.steps_in_flight import StepsInFlight


@dataclass(eq=False)
class EngineFacts:
    """One engine."""

    settings: Settings
    engine_id: str
    """By which its log lines and its peers name it."""
    tables: Sequence[BlockTable]
    """The block tables of a request whose contents are handed over."""
    _: KW_ONLY
    tp_size: int
    pp_size: int
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
    shares_steps: bool = False
    """Other engines' steps wait for this engine's, as with data-parallel ranks."""
    streams: Callable[[], bool] = lambda: True
    """Whether no tokens of the engine come from elsewhere, such as another connector, so that all tokens stand that it
    computes."""
    is_paused: Callable[[], bool] = lambda: False
    """Whether the engine begins no new request. Once this has lasted ``PAUSE_SECONDS``, leases end."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, never going back."""
