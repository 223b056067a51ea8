"""The KV caches of one rank, and the copies between their pages, staging memory and a peer's pages.

Axes ``[L, B, H, N, C]``: layers, blocks, KV heads, tokens in a block, content bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from kvferry.connector.geometry.byte_ranges import reach, wire_ordered
from kvferry.connector.geometry.dtypes import WireElements
from kvferry.connector.geometry.rank_geometry import KEEPS_ALL, PageLayout, RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import Span, SpanCut, cut_span
from kvferry.connector.geometry.token_sharding import TokenBlocks, TokenShard, common_blocks
from kvferry.connector.geometry.view import CacheView, kernel_block_ids, row_bases
from kvferry.connector.pages.copies import Copies, WaitPolicy
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.launch import prepare
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport.channels import CPU, Copy, Pieces
from kvferry.transport.errors import GeometryError

if TYPE_CHECKING:
    from kvferry.kernels.paged_copy_triton import DevicePages

Ids = npt.NDArray[np.int64]

MIN_PIECE_BYTES = 2048
"""Shorter pieces of pages are packed into a slot before they are sent, and unpacked from a slot at D."""
BRIEF_BYTES, BRIEF_LOCAL_BYTES = 128 << 20, 32 << 20
"""Bytes of a brief copy. Waking another thread, and then the transfer thread, takes nearly as long as a brief copy.
``BRIEF_BYTES``: a GPU reads them from another GPU in 0.4 ms, and an idle GPU packs or unpacks them in less.
``BRIEF_LOCAL_BYTES``: the same for a GPU that packs or unpacks on a few SMs."""


@dataclass(frozen=True)
class RankCaches:
    """The KV caches of one rank: one view per region, and the geometry of all regions.

    ``keep`` holds the tensors that the views point into, by layer name.
    """

    geometry: RankGeometry
    views: tuple[CacheView, ...]
    copies: Copies
    keep: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.copies.device

    def kernel_ids(self, region: int, block_ids: Ids) -> Ids:
        """Convert manager block ids to kernel block ids. Raises GeometryError for an id out of range."""
        return kernel_block_ids(self.views[region], block_ids)

    def check_held(self, region: int, kernel_ids: Ids, start: int, stop: int) -> None:
        """Check that a region's blocks cover our shard of tokens ``[start, stop)``, and that the engine freed none.

        Raises:
            GeometryError: the blocks do not cover the tokens, or the null block stands in place of a block.
        """
        view, geometry = self.views[region], self.geometry.regions[region]
        start, stop = geometry.shard.count(start), geometry.shard.count(stop)
        covered = len(kernel_ids) * view.block_size
        if stop > covered:
            raise GeometryError(f"tokens up to {stop} asked for, blocks hold {covered}")
        if geometry.kind in KEEPS_ALL:
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
        names = PageLayout.__struct_fields__
        return tuple(PageLayout(**{name: getattr(view, name) for name in names}) for view in self.views)

    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of every layer's pages."""
        layouts = zip(self.page_layouts(), self.geometry.regions, strict=True)
        return [(base, reach(layout, region)) for layout, region in layouts for base in layout.bases]

    def pack(self, address: int, box: PageBox, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        """Copy ``box`` of the pages to staging memory in wire order, ``[L][R][H][T][C / R]``; R is ``view.rows``.
        ``staging``: the device of the staging memory. ``alone``: no other hand-over could go on during the copy."""
        pack = partial(self._copy_wire, box=box, to_wire=True)
        return self._start(pack, address, box, staging, alone=alone, to_wire=True)

    def unpack(self, address: int, box: PageBox, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        """Copy wire bytes at ``address`` to ``box`` of the pages. They are converted where ``box.source`` is given."""
        launch = partial(self._convert_wire, box=box)
        if box.source is None:
            launch = partial(self._copy_wire, box=box, to_wire=False)
        return self._start(launch, address, box, staging, alone=alone, to_wire=False)

    def _start(
        self, launch: Callable[[int], None], address: int, box: PageBox, staging: torch.device, *, alone: bool,
        to_wire: bool,
    ) -> Copy:  # fmt: skip
        wait = self._wait_policy(box, staging, alone=alone)
        if staging == self.device:
            return self.copies.start(partial(launch, address), wait)
        return self.copies.start_with_host(launch, address, self.nbytes(box), wait, to_host=to_wire)

    def _wait_policy(self, box: PageBox, staging: torch.device, *, alone: bool) -> WaitPolicy:
        """The policy for a copy between pages and staging memory. During a long one other chunks can be sent."""
        limit = BRIEF_BYTES if self.copies.idle else BRIEF_LOCAL_BYTES
        brief = staging == self.device and self.nbytes(box) <= limit
        return WaitPolicy.UNTIL_DONE if alone and brief else WaitPolicy.NONE

    def fetch(self, boxes: Sequence[tuple[PageBox, Pages]], *, alone: bool = False) -> Copy:
        """Copy a peer's pages, which are mapped in this process, to boxes of our pages, each in one pass."""

        def enqueue() -> None:
            for box, theirs in boxes:
                self._copy(self.pages(box), theirs, box, over_link=True)

        wait = WaitPolicy.NONE
        if alone and sum(self.nbytes(box) for box, _ in boxes) <= BRIEF_BYTES:
            wait = WaitPolicy.UNTIL_DONE
        elif alone and self.copies.idle:
            wait = WaitPolicy.BOUNDED
        return self.copies.start(enqueue, wait)

    def warm_up(self) -> None:
        """Allocate the memory that launches need. Compile the kernels by copies that change no page. Blocks."""
        if self.device.type == "cpu" or not self.views:
            return
        self.copies.start(partial(prepare, self.device))
        widest = max(view.num_heads * view.content_bytes for view in self.views)
        scratch = torch.empty(2 * widest, dtype=torch.uint8, device=self.device)
        for region, view in enumerate(self.views):
            first = TokenBlocks(np.zeros(1, dtype=np.int64), view.block_size, view.block_stride, 0)
            tokens = min(2, view.block_size)  # a box of one token would leave its stride out of the alignment
            box = PageBox(region, 0, 1, 0, view.num_heads, 0, tokens, first)
            wire = self._wire(scratch.data_ptr(), box)
            for self.copies.idle, over_link in ((False, False), (True, False), (True, True)):
                self.copies.start(partial(self._copy, wire, self.pages(box), box, over_link=over_link))
        self.copies.synchronize()
        self.copies.idle = False

    def clear(self, region: int, layer: int, kernel_ids: Ids, start: int, stop: int) -> None:
        """Begin to write zeros over the blocks of a layer that begin with one of tokens ``[start, stop)``."""
        view, shard = self.views[region], self.geometry.regions[region].shard
        first, last = (-(-shard.count(token) // view.block_size) for token in (start, stop))
        cache, ids = self.keep[view.layers[layer]], torch.from_numpy(kernel_ids[first:last])
        ids = ids.pin_memory() if self.device.type == "cuda" else ids

        @torch.inference_mode()
        def enqueue() -> None:
            cache.view(torch.uint8).index_fill_(0, ids.to(self.device, non_blocking=True), 0)

        self.copies.start(enqueue)

    def in_pieces(self, box: PageBox) -> bool:
        """Whether the pieces of ``box`` are long enough that a socket moves them as fast as packed bytes."""
        if box.source is not None:
            return False
        view = self.views[box.region]
        dense = view.token_stride == view.row_bytes
        tokens = min(box.blocks.size, box.num_tokens) if dense else 1
        return self.device.type == "cpu" and tokens * view.row_bytes >= MIN_PIECE_BYTES

    def pieces(self, box: PageBox) -> Pieces:
        """The pieces of memory in which ``box`` lies, in wire order."""
        row_bytes = self.views[box.region].row_bytes
        return wire_ordered(self.pages(box), box.num_heads, box.num_tokens, row_bytes)

    def nbytes(self, box: PageBox) -> int:
        """Bytes of ``box`` on the wire."""
        content = box.source.region.content_bytes if box.source else self.views[box.region].content_bytes
        return box.num_layers * box.num_heads * box.num_tokens * content

    def box(self, span: Span, region: int, layer: int, head: int, kernel_ids: Ids, shard: TokenShard) -> PageBox:
        """The box of all of ``span``, in this rank's numbering. ``shard``: P's shard, at P and at D."""
        view, ours = self.views[region], self.geometry.regions[region].shard
        other = shard if ours == span.shard else span.shard
        num_tokens, table = common_blocks(
            ours, other, span.token, span.token + span.num_tokens, kernel_ids, view.block_size, view.block_stride,
            view.token_stride,
        )  # fmt: skip
        return PageBox(region, layer, span.num_layers, head, span.num_heads, table.token, num_tokens, table)

    def cut(
        self, whole: PageBox, span: Span, chunk_bytes: int, source: RegionGeometry, *, convert: bool = False
    ) -> Iterator[PageBox]:
        """The chunks of ``span`` in wire order. ``whole``: the box of the whole span. ``source``: P's region, at P and
        at D. ``convert``: D converts the elements that P sends.

        Raises:
            GeometryError: a chunk of one block or token does not fit into ``chunk_bytes``.
        """
        shared = SpanCopy(whole)
        for chunk in self.span_cut(span, chunk_bytes, source):
            yield replace(
                whole,
                layer=whole.layer + chunk.layer,
                num_layers=chunk.num_layers,
                token=whole.token + chunk.token,
                num_tokens=chunk.num_tokens,
                source=WireElements(source, span.layer + chunk.layer) if convert else None,
                whole=shared,
            )

    @staticmethod
    def span_cut(span: Span, chunk_bytes: int, source: RegionGeometry) -> SpanCut:
        """How ``cut`` cuts ``span``. Raises GeometryError as ``cut``."""
        return cut_span(span, source.content_bytes, chunk_bytes, source.block_size, source.shard)

    def _copy_wire(self, address: int, box: PageBox, *, to_wire: bool) -> None:
        """Copy between ``box`` of the pages and bytes in wire order at ``address``."""
        if self.device.type == "cpu":
            wire, pages = self._wire(address, box), self.pages(box)
            self._copy(*((wire, pages) if to_wire else (pages, wire)), box)
            return
        shared = box.whole or SpanCopy(box)
        whole, rows = shared.box, self.views[box.region].rows
        if shared.device_pages is None:
            from kvferry.kernels.paged_copy_triton import DevicePages

            shared.device_pages = DevicePages(
                self.pages(whole), num_heads=whole.num_heads, num_tokens=whole.num_tokens,
                content_bytes=self.views[whole.region].row_bytes, device=self.device,
            )  # fmt: skip
        shared.device_pages.copy(
            address,
            to_wire=to_wire,
            layer=(box.layer - whole.layer) * rows,
            num_layers=box.num_layers * rows,
            token=box.token - whole.token,
            num_tokens=box.num_tokens,
            sms=self.copies.sms,
        )

    def _convert_wire(self, address: int, box: PageBox) -> None:
        """Convert bytes in wire order at ``address`` into ``box`` of the pages."""
        assert box.source is not None
        conversion = box.source.conversion(self.geometry.regions[box.region], box.layer, box.num_layers)
        unpack_converted(
            self.pages(box), address, conversion, num_heads=box.num_heads, num_tokens=box.num_tokens,
            device=self.device, sms=self.copies.sms,
        )  # fmt: skip

    def _copy(self, to: Pages, of: Pages, box: PageBox, *, over_link: bool = False) -> None:
        row_bytes, sms = self.views[box.region].row_bytes, self.copies.sms
        copy_pages(
            to, of, num_heads=box.num_heads, num_tokens=box.num_tokens, content_bytes=row_bytes, device=self.device,
            sms=sms, over_link=over_link,
        )  # fmt: skip

    def _wire(self, address: int, box: PageBox) -> Pages:
        view = self.views[box.region]
        return wire_pages(address, box.num_layers * view.rows, box.num_heads, box.num_tokens, view.row_bytes)

    def pages(self, box: PageBox) -> Pages:
        """``box`` as one side of a copy, in which each row of a layer is a layer."""
        view = self.views[box.region]
        return Pages(
            bases=row_bases(view.bases[box.layer : box.layer + box.num_layers], view.rows, view.row_stride),
            block_ids=box.blocks.ids,
            block_size=box.blocks.size,
            block_stride=box.blocks.stride,
            head_stride=view.head_stride,
            token_stride=view.token_stride,
            head=box.head,
            token=box.token,
        )


class PageBox(msgspec.Struct, frozen=True):
    """A box of one region in this rank's own numbering, with the blocks that its tokens lie in. These are kernel
    blocks, or pieces of kernel blocks where the box omits some of their tokens. ``token`` counts in these blocks.
    ``source``: P's elements on the wire, where D converts them. ``whole``: the span's copy that a chunk belongs to."""

    region: int
    layer: int
    num_layers: int
    head: int
    num_heads: int
    token: int
    num_tokens: int
    blocks: TokenBlocks
    source: WireElements | None = None
    whole: SpanCopy | None = None


class SpanCopy(msgspec.Struct, eq=False):
    """The box of a whole span, shared by its chunks. ``device_pages``: the pages of this box, with their table on the
    GPU. The first copy makes them."""

    box: PageBox
    device_pages: DevicePages | None = None
