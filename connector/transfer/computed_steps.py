"""What the engine's thread says about the steps that compute prompts for hand-overs, while they run.

The engine's thread, and the thread that waits for the device, write; the transfer thread reads. Each attribute is
written by one store, which other threads see whole, so nobody waits for a lock.
"""

from __future__ import annotations

from collections.abc import Callable


class PromptBlocks:
    """The blocks of a prompt that P computes, in one life: until the engine takes them back.

    ``lost``: the engine's thread sets it before the device gets work that may reuse a block. So a copy out of the
    blocks that has ended while ``lost`` was not set holds the bytes of the prompt.
    """

    __slots__ = ("lost",)

    def __init__(self) -> None:
        self.lost = False


class ComputedStep:
    """One step that computes parts of prompts. ``advanced`` is called after each change that has bytes leave, by the
    thread that makes it.

    ``blocks``: of each prompt of the step, in the order of the chunks of its plan. ``begun``: all steps before this one
    have ended on the device; said only where that is news. ``num_layers``: of the rank. ``layers``: the layers whose
    bytes of this step lie in the blocks, as (region, layer), of which the first ``computed`` count. ``ended``: the
    device has ended the step.
    """

    __slots__ = ("_advanced", "begun", "blocks", "computed", "ended", "layers", "num_layers")

    def __init__(self, blocks: tuple[PromptBlocks, ...], num_layers: int, advanced: Callable[[], None]) -> None:
        self.blocks, self.num_layers, self._advanced = blocks, num_layers, advanced
        self.begun = self.ended = False
        self.layers: list[tuple[int, int]] = []
        self.computed = 0

    @property
    def progress(self) -> tuple[bool, int, bool]:
        return self.begun, self.computed, self.ended

    def has_begun(self) -> None:
        self.begun = True
        self._advanced()

    def has_computed(self, layers: int) -> None:
        self.computed = layers
        self._advanced()

    def has_ended(self) -> None:
        self.ended = True
        if len(set(self.layers[: self.computed])) < self.num_layers:  # else all of its bytes could leave before
            self._advanced()
