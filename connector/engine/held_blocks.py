"""How many blocks P's leases hold, and for how long. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class HeldBlocks:
    """The leases of an engine that have not ended on all ranks, by request id, each with its number of blocks.

    Blocks of all block tables count: a block that two leases hold, as prompts with one prefix do, counts twice.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds, never going back."""
        self._clock = clock
        self._leases: dict[str, int] = {}
        self._since = clock()
        self._block_seconds = 0.0  # until ``_since``, since the last ``take_block_ms``
        self.blocks = 0
        """Of all leases."""

    def __len__(self) -> int:
        """How many leases there are."""
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def add(self, request_id: str, blocks: int) -> None:
        """A lease begins."""
        self._pass_time()
        self.blocks += blocks - self._leases.get(request_id, 0)
        self._leases[request_id] = blocks

    def remove(self, request_ids: Iterable[str]) -> None:
        """These leases have ended. Those that are unknown do not count."""
        self._pass_time()
        for request_id in request_ids:
            self.blocks -= self._leases.pop(request_id, 0)

    def take_block_ms(self) -> int:
        """The sum over the blocks of the whole milliseconds for which they were held since the last call; what is left
        of a millisecond counts at the next call."""
        self._pass_time()
        whole = int(self._block_seconds * 1e3)
        self._block_seconds -= whole / 1e3
        return whole

    def _pass_time(self) -> None:
        now = self._clock()
        self._block_seconds += self.blocks * (now - self._since)
        self._since = now
