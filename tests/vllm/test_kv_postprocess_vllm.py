"""The fix-ups beside the functions of the installed vLLM, bit for bit, where vLLM's are defined.

vLLM's take a remote block no larger than the local one: ``blksize`` on HND caches, ``blksize_and_layout`` from HND to
NHD, which with a ratio of 1 is the ``layout`` of vLLM before 0.32.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import kv_postprocess as ours

pytestmark = pytest.mark.vllm
theirs = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn]


def caches(layout: str, shape: tuple[int, int, int, int], pad: int, dtype: torch.dtype, rng: np.random.Generator):
    """Two equal caches ``[B, H, N, C]`` of random bytes with ``pad`` elements after every block, and their memory."""
    blocks, heads, tokens, content = shape
    size = heads * tokens * content + pad
    memory = torch.from_numpy(rng.integers(0, 256, blocks * size * dtype.itemsize, dtype=np.uint8))
    inner = (tokens * content, content) if layout == "HND" else (content, heads * content)
    both = [memory, memory.clone()]
    return [each.view(dtype).as_strided(shape, (size, *inner, 1)) for each in both], both


shapes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3, 8]), st.integers(1, 40))


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    name=st.sampled_from(["blksize", "layout", "blksize_and_layout"]),
    ratio=st.sampled_from([1, 2, 3, 4, 16]),
    pad=st.sampled_from([0, 0, 1, 8]),
    dtype=st.sampled_from(DTYPES),
    ids=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 1 << 30),
)
def test_the_bytes_are_those_of_vllm(shape, name: str, ratio: int, pad: int, dtype, ids, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, heads, remote_tokens, content = shape
    ratio = 1 if name == "layout" else ratio
    whole = (blocks, heads, remote_tokens * ratio, content)
    (cache, expected), memories = caches("HND" if name == "blksize" else "NHD", whole, pad, dtype, rng)
    indices = torch.from_numpy(rng.permutation(blocks)[: rng.integers(0, blocks + 1)]).to(ids)
    if len(indices):  # vLLM's reshape refuses an empty one
        # index_select of one-byte floats is not in torch for the CPU; the bytes are the same
        raw = expected.view(torch.uint8) if dtype.itemsize == 1 else expected
        if name == "blksize":
            theirs.kv_postprocess_blksize_on_receive(raw, indices.long(), ratio)
        else:
            theirs.kv_postprocess_blksize_and_layout_on_receive(raw, indices.long(), ratio)
    if name == "layout":
        ours.kv_postprocess_layout_on_receive(cache, indices)
    else:
        getattr(ours, f"kv_postprocess_{name}_on_receive")(cache, indices, ratio)
    assert torch.equal(*memories)


def test_arguments_are_named_and_ordered_as_in_vllm() -> None:
    for name in ("kv_postprocess_blksize_on_receive", "kv_postprocess_blksize_and_layout_on_receive"):
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        )
