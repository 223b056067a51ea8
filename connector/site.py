"""One rank's own side of every hand-over: its caches, its identity, its settings. Shared by both halves of the mover.

Axes ``[L, B, H, N, C]``: layers, blocks, KV heads, tokens in a block, content bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.connector.config import Settings
from kvferry.connector.context import Blocks, Share, common_blocks
from kvferry.connector.copies import Copies, Copy
from kvferry.connector.errors import GeometryError, IncompatiblePeerError
from kvferry.connector.geometry import GroupGeometry, PageLayout, RankGeometry
from kvferry.connector.metrics import HandoverStats
from kvferry.connector.protocol import Span
from kvferry.connector.runs import reach, wire_ordered
from kvferry.connector.source import Source
from kvferry.connector.spans import chunks
from kvferry.connector.view import CacheView, kernel_block_ids, row_bases
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.launch import prepare
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport.gate import CurveKeys
from kvferry.transport.plane import CPU, Pieces, Plane
from kvferry.transport.wake import RateLimitedLog

if TYPE_CHECKING:
    from kvferry.kernels.paged_copy_triton import PagesThere

Ids = npt.NDArray[np.int64]

MIN_PIECE_BYTES = 2048
"""Shorter pieces of pages are packed into a slot before they are sent, and unpacked from one."""
BRIEF_BYTES, BRIEF_LOCAL_BYTES = 128 << 20, 32 << 20
"""What a GPU reads from another in 0.4 ms, or packs and unpacks in less where it has nothing else to do, and what it
packs or unpacks on a few SMs; waking another thread, and then the mover, takes nearly as long."""


@dataclass(frozen=True)
class Caches:
    """The KV caches of one rank: one view per region, and what they cover.

    ``keep`` holds the tensors that the views point into.
    """

    geometry: RankGeometry
    views: tuple[CacheView, ...]
    copies: Copies
    keep: object = None

    @property
    def device(self) -> torch.device:
        return self.copies.device

    def kernel_ids(self, group: int, block_ids: Ids) -> Ids:
        """Manager block ids as kernel block ids. Raises GeometryError for an id out of range."""
        return kernel_block_ids(self.views[group], block_ids)

    def check_held(self, group: int, kernel_ids: Ids, start: int, stop: int) -> None:
        """That a region's blocks cover our share of tokens ``[start, stop)``, and that the engine gave none back.

        Raises:
            GeometryError: they do not, or the null block stands for one.
        """
        view, geometry = self.views[group], self.geometry.groups[group]
        start, stop = geometry.share.count(start), geometry.share.count(stop)
        covered = len(kernel_ids) * view.block_size
        if stop > covered:
            raise GeometryError(f"tokens up to {stop} asked for, blocks hold {covered}")
        if geometry.kind in ("full", "mla"):
            return  # an engine other than vLLM may use block 0
        blocks = kernel_ids[start // view.block_size : -(-stop // view.block_size)]
        gone = np.flatnonzero(blocks < view.blocks_per_page)
        if len(gone):
            token = (start // view.block_size + int(gone[-1]) + 1) * view.block_size
            raise GeometryError(
                f"tokens from {start} on asked for, blocks before token {token} have left the window of "
                f"{geometry.window} tokens"
            )

    def page_layouts(self) -> tuple[PageLayout, ...]:
        """Where the pages of each region lie, for a peer that reads them."""
        return tuple(
            PageLayout(
                bases=view.bases,
                num_pages=view.num_pages,
                blocks_per_page=view.blocks_per_page,
                block_size=view.block_size,
                block_stride=view.block_stride,
                head_stride=view.head_stride,
                token_stride=view.token_stride,
                rows=view.rows,
                row_stride=view.row_stride,
            )
            for view in self.views
        )

    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of every layer's pages."""
        layouts = zip(self.page_layouts(), self.geometry.groups, strict=True)
        return [(base, reach(layout, group)) for layout, group in layouts for base in layout.bases]

    def pack(self, address: int, part: Part, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        """Copy ``part`` of the pages to staging memory in wire order, ``[L][R][H][T][C / R]``; R is ``view.rows``.
        ``staging``: where that lies. ``alone`` as in ``Copies.start``."""
        pack = partial(self._copy_wire, address, part, to_wire=True)
        brief = self._brief(part, staging)
        return self.copies.start(pack, brief=brief, alone=alone and brief)  # or others could be sent meanwhile

    def unpack(self, address: int, part: Part, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        """Copy wire bytes at ``address`` to ``part`` of the pages, converted where they are another dtype's."""
        brief = self._brief(part, staging)
        if part.source is None:
            unpack = partial(self._copy_wire, address, part, to_wire=False)
            return self.copies.start(unpack, brief=brief, alone=alone and brief)
        conversion = part.source.conversion(self.geometry.groups[part.group], part.layer, part.num_layers)
        unpack = partial(
            unpack_converted, self.pages(part), address, conversion, num_heads=part.num_heads,
            num_tokens=part.num_tokens, device=self.device, sms=self.copies.sms,
        )  # fmt: skip
        return self.copies.start(unpack, brief=brief, alone=alone and brief)

    def _brief(self, part: Part, staging: torch.device) -> bool:
        """Whether a copy between pages and staging memory is over as soon as another thread were awake."""
        limit = BRIEF_BYTES if self.copies.idle else BRIEF_LOCAL_BYTES
        return staging == self.device and self.nbytes(part) <= limit

    def fetch(self, parts: Sequence[tuple[Part, Pages]], *, alone: bool = False) -> Copy:
        """Copy pages of a peer that are mapped here to parts of ours, each in one pass."""

        def enqueue() -> None:
            for part, theirs in parts:
                self._copy(self.pages(part), theirs, part, over_link=True)

        brief = sum(self.nbytes(part) for part, _ in parts) <= BRIEF_BYTES
        return self.copies.start(enqueue, brief=brief, alone=alone)

    def warm_up(self) -> None:
        """Allocate what launches need, and compile the kernels of the copies by one that changes nothing. Blocks."""
        if self.device.type == "cpu" or not self.views:
            return
        self.copies.start(partial(prepare, self.device))
        widest = max(view.num_heads * view.content_bytes for view in self.views)
        scratch = torch.empty(2 * widest, dtype=torch.uint8, device=self.device)
        for group, view in enumerate(self.views):
            first = Blocks(np.zeros(1, dtype=np.int64), view.block_size, view.block_stride, 0)
            tokens = min(2, view.block_size)  # with one alone its stride would not count for the alignment
            part = Part(group, 0, 1, 0, view.num_heads, 0, tokens, first)
            wire = self._wire(scratch.data_ptr(), part)
            for self.copies.idle, over_link in ((False, False), (True, False), (True, True)):
                self.copies.start(partial(self._copy, wire, self.pages(part), part, over_link=over_link))
        self.copies.settle()
        self.copies.idle = False

    def in_pieces(self, part: Part) -> bool:
        """Whether ``part`` lies in pieces long enough that a socket moves them as fast as packed bytes."""
        if part.source is not None:
            return False
        view = self.views[part.group]
        dense = view.token_stride == view.row_bytes
        tokens = min(part.blocks.size, part.num_tokens) if dense else 1
        return self.device.type == "cpu" and tokens * view.row_bytes >= MIN_PIECE_BYTES

    def pieces(self, part: Part) -> Pieces:
        """Where ``part`` lies, in wire order."""
        row_bytes = self.views[part.group].row_bytes
        return wire_ordered(self.pages(part), part.num_heads, part.num_tokens, row_bytes)

    def nbytes(self, part: Part) -> int:
        """Bytes of ``part`` on the wire."""
        content = part.source.group.content_bytes if part.source else self.views[part.group].content_bytes
        return part.num_layers * part.num_heads * part.num_tokens * content

    def part(self, span: Span, group: int, layer: int, head: int, kernel_ids: Ids, share: Share) -> Part:
        """All of ``span``, in this rank's numbering. ``share``: P's, on both sides."""
        view, ours = self.views[group], self.geometry.groups[group].share
        other = share if ours == span.share else span.share
        num_tokens, table = common_blocks(
            ours, other, span.token, span.token + span.num_tokens, kernel_ids, view.block_size, view.block_stride,
            view.token_stride,
        )  # fmt: skip
        return Part(
            group=group,
            layer=layer,
            num_layers=span.num_layers,
            head=head,
            num_heads=span.num_heads,
            token=table.token,
            num_tokens=num_tokens,
            blocks=table,
        )

    def cut(
        self, whole: Part, span: Span, chunk_bytes: int, source: GroupGeometry, *, convert: bool = False
    ) -> Iterator[Part]:
        """The chunks of ``span``, which ``whole`` is all of, in wire order. ``source``: P's region, on both sides;
        ``convert``: D converts its numbers.

        Raises:
            GeometryError: a chunk of one block or token does not fit into ``chunk_bytes``.
        """
        cut = chunks(span, source.content_bytes, chunk_bytes, source.block_size, source.share)
        shared = Whole(whole)
        for chunk in cut:
            yield Part(
                group=whole.group,
                layer=whole.layer + chunk.layer,
                num_layers=chunk.num_layers,
                head=whole.head,
                num_heads=whole.num_heads,
                token=whole.token + chunk.token,
                num_tokens=chunk.num_tokens,
                blocks=whole.blocks,
                source=Source(source, span.layer + chunk.layer) if convert else None,
                whole=shared,
            )

    def _copy_wire(self, address: int, part: Part, *, to_wire: bool) -> None:
        """Copy between ``part`` of the pages and wire order."""
        if self.device.type == "cpu":
            wire, pages = self._wire(address, part), self.pages(part)
            self._copy(*((wire, pages) if to_wire else (pages, wire)), part)
            return
        shared = part.whole or Whole(part)
        whole, rows = shared.part, self.views[part.group].rows
        if shared.there is None:
            shared.there = self._there(whole)
        shared.there.copy(
            address,
            to_wire=to_wire,
            layer=(part.layer - whole.layer) * rows,
            num_layers=part.num_layers * rows,
            token=part.token - whole.token,
            num_tokens=part.num_tokens,
            sms=self.copies.sms,
        )

    def _there(self, whole: Part) -> PagesThere:
        from kvferry.kernels.paged_copy_triton import PagesThere

        return PagesThere(
            self.pages(whole),
            num_heads=whole.num_heads,
            num_tokens=whole.num_tokens,
            content_bytes=self.views[whole.group].row_bytes,
            device=self.device,
        )

    def _copy(self, to: Pages, of: Pages, part: Part, *, over_link: bool = False) -> None:
        copy_pages(
            to,
            of,
            num_heads=part.num_heads,
            num_tokens=part.num_tokens,
            content_bytes=self.views[part.group].row_bytes,
            device=self.device,
            sms=self.copies.sms,
            over_link=over_link,
        )

    def _wire(self, address: int, part: Part) -> Pages:
        view = self.views[part.group]
        return wire_pages(address, part.num_layers * view.rows, part.num_heads, part.num_tokens, view.row_bytes)

    def pages(self, part: Part) -> Pages:
        """``part`` as one side of a copy, in which each row of a layer is a layer."""
        view = self.views[part.group]
        return Pages(
            bases=row_bases(view.bases[part.layer : part.layer + part.num_layers], view.rows, view.row_stride),
            block_ids=part.blocks.ids,
            block_size=part.blocks.size,
            block_stride=part.blocks.stride,
            head_stride=view.head_stride,
            token_stride=view.token_stride,
            head=part.head,
            token=part.token,
        )


class Part(msgspec.Struct, frozen=True):
    """A box of one region in this rank's own numbering, with the blocks that its tokens lie in: kernel blocks, or
    pieces of them where not all of their tokens are meant. ``token`` counts in these blocks. ``source``: whose numbers
    they are on the wire, where they are converted. ``whole``: what it was cut from."""

    group: int
    layer: int
    num_layers: int
    head: int
    num_heads: int
    token: int
    num_tokens: int
    blocks: Blocks
    source: Source | None = None
    whole: Whole | None = None


class Whole(msgspec.Struct, eq=False):
    """What parts were cut from. ``there``: its pages as the GPU knows them, from the first copy of a part on."""

    part: Part
    there: PagesThere | None = None


@dataclass
class Site:
    """Everything that a hand-over needs to know of its own rank."""

    settings: Settings
    engine_id: str
    incarnation: bytes
    model: Mapping[str, str]
    caches: Caches
    curve: CurveKeys | None
    planes: Sequence[Plane] = ()
    missing_planes: Mapping[str, str] = field(default_factory=dict)
    stats: HandoverStats = field(default_factory=HandoverStats)
    log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(logging.getLogger("vllm.kvferry.peer")))

    def plane(self, name: str) -> Plane | None:
        """The plane of that name, if this rank has it."""
        return next((plane for plane in self.planes if plane.name == name), None)


def check_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Whether two ranks hold the same model.

    Raises:
        IncompatiblePeerError: names the first fact that differs, and both values.
    """
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            raise IncompatiblePeerError(name, ours.get(name, "unset"), theirs.get(name, "unset"))
