"""One copy for pack, unpack and page to page. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token). Base addresses and strides
describe each side of a copy. The contiguous wire is a side like any other, so N layouts need no N x N converters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Pages:
    """One side of a copy: L layers of blocks, strides in bytes.

    Byte (l, h, t, c) lies at ``bases[l] + block_ids[(token + t) // block_size] * block_stride
    + (head + h) * head_stride + ((token + t) % block_size) * token_stride + c``.

    ``bases`` int64 [L] are byte addresses. ``block_ids`` int64 cover tokens 0 to ``token + T``, T being the tokens of
    the copy. ``block_size`` is N, in tokens.
    """

    bases: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int64]
    block_size: int
    block_stride: int
    head_stride: int
    token_stride: int
    head: int = 0
    token: int = 0


_ONE_BLOCK = np.zeros(1, dtype=np.int64)


def wire_pages(address: int, num_layers: int, num_heads: int, num_tokens: int, content_bytes: int) -> Pages:
    """The wire order, contiguous ``[L, H, T, C]`` at ``address``, as a side of a copy: one block of T tokens."""
    head_stride = num_tokens * content_bytes
    layer_stride = num_heads * head_stride
    return Pages(
        bases=address + layer_stride * np.arange(num_layers, dtype=np.int64),
        block_ids=_ONE_BLOCK,
        block_size=num_tokens,
        block_stride=layer_stride,
        head_stride=head_stride,
        token_stride=content_bytes,
    )


def copy_pages(
    dst: Pages,
    src: Pages,
    *,
    num_heads: int,
    num_tokens: int,
    content_bytes: int,
    device: torch.device,
    sms: int | None = None,
    over_link: bool = False,
) -> None:
    """Copy ``[L, num_heads, num_tokens, content_bytes]`` from ``src`` to ``dst``, L = ``len(bases)`` of both.

    pack is ``copy_pages(wire, pages)``, unpack ``copy_pages(pages, wire)``. The caller guarantees that every address
    that the arguments span is mapped, and that the two sides do not overlap. On ``cpu`` the copy is done on return;
    on a GPU it is enqueued on the current stream of ``device``, and takes at most ``sms`` of its SMs, or all if ``sms``
    is None. ``over_link``: one side lies on another GPU, and the link between them
    limits how many programs are of use.
    """
    assert len(dst.bases) == len(src.bases), (len(dst.bases), len(src.bases))
    if num_heads == 0 or num_tokens == 0 or len(src.bases) == 0:
        return
    if device.type == "cpu":
        from kvferry.kernels.paged_copy_host import copy_pages_host

        copy_pages_host(dst, src, num_heads=num_heads, num_tokens=num_tokens, content_bytes=content_bytes)
    else:
        from kvferry.kernels.paged_copy_triton import copy_pages_triton

        copy_pages_triton(
            dst,
            src,
            num_heads=num_heads,
            num_tokens=num_tokens,
            content_bytes=content_bytes,
            device=device,
            sms=sms,
            over_link=over_link,
        )
