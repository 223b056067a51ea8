"""Embeddings at their placeholder tokens, against a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.binding.mm_placeholders import (
    gather_mm_placeholders,
    scatter_mm_placeholders,
)
from kvferry.transport.errors import EmbeddingError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]
MASKS = st.lists(st.booleans(), max_size=40)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def embeddings(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random finite values, rows of a wider tensor, so not contiguous."""
    return torch.randn(count, width + 3).to(dtype)[:, 1 : width + 1]


@given(MASKS, st.integers(0, 9), st.sampled_from(DTYPES))
def test_each_token_by_itself(mask: list[bool], width: int, dtype: torch.dtype) -> None:
    embeds = embeddings(sum(mask), width, dtype)
    placed = scatter_mm_placeholders(embeds, torch.tensor(mask, dtype=torch.bool))
    assert placed.shape == (len(mask), width) and placed.dtype == dtype
    rows = iter(embeds)
    for token, takes in enumerate(mask):
        if takes:
            assert bits(placed[token]) == bits(next(rows))
        else:
            assert bool(torch.isnan(placed[token].to(torch.complex64)).all())


@given(MASKS, st.integers(0, 9), st.sampled_from(DTYPES))
def test_gather_is_the_inverse(mask: list[bool], width: int, dtype: torch.dtype) -> None:
    embeds, is_embed = embeddings(sum(mask), width, dtype), torch.tensor(mask, dtype=torch.bool)
    placed = scatter_mm_placeholders(embeds, is_embed)
    taken = gather_mm_placeholders(placed, is_embed)
    assert taken.shape == embeds.shape and taken.dtype == dtype and bits(taken) == bits(embeds)
    if placed.numel() and sum(mask):
        placed[:] = 0
        assert bits(taken) == bits(embeds)  # a copy


def test_without_a_mask_nothing_is_copied() -> None:
    embeds = torch.zeros(3, 2)
    assert scatter_mm_placeholders(embeds, None) is embeds and gather_mm_placeholders(embeds, None) is embeds


TWO = torch.tensor([True, True, False])


@pytest.mark.parametrize(
    ("call", "tensor", "mask", "message"),
    [
        ("both", torch.zeros(3, 2), torch.tensor([1, 0, 1]), r"is_embed is torch.int64 of shape \[3\], expected bool"),
        ("both", torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), r"of shape \[3, 2\], expected bool, one axis"),
        ("both", torch.zeros(3, 2), torch.tensor(True), r"of shape \[\]"),
        # One embedding would otherwise fill every token, for torch repeats it.
        ("scatter", torch.zeros(1, 2), TWO, "1 embeddings for 2 placeholder tokens that take one"),
        ("scatter", torch.zeros(2, 2, 2), TWO, r"embeds have shape \[2, 2, 2\], expected two axes"),
        ("scatter", torch.zeros(2, 2, dtype=torch.int32), TWO, "embeds are of torch.int32, which has no NaN"),
        ("gather", torch.zeros(4, 2), TWO, "a mask of 3 tokens for 4 placeholders"),
        ("gather", torch.zeros(2), TWO[:2], r"placeholders have shape \[2\], expected two axes"),
    ],
)  # fmt: skip
def test_what_does_not_fit(call: str, tensor: torch.Tensor, mask: torch.Tensor, message: str) -> None:
    for name, act in (("scatter", scatter_mm_placeholders), ("gather", gather_mm_placeholders)):
        if call in (name, "both"):
            with pytest.raises(EmbeddingError, match=message):
                act(tensor, mask)
