"""Fix-ups in place: KV bytes that lie in D's pages in P's order are moved into D's order. Axes ``[B, H, N, C]``.

B blocks, H KV heads, N tokens in a block, C content elements per (head, token). A cache is vLLM's logical view, 4-D
``[B, H, N, C]`` or, for MLA, 3-D ``[B, N, C]``. Strides may be any, with padding or without. They give the memory
order: NHD where the stride of a token is larger than the stride of a head, else HND. Pass caches of ``[B, N, H, C]``,
as vLLM has them before 0.32, as ``cache.transpose(1, 2)``. Names and arguments are the same as in vLLM's
``distributed/kv_transfer/kv_connector/utils.py``, which handles some of these cases.

**What is received.** Byte i that P sent for a local block is byte i of that block in D's memory order, padding not
counted. P's blocks hold N / ratio tokens each and lie one after the other, in order of tokens. ``block_size_ratio`` is
``TpKVTopology.block_size_ratio``: remote blocks per local block, or, negative, local blocks per remote block. In the
second case the ``-ratio`` local blocks of one remote block stand next to each other in ``indices``, in order of tokens,
and the bytes of the remote block fill them in that order. All remote blocks are whole.

**Contract.** ``indices`` are int64 or int32 ``[n]``: local block ids on the device of the cache, each at most once, in
any order (but see above). Empty ``indices`` do nothing. On host memory the work is done on return and the ids are
checked. On a GPU the work is enqueued on the current stream, and the caller checks the ids, because a check here would
wait for the device. There, an id out of range reads and writes outside of the cache, and an id that is given twice
leaves that block undefined. Every byte is read once and written once, as a byte: any dtype works, and NaNs and padding
do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch

from kvferry.transport.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Exchange:
    """One fix-up, as transpositions of matrices of units. ``group`` local blocks hold ``parts`` matrices (one of the
    two numbers is 1). P's order of a matrix is ``[inner, outer]``, D's order is ``[outer, inner]``, and a group holds
    its matrices one after the other. In D's pages, unit (o, i) of the m-th matrix lies, with
    ``b, within = divmod(m * outer + o, outer_per_block)``, at
    ``indices[b] * block_stride + within * outer_stride + i * inner_stride``. A unit is ``rows`` rows of ``content``
    bytes that lie ``row_stride`` apart and keep their order: any slice of any row can be moved without the rest.
    Strides are in bytes."""

    group: int
    parts: int
    outer: int
    inner: int
    rows: int
    content: int
    block_stride: int
    outer_stride: int
    inner_stride: int
    row_stride: int

    @property
    def outer_per_block(self) -> int:
        """Units of the outer axis that lie in one local block, summed over its matrices."""
        return self.outer * self.parts // self.group


def kv_postprocess_blksize_on_receive(cache: torch.Tensor, indices: torch.Tensor, block_size_ratio: int) -> None:
    """Change blocks from P's block size to D's. P and D have the same layout. In an NHD cache nothing has to move.
    Raises GeometryError: a cache, indices or ratio that the contract above does not allow."""
    _fix_up(cache, indices, block_size_ratio, relayout=False)


def kv_postprocess_layout_on_receive(cache: torch.Tensor, indices: torch.Tensor) -> None:
    """Change blocks to D's layout from the other one: HND to NHD, or NHD to HND. P and D have the same block size.
    Raises GeometryError: a cache or indices that the contract above does not allow."""
    _fix_up(cache, indices, 1, relayout=True)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: torch.Tensor, indices: torch.Tensor, block_size_ratio: int
) -> None:
    """Change blocks from P's block size to D's, and to D's layout from the other one, in one pass. Raises
    GeometryError: a cache, indices or ratio that the contract above does not allow."""
    _fix_up(cache, indices, block_size_ratio, relayout=True)


def _fix_up(cache: torch.Tensor, indices: torch.Tensor, block_size_ratio: int, *, relayout: bool) -> None:
    exchange = exchange_of(cache, block_size_ratio, relayout=relayout)
    _check_indices(cache, indices, block_size_ratio)
    if exchange is None or indices.numel() == 0:
        return
    if cache.device.type == "cpu":
        exchange_host(cache, indices, exchange)
    else:
        from kvferry.kernels.kv_postprocess_triton import exchange_triton

        exchange_triton(cache, indices, exchange)


def exchange_of(cache: torch.Tensor, block_size_ratio: int, *, relayout: bool) -> Exchange | None:
    """The exchange in each group of blocks, or None where P's order equals D's order. Raises GeometryError: the cache
    is not a strided ``[B, H, N, C]`` or ``[B, N, C]``, or the ratio does not divide N."""
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    if cache.dim() != 4:
        raise GeometryError(f"cache has shape {tuple(cache.shape)}; expected [B, H, N, C] or [B, N, C]")
    _, heads, tokens, elements = cache.shape
    block, head, token, element = (stride * cache.element_size() for stride in cache.stride())
    if elements > 1 and element != cache.element_size():
        raise GeometryError(f"cache has strides {cache.stride()}; the content of one head and token has to be dense")
    if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
        raise GeometryError(f"cache has strides {cache.stride()}; an expanded tensor has no bytes of its own")
    group, parts = _ratio(block_size_ratio, tokens)
    remote_tokens = tokens // parts
    whole = Exchange(
        group=1, parts=1, outer=heads, inner=tokens, rows=1, content=elements * cache.element_size(),
        block_stride=block, outer_stride=head, inner_stride=token, row_stride=token,
    )  # fmt: skip
    is_nhd = token > head
    if relayout and is_nhd:  # P's blocks [H, n, C] one after the other, each to [n, H, C]
        found = replace(
            whole, group=group, parts=parts, outer=group * remote_tokens, inner=heads, outer_stride=token,
            inner_stride=head,
        )  # fmt: skip
    elif relayout:  # to [H, N, C]; P's tokens lie in one sequence at any block size
        found = whole
    elif is_nhd:
        return None  # tokens lie in one sequence on both sides
    elif group > 1:  # [H, group, N, C] to [group, H, N, C]
        found = replace(whole, group=group, outer=group, inner=heads, outer_stride=0, inner_stride=head, rows=tokens)
    else:  # [ratio, H, n, C] to [H, ratio, n, C]
        found = replace(whole, inner=parts, inner_stride=remote_tokens * token, rows=remote_tokens)
    if cache.numel() == 0 or found.outer == 1 or found.inner == 1:
        return None
    if found.row_stride == found.content:
        found = replace(found, rows=1, content=found.rows * found.content)
    return found


def _ratio(block_size_ratio: int, tokens: int) -> tuple[int, int]:
    """Local blocks per remote block, and remote blocks per local block. One of them is 1."""
    try:
        ratio = operator.index(block_size_ratio)
    except TypeError:
        ratio = 0
    if ratio == 0:
        raise GeometryError(
            f"block_size_ratio is {block_size_ratio!r}; expected remote blocks per local block, "
            "or local blocks per remote block as a negative integer (TpKVTopology.block_size_ratio)"
        )
    if ratio > 0 and tokens % ratio:
        raise GeometryError(f"block_size_ratio {ratio} does not divide the {tokens} tokens of a local block")
    return max(1, -ratio), max(1, ratio)


def _check_indices(cache: torch.Tensor, indices: torch.Tensor, block_size_ratio: int) -> None:
    if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise GeometryError(f"indices are {indices.dtype} of shape {tuple(indices.shape)}; expected int64 or int32 [n]")
    if indices.device != cache.device:
        raise GeometryError(f"indices are on {indices.device}, the cache is on {cache.device}; expected one device")
    if block_size_ratio < 0 and len(indices) % -block_size_ratio:
        raise GeometryError(
            f"{len(indices)} local blocks hold no whole number of remote blocks of {-block_size_ratio} each; "
            "give all blocks of every remote block"
        )
    if indices.device.type != "cpu" or len(indices) == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= len(cache):
        raise GeometryError(f"block id {low if low < 0 else high} is outside 0..{len(cache) - 1}")
    if len(torch.unique(indices)) != len(indices):
        ids, counts = torch.unique(indices, return_counts=True)
        raise GeometryError(f"block id {int(ids[counts > 1][0])} is given more than once")


BOUNCE_BYTES = 512 << 10
"""Size of the buffer, or of one group where that is larger. The buffer stays in the L2 cache."""
_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_index_out = torch.ops.aten.index.Tensor_out


def exchange_host(cache: torch.Tensor, indices: torch.Tensor, exchange: Exchange) -> None:
    """Perform ``exchange`` on host memory. The caller has checked ``indices``. Whole groups of blocks go through one
    buffer that stays in the cache of the core: as many groups as fit are read before any of them is written."""
    pages = _pages(cache, exchange)
    groups = indices.to(torch.int64).reshape(-1, exchange.group)
    _, parts, outer, inner, rows, words = pages.shape
    block_bytes = pages[0].numel() * pages.element_size()
    step = max(1, BOUNCE_BYTES // (exchange.group * block_bytes))
    blocks = min(step, len(groups)) * exchange.group
    bounce = torch.empty((blocks, *pages.shape[1:]), dtype=pages.dtype, device="cpu")
    for first in range(0, len(groups), step):
        ids = groups[first : first + step]
        received = bounce[: ids.numel()]
        _index_out(pages, [ids.reshape(-1)], out=received)
        by_p = received.view(len(ids), parts, inner, exchange.group, outer, rows, words)
        pages.index_put_((ids,), by_p.permute(0, 3, 1, 4, 2, 5, 6))


def _pages(cache: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The cache as ``[B, parts, outer, inner, rows, words]``; ``outer`` counts the units of one block and part."""
    outer = exchange.outer // exchange.group
    strides = (
        exchange.block_stride,
        outer * exchange.outer_stride,
        exchange.outer_stride,
        exchange.inner_stride,
        exchange.row_stride,
    )
    start = int(cache.storage_offset()) * cache.element_size()
    bits = cache.data_ptr() | start | exchange.content | 16
    for stride in strides:
        bits |= stride
    word = bits & -bits
    # A new tensor on the same storage: one made under inference mode cannot be written outside of it.
    memory = torch.empty(0, dtype=_WORDS[word], device="cpu").set_(cache.untyped_storage())
    return memory.as_strided(
        (len(cache), exchange.parts, outer, exchange.inner, exchange.rows, exchange.content // word),
        (*(stride // word for stride in strides), 1),
        start // word,
    )
