"""Multimodal embeddings: the check of an encoder's outputs, and their places among a prompt's placeholder tokens.

An item (an image, a clip) has P placeholder tokens in the prompt, of which E take an embedding of ``d`` elements. The
others are separators, such as the ends of image rows. ``is_embed``, bool ``[P]``, marks the tokens that take one.
"""

from __future__ import annotations

from typing import Any

import torch

from kvferry.transport.errors import EmbeddingError


def sanity_check_mm_encoder_outputs(mm_embeddings: Any, expected_num_items: int) -> None:
    """Check that an encoder returned ``[num_embeds, d]`` per item, or one tensor ``[num_items, num_embeds, d]``. Raises
    EmbeddingError: another type, another number of items, or an item that is no 2-D tensor."""
    expected = "expected a list or tuple of 2-D tensors, or one tensor [num_items, num_embeds, d]"
    if not isinstance(mm_embeddings, (list, tuple, torch.Tensor)):
        raise EmbeddingError(f"the encoder returned a {type(mm_embeddings).__name__}, {expected}")
    if isinstance(mm_embeddings, torch.Tensor) and mm_embeddings.ndim != 3:
        raise EmbeddingError(f"the encoder returned one tensor of shape {list(mm_embeddings.shape)}, {expected}")
    if len(mm_embeddings) != expected_num_items:
        raise EmbeddingError(f"the encoder returned {len(mm_embeddings)} items, expected {expected_num_items}")
    for number, item in enumerate(mm_embeddings):
        if not isinstance(item, torch.Tensor):
            raise EmbeddingError(f"item {number} of the encoder is a {type(item).__name__}, expected a 2-D tensor")
        if item.ndim != 2:
            raise EmbeddingError(f"item {number} of the encoder has shape {list(item.shape)}, expected [num_embeds, d]")


def scatter_mm_placeholders(embeds: torch.Tensor, is_embed: torch.Tensor | None) -> torch.Tensor:
    """Put embeddings ``[E, d]`` at their placeholder tokens ``[P, d]``, NaN at those that take none. ``None``: all take
    one. Raises EmbeddingError: another form, a dtype without NaN, or other numbers of embeddings and marks."""
    if is_embed is None:
        return embeds
    _check_matrix("embeds", embeds)
    if not (embeds.is_floating_point() or embeds.is_complex()):
        raise EmbeddingError(f"embeds are of {embeds.dtype}, which has no NaN; expected a floating-point dtype")
    places = _places(is_embed, embeds.device)
    if len(places) != len(embeds):
        raise EmbeddingError(f"{len(embeds)} embeddings for {len(places)} placeholder tokens that take one")
    placeholders = embeds.new_full((len(is_embed), embeds.shape[1]), torch.nan)
    placeholders[places] = embeds
    return placeholders


def gather_mm_placeholders(placeholders: torch.Tensor, is_embed: torch.Tensor | None) -> torch.Tensor:
    """The inverse of ``scatter_mm_placeholders``: ``[P, d]`` of any dtype to a copy ``[E, d]``, or itself where
    ``is_embed`` is ``None``. Raises EmbeddingError: another form, or lengths that differ."""
    if is_embed is None:
        return placeholders
    _check_matrix("placeholders", placeholders)
    places = _places(is_embed, placeholders.device)
    if len(is_embed) != len(placeholders):
        raise EmbeddingError(f"a mask of {len(is_embed)} tokens for {len(placeholders)} placeholders")
    return placeholders[places]


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 2:
        raise EmbeddingError(f"{name} have shape {list(tensor.shape)}, expected two axes, tokens and elements")


def _places(is_embed: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers of the tokens that take an embedding, int64 ``[E]``."""
    if is_embed.ndim != 1 or is_embed.dtype != torch.bool:
        # Torch reads a mask of another dtype as a list of indices.
        raise EmbeddingError(f"is_embed is {is_embed.dtype} of shape {list(is_embed.shape)}, expected bool, one axis")
    return is_embed.nonzero().squeeze(1).to(device)
