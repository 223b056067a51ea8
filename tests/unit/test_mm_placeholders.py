"""Embeddings at their placeholder tokens, against a loop over the tokens; encoder outputs of every wrong form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.binding.mm_placeholders import (
    gather_mm_placeholders,
    sanity_check_mm_encoder_outputs,
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


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([1, 0, 1]), r"is_embed is torch.int64 of shape \[3\], expected bool"),
        (torch.tensor([1, 0, 1], dtype=torch.uint8), "is_embed is torch.uint8"),
        (torch.ones(3, 2, dtype=torch.bool), r"is_embed is torch.bool of shape \[3, 2\], expected bool, one axis"),
        (torch.tensor(True), r"of shape \[\]"),
    ],
)
def test_masks_of_another_form(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(EmbeddingError, match=message):
        scatter_mm_placeholders(torch.zeros(2, 2), mask)
    with pytest.raises(EmbeddingError, match=message):
        gather_mm_placeholders(torch.zeros(3, 2), mask)


def test_numbers_that_differ() -> None:
    """One embedding would otherwise fill every token, for torch repeats it."""
    with pytest.raises(EmbeddingError, match="1 embeddings for 2 placeholder tokens that take one"):
        scatter_mm_placeholders(torch.zeros(1, 2), torch.tensor([True, True, False]))
    with pytest.raises(EmbeddingError, match="a mask of 3 tokens for 4 placeholders"):
        gather_mm_placeholders(torch.zeros(4, 2), torch.tensor([True, True, False]))


def test_tensors_of_another_form() -> None:
    mask = torch.tensor([True, True])
    with pytest.raises(EmbeddingError, match=r"embeds have shape \[2, 2, 2\], expected two axes"):
        scatter_mm_placeholders(torch.zeros(2, 2, 2), mask)
    with pytest.raises(EmbeddingError, match=r"placeholders have shape \[2\], expected two axes"):
        gather_mm_placeholders(torch.zeros(2), mask)
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(EmbeddingError, match=f"embeds are of {dtype}, which has no NaN"):
            scatter_mm_placeholders(torch.zeros(2, 2, dtype=dtype), mask)


def test_encoder_outputs() -> None:
    """Lists of unlike lengths, tuples, one tensor; no item at all."""
    items = [torch.zeros(n, 4) for n in (3, 0, 5)]
    sanity_check_mm_encoder_outputs(items, 3)
    sanity_check_mm_encoder_outputs(tuple(items), 3)
    sanity_check_mm_encoder_outputs(torch.zeros(3, 2, 4), 3)
    sanity_check_mm_encoder_outputs([], 0)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "the encoder returned a NoneType"),
        ({0: torch.zeros(1, 4)}, "the encoder returned a dict"),
        (iter([torch.zeros(1, 4)]), "the encoder returned a list_iterator"),
        ([torch.zeros(1, 4)] * 2, "the encoder returned 2 items, expected 1"),
        ([], "the encoder returned 0 items, expected 1"),
        (torch.zeros(2, 1, 4), "the encoder returned 2 items, expected 1"),
        (torch.zeros(1, 4), r"one tensor of shape \[1, 4\], expected \[num_items, num_embeds, d\]"),
        (torch.tensor(1.0), r"one tensor of shape \[\]"),
        ([torch.zeros(4)], r"item 0 of the encoder has shape \[4\]"),
        ([torch.zeros(1, 1, 4)], r"item 0 of the encoder has shape \[1, 1, 4\]"),
        ([[1.0]], "item 0 of the encoder is a list, expected a 2-D tensor"),
    ],
)
def test_encoder_outputs_of_another_form(outputs: Any, message: str) -> None:
    with pytest.raises(EmbeddingError, match=message):
        sanity_check_mm_encoder_outputs(outputs, 1)
