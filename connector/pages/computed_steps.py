"""What the engine's thread says about the steps that compute prompts for hand-overs, while they run.

The engine's thread, and the thread that waits for the device, write; the transfer thread reads. Each attribute is
written by one store, which other threads see whole, so nobody waits for a lock, but where a grant is posted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.transport.grant_board import GrantBoard

NEARLY_SECONDS = 8e-3
"""How long before its end a step counts as nearly ended. A D that hears of it needs 3 ms at least until its step waits
for the bytes, so D holds up a step of others for 5 ms."""


class PromptBlocks:
    """The blocks of a prompt in one life: until the engine takes them back, or their lease ends.

    ``lost``: before the lease, the engine's thread sets it, before the device gets work that may reuse a block. So a
    copy out of the blocks that has ended while ``lost`` was not set holds the bytes of the prompt. A D that reads the
    blocks by itself has the same proof: a grant that is posted is withdrawn together with it.
    """

    __slots__ = ("_lock", "lost", "posted")

    def __init__(self) -> None:
        self.lost = False
        self.posted: tuple[GrantBoard, int, bytes] | None = None
        self._lock = threading.Lock()

    def lose(self) -> None:
        """The engine takes the blocks back. Idempotent. The store of the withdrawal comes before those of the engine
        into the blocks: between them lie locks that the engine's thread takes."""
        with self._lock:
            self.lost = True
            if self.posted is not None:
                self.posted[0].withdraw(self.posted[1])
                self.posted = None

    def post(self, board: GrantBoard, key: bytes, text: bytes) -> None:
        """Post a grant of the blocks, unless they are lost. One that is posted with this text stands on; with another
        one it is withdrawn."""
        with self._lock:
            if self.posted is not None and self.posted[2] != text:
                self.posted[0].withdraw(self.posted[1])
                self.posted = None
            if self.posted is None and not self.lost and (place := board.post(key, text)) is not None:
                self.posted = board, place, text


class ComputedStep:
    """One step that computes parts of prompts. ``advanced`` is called after each change that has bytes leave, by the
    thread that makes it; ``over`` when the device has ended the step, and before that once it nearly has.
    ``clock``: seconds.

    ``blocks``: of each prompt of the step, in the order of the chunks of its plan. ``begun``: all steps before this one
    have ended on the device; said only where that is news. ``num_layers``: of the rank. ``layers``: the layers whose
    bytes of this step lie in the blocks, as (region, layer), of which the first ``computed`` count. ``nearly``: the
    other layers should take ``NEARLY_SECONDS`` at most. ``ended``: the device has ended the step.
    """

    def __init__(
        self,
        blocks: tuple[PromptBlocks, ...],
        num_layers: int,
        advanced: Callable[[], None],
        over: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.blocks, self.num_layers, self._advanced, self._over = blocks, num_layers, advanced, over
        self._clock = clock
        self.begun = self.nearly = self.ended = False
        self._first: tuple[int, float] | None = None  # layers computed, and when
        self.layers: list[tuple[int, int]] = []
        self.computed = 0

    @property
    def progress(self) -> tuple[bool, int, bool]:
        return self.begun, self.computed, self.ended

    def has_begun(self) -> None:
        self.begun = True
        self._advanced()

    def has_computed(self, layers: int) -> None:
        now = self._clock()
        first, before = self._first = self._first or (layers, now)
        left, done = self.num_layers - layers, layers - first
        nearly = done > 0 and not self.nearly and left * (now - before) <= NEARLY_SECONDS * done
        self.nearly |= nearly
        self.computed = layers  # after ``nearly``, by which the transfer thread looks at the step again
        self._advanced()
        if nearly:
            self._over()

    def has_ended(self) -> None:
        self.ended = True
        if len(set(self.layers[: self.computed])) < self.num_layers:  # else all of its bytes could leave before
            self._advanced()
        self._over()
