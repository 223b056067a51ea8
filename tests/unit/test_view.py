"""A view says of every element where it lies; real tensors in host memory are the oracle."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.view import CacheView, kernel_block_ids, view_of
from kvferry.transport.errors import GeometryError

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


def read_element(view: CacheView, layer: int, block: int, head: int, token: int) -> bytes:
    address = view.bases[layer] + block * view.block_stride + head * view.head_stride + token * view.token_stride
    return ctypes.string_at(address, view.content_bytes)


def labelled(tensors: dict[str, torch.Tensor]) -> None:
    """Random bytes through the tensors; every element differs from every other in practice."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        raw = torch.randint(0, 256, (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size()), generator=generator)
        tensor.copy_(raw.to(torch.uint8).view(tensor.dtype))


def assert_reads_back(view: CacheView, tensors: dict[str, torch.Tensor]) -> None:
    for place, tensor in enumerate(tensors.values()):
        four = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
        expected = four.contiguous().view(torch.uint8).numpy()
        for block, head, token in itertools.product(*map(range, four.shape[:3])):
            assert read_element(view, place, block, head, token) == expected[block, head, token].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 5), st.sampled_from(DTYPES),
    st.integers(0, 3), st.integers(0, 9),
)  # fmt: skip
def test_any_order_of_axes_and_any_padding(order, shape, dtype, pad, offset) -> None:
    """``order``: how L, B, H and N nest in memory; ``pad``: elements left out after each step of the outermost two."""
    strides, step = [0] * 4, shape[4]
    for depth, axis in enumerate(reversed(order)):
        strides[axis] = step
        step = step * shape[axis] + (pad if depth in (1, 2) else 0)
    arena = torch.zeros(offset + step, dtype=dtype)
    five = arena[offset:].as_strided(shape, (*strides, 1), offset)
    tensors = {f"layer.{i}": five[i] for i in range(shape[0])}
    labelled(tensors)
    view = view_of(tensors, page_tokens=shape[3], num_pages=shape[1])
    assert view.bases == tuple(t.data_ptr() for t in tensors.values())
    assert (view.num_blocks, view.num_heads, view.block_size) == shape[1:4]
    assert view.content_bytes == shape[4] * arena.element_size()
    assert view.dtype == str(dtype).removeprefix("torch.") and view.device == "cpu"
    assert view.nbytes == five.numel() * arena.element_size()
    if shape[2] > 1 and shape[3] > 1:
        assert view.layout == ("HND" if order.index(2) < order.index(3) else "NHD")
    else:
        assert view.layout == "HND/NHD"
    assert_reads_back(view, tensors)


def test_mla_tensors_have_one_head_whose_stride_does_not_matter() -> None:
    arena = torch.zeros(5, 8, 12, dtype=torch.bfloat16)
    tensors = {"a": arena[:, :, :6], "b": arena[:, :, 6:]}
    labelled(tensors)
    view = view_of(tensors, page_tokens=8)
    assert view.num_heads == 1 and view.layout == "HND/NHD" and view.token_stride == 24
    assert_reads_back(view, tensors)
    odd = torch.zeros(4096).as_strided((3, 1, 4, 8), (32, 7, 8, 1))
    assert view_of({"a": odd, "b": torch.zeros(3, 1, 4, 8)}, 4).head_stride == 128


def test_block_ids_expand_to_kernel_blocks() -> None:
    cache = torch.arange(12).reshape(12, 1, 1, 1).expand(12, 1, 16, 1).contiguous()
    view = view_of({"a": cache}, page_tokens=48, num_pages=4)
    assert (view.blocks_per_page, view.num_pages, view.page_tokens) == (3, 4, 48)
    ids = kernel_block_ids(view, [2, 0, 3])
    assert ids.dtype == np.int64 and ids.tolist() == [6, 7, 8, 0, 1, 2, 9, 10, 11]
    pages = cache.unflatten(0, (4, 3))[[2, 0, 3]].flatten(0, 1)[:, 0, 0, 0]
    read = [int.from_bytes(read_element(view, 0, int(block), 0, 0), "little") for block in ids]
    assert read == pages.tolist()
    assert kernel_block_ids(view, np.array([], dtype=np.int32)).tolist() == []
    with pytest.raises(GeometryError, match="2 dimensions"):
        kernel_block_ids(view, np.zeros((2, 2), dtype=np.int64))
    for wrong, bad in (([0, 4], 4), ([-1, 2], -1), ([3, 1 << 40], 1 << 40)):
        with pytest.raises(GeometryError, match=rf"block id {bad} is outside 0\.\.3"):
            kernel_block_ids(view, wrong)


def strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(4096, dtype=dtype).as_strided(shape, stride)


GOOD = torch.zeros(4, 2, 8, 16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no layers"),
        ({"x": torch.zeros(4, 8)}, r"'x': cache tensor of shape \[4, 8\], expected"),
        ({"x": torch.zeros(0, 2, 8, 16)}, r"'x': cache tensor of shape \[0, 2, 8, 16\] is empty"),
        ({"x": torch.zeros(4, 2, 8, 32)[..., ::2]}, "'x': content has a stride of 2 elements"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 8)}, r"'x': shape .* differs from .* of layer 'a'"),
        ({"a": GOOD, "x": torch.zeros(4, 8, 2, 16).transpose(1, 2)}, r"'x': strides .* differs .* of layer 'a'"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 16, dtype=torch.int32)}, "'x': dtype int32 differs from float32"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 16, device="meta")}, "'x': device meta differs from cpu"),
        ({"x": torch.zeros(1, 2, 8, 16).expand(4, 2, 8, 16)}, "'x': elements overlap, a stride of 0 bytes"),
        ({"x": strided((4, 2, 8, 16), (256, 120, 16, 1))}, "'x': elements overlap, a stride of 480 bytes"),
        ({"x": strided((4, 2, 8, 16), (240, 128, 16, 1))}, "'x': elements overlap, a stride of 960 bytes"),
    ],
)
def test_what_is_not_such_a_cache_is_refused_by_layer(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(GeometryError, match=rf"^[^\n]*{message}[^\n]*$"):
        view_of(tensors, page_tokens=8)


@pytest.mark.parametrize(
    ("page_tokens", "num_pages", "message"),
    [
        (12, None, "manager block of 12 tokens does not split into blocks of 8"),
        (0, None, "manager block of 0 tokens"),
        (24, None, "4 kernel blocks of 8 tokens, expected a multiple of 3"),
        (16, 4, "4 kernel blocks of 8 tokens, expected 4 x 2"),
    ],
)
def test_blocks_that_do_not_fit_manager_blocks_are_refused(page_tokens, num_pages, message: str) -> None:
    with pytest.raises(GeometryError, match=f"layer 'x': .*{message}"):
        view_of({"x": GOOD}, page_tokens, num_pages)


@given(st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(0, 40)] * 3), st.integers(1, 6))
def test_no_cache_with_shared_bytes_is_let_in(shape, strides, content) -> None:
    """Whatever is accepted has distinct bytes throughout."""
    tensor = torch.zeros(600, dtype=torch.int8).as_strided((*shape, content), (*strides, 1))
    try:
        view = view_of({"x": tensor}, shape[2])
    except GeometryError:
        return
    offsets = [
        b * view.block_stride + h * view.head_stride + t * view.token_stride + c
        for b, h, t, c in itertools.product(*map(range, (*shape, content)))
    ]
    assert len(set(offsets)) == len(offsets)
