"""A read of P's pages by D itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.geometry.byte_ranges import byte_ranges, join_ranges
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.channels import ByteRanges, Copy, PageRead

Side = tuple[PageBox, Pages]
"""A box of D's pages, and P's pages in the same form."""


class SpanRead(PageRead):
    """The spans of one read, as boxes of D's pages with P's pages. ``alone``: no other hand-over could go on during the
    copy."""

    def __init__(self, caches: RankCaches, sides: Sequence[Side], *, alone: bool) -> None:
        self._caches, self._sides, self._alone = caches, sides, alone

    def byte_ranges(self) -> ByteRanges:
        return join_ranges([self._ranges(box, theirs) for box, theirs in self._sides])

    def _ranges(self, box: PageBox, theirs: Pages) -> ByteRanges:
        row_bytes = self._caches.views[box.region].row_bytes
        return byte_ranges(self._caches.pages(box), theirs, box.num_heads, box.num_tokens, row_bytes)

    def launch(self) -> Copy:
        return self._caches.fetch(self._sides, alone=self._alone)
