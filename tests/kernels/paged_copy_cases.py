"""Cases of the paged copy, and an oracle that copies byte by byte. Axes ``[L, B, H, N, C]``.

The oracle uses nothing of the code under test but its types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvferry.kernels.paged_copy import Pages, copy_pages

GUARD = 64


@dataclass(frozen=True)
class Layout:
    """How one side lies in memory; ``pad`` bytes after every token, head and block, ``shift`` before the arena.

    Layer l lies at the ``places[l]``-th place for a layer, by default the l-th.
    """

    order: str = "HND"
    block_size: int = 16
    pad: tuple[int, int, int] = (0, 0, 0)
    interleaved: bool = False
    shift: int = 0
    consecutive: bool = False
    places: tuple[int, ...] = ()


class Arena:
    """Memory of one side with guard bytes around it, and the ``Pages`` that describe its part of a copy."""

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int, heads: int, content: int, head: int = 0, token: int = 0, tokens: int, rng: np.random.Generator,
    ) -> None:  # fmt: skip
        size = layout.block_size
        used = -(-(token + tokens) // size)
        blocks = used + 3
        token_pad, head_pad, block_pad = layout.pad
        if layout.order == "NHD":
            head_stride = content + head_pad
            token_stride = heads * head_stride + token_pad
            block_bytes = size * token_stride + block_pad
        else:
            token_stride = content + token_pad
            head_stride = size * token_stride + head_pad
            block_bytes = heads * head_stride + block_pad
        places = np.array(layout.places[:layers] or range(layers), dtype=np.int64)
        room_for = int(places.max()) + 1
        block_stride = block_bytes * room_for if layout.interleaved else block_bytes
        layer_step = block_bytes if layout.interleaved else blocks * block_bytes
        self.memory = rng.integers(
            0, 256, 2 * GUARD + layout.shift + blocks * room_for * block_bytes + 16, dtype=np.uint8
        )
        start = self.memory.ctypes.data
        first = start + -start % 16 + GUARD + layout.shift
        ids = np.arange(1, 1 + used) if layout.consecutive else rng.permutation(blocks)[:used]
        self.pages = Pages(
            bases=first + layer_step * places, block_ids=ids.astype(np.int64), block_size=size,
            block_stride=block_stride, head_stride=head_stride, token_stride=token_stride, head=head, token=token,
        )  # fmt: skip

    def on(self, device: torch.device) -> tuple[Pages, torch.Tensor]:
        """The pages and the memory on a device, on the CPU these themselves."""
        memory = torch.from_numpy(self.memory).to(device)
        return replace(self.pages, bases=self.pages.bases - self.memory.ctypes.data + memory.data_ptr()), memory


@dataclass(frozen=True)
class Case:
    """One copy between two arenas that the seed fills."""

    dst: Layout
    src: Layout
    layers: int = 2
    heads: int = 3
    tokens: int = 40
    content: int = 24
    dst_head: int = 0
    src_head: int = 0
    dst_token: int = 0
    src_token: int = 0
    dst_heads: int = 0
    src_heads: int = 0

    def arenas(self, seed: int = 0) -> tuple[Arena, Arena]:
        rng = np.random.default_rng(seed)
        dst, src = (
            Arena(
                layout, layers=self.layers, heads=heads or self.heads + head, content=self.content, head=head,
                token=token, tokens=self.tokens, rng=rng,
            )
            for layout, heads, head, token in (
                (self.dst, self.dst_heads, self.dst_head, self.dst_token),
                (self.src, self.src_heads, self.src_head, self.src_token),
            )
        )  # fmt: skip
        return dst, src


def positions(arena: Arena, *, heads: int, tokens: int, content: int) -> np.ndarray:
    """Index into the arena's memory of every byte (l, h, t, c), by the formula in ``Pages``, one at a time."""
    pages = arena.pages
    found = np.empty((len(pages.bases), heads, tokens, content), dtype=np.int64)
    for layer in range(len(pages.bases)):
        for head in range(heads):
            for token in range(tokens):
                block = int(pages.block_ids[(pages.token + token) // pages.block_size])
                address = (
                    int(pages.bases[layer])
                    + block * pages.block_stride
                    + (pages.head + head) * pages.head_stride
                    + ((pages.token + token) % pages.block_size) * pages.token_stride
                )
                for byte in range(content):
                    found[layer, head, token, byte] = address + byte - arena.memory.ctypes.data
    assert found.min() >= 0 and found.max() < len(arena.memory)
    assert len(np.unique(found)) == found.size
    return found


def expected(case: Case, dst: Arena, src: Arena) -> np.ndarray:
    """What the whole memory of ``dst``, guards included, has to be after the copy."""
    size = {"heads": case.heads, "tokens": case.tokens, "content": case.content}
    result = dst.memory.copy()
    result[positions(dst, **size).reshape(-1)] = src.memory[positions(src, **size).reshape(-1)]
    return result


def differing(
    case: Case, device: torch.device, copy: Callable[..., None] = copy_pages, *, seed: int = 0, **how: object
) -> int:
    """Bytes that are not the oracle's after the copy on a device; those of ``src`` do not change."""
    dst, src = case.arenas(seed)
    want = expected(case, dst, src)
    assert not np.array_equal(dst.memory, want), "the case copies nothing"
    (to, memory), (of, read) = dst.on(device), src.on(device)
    untouched = read.clone()
    size = {"num_heads": case.heads, "num_tokens": case.tokens, "content_bytes": case.content}
    copy(to, of, **size, device=device, **how)
    return int((memory.cpu().numpy() != want).sum()) + int((read != untouched).sum())


def wire_layout(tokens: int) -> Layout:
    """The wire: one block of all tokens."""
    return Layout(block_size=tokens)


HND, NHD = Layout("HND"), Layout("NHD")
CASES = {
    "pack-hnd": Case(wire_layout(40), HND),
    "pack-nhd": Case(wire_layout(40), NHD),
    "unpack-hnd": Case(HND, wire_layout(48), tokens=48),
    "unpack-nhd": Case(NHD, wire_layout(40), dst_token=5),
    "pack-offset-partial-head-and-tail": Case(wire_layout(70), HND, tokens=70, src_token=7, content=16),
    "pack-within-one-block": Case(wire_layout(5), HND, tokens=5, src_token=7),
    "unpack-from-the-middle-of-a-bigger-wire": Case(HND, wire_layout(64), tokens=30, src_token=9, dst_token=3),
    "one-token": Case(NHD, wire_layout(1), tokens=1, dst_token=15, content=512),
    "one-token-one-head-one-layer": Case(HND, NHD, layers=1, heads=1, tokens=1, content=1),
    "hnd-to-nhd": Case(NHD, HND, dst_token=3, src_token=11),
    "nhd-to-hnd": Case(HND, NHD, tokens=33),
    "nhd-to-nhd": Case(NHD, NHD, tokens=50, content=32),
    "16-to-64": Case(Layout(block_size=64), HND, tokens=100, content=16),
    "64-to-16-unaligned": Case(Layout("NHD"), Layout(block_size=64), tokens=75, src_token=50, dst_token=1),
    "48-to-32": Case(Layout(block_size=32), Layout(block_size=48), tokens=130, src_token=17, dst_token=30, heads=1),
    "32-to-48-nhd": Case(Layout("NHD", block_size=48), Layout("NHD", block_size=32), tokens=97, content=8),
    "prime-blocks": Case(Layout(block_size=7), Layout(block_size=5), tokens=61, src_token=4, dst_token=6),
    "block-of-one": Case(Layout(block_size=1), Layout("NHD", block_size=3), tokens=10),
    "head-slice-of-source": Case(wire_layout(40), HND, heads=2, src_head=3, src_heads=7, content=16),
    "head-slice-of-both": Case(NHD, HND, heads=2, src_head=1, dst_head=4, src_heads=5, dst_heads=6),
    "odd-content": Case(NHD, wire_layout(20), tokens=20, content=13),
    "content-of-one-byte": Case(HND, wire_layout(20), tokens=20, content=1),
    "content-6": Case(wire_layout(20), NHD, tokens=20, content=6),
    "content-20": Case(wire_layout(20), HND, tokens=20, content=20),
    "padded-tokens": Case(wire_layout(40), Layout(pad=(8, 0, 0))),
    "padded-everything": Case(Layout("NHD", pad=(16, 32, 48)), Layout(pad=(16, 32, 64)), content=32),
    "padded-blocks-unpack": Case(Layout(pad=(0, 0, 40)), wire_layout(40)),
    "interleaved-layers-pack": Case(wire_layout(40), Layout(interleaved=True), layers=4),
    "interleaved-layers-unpack": Case(Layout("NHD", interleaved=True), wire_layout(40), layers=4),
    "interleaved-to-separate": Case(Layout(interleaved=True), HND, layers=3),
    "shifted-by-2": Case(wire_layout(40), Layout(shift=2)),
    "both-shifted-by-odd": Case(Layout(shift=1), Layout("NHD", shift=3)),
    "consecutive-mla-pack": Case(wire_layout(60), Layout(consecutive=True), heads=1, tokens=60, content=18),
    "consecutive-nhd-unpack": Case(Layout("NHD", consecutive=True), wire_layout(60), tokens=60, dst_token=6),
    "consecutive-both": Case(
        Layout("NHD", consecutive=True), Layout("NHD", consecutive=True, block_size=48), tokens=60
    ),
    "consecutive-hnd": Case(wire_layout(60), Layout(consecutive=True), tokens=60),
    "descending-layers": Case(Layout(block_size=40, places=(2, 1, 0)), Layout(places=(2, 1, 0)), layers=3),
    "two-descending-layers-to-a-wire": Case(wire_layout(7), Layout(block_size=8, places=(1, 0)), tokens=7),
    "descending-layers-from-a-wire": Case(Layout(block_size=8, places=(2, 1, 0)), wire_layout(7), layers=3, tokens=7),
    "gap-between-layers": Case(Layout(block_size=8, places=(0, 1, 3)), wire_layout(7), layers=3, tokens=7),
    "layers-anywhere": Case(Layout(block_size=8, places=(0, 2, 1, 6)), wire_layout(7), layers=4, tokens=7),
    "one-layer": Case(wire_layout(40), HND, layers=1),
}
