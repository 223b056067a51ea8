"""Whether D can use the prompt that P holds for a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.engine.transfer_params import RemotePrompt, prompt_digest, prompt_digests
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.transport.errors import ProtocolError

_LEFT_TO_D = 8
"""Tokens at the end of a prompt that P leaves to D: one for a state or a window, else those of its lookahead."""


def possible_digests(request: RequestView) -> tuple[str, ...]:
    """The digests of a request's prompt, whole and without up to ``_LEFT_TO_D`` of its last tokens: P's lease of it has
    one of them."""
    ids = request.prompt_token_ids
    if ids is None:
        return ()
    return prompt_digests(ids, request.extra, min(_LEFT_TO_D, len(ids) - 1))


def check_prompt(request: RequestView, remote_prompt: RemotePrompt) -> None:
    """Check that P has prefilled the request's prompt.

    Raises:
        ProtocolError: P has prefilled another prompt, or the check is not possible; names the reason.
    """
    ours = request.num_prompt_tokens
    if remote_prompt.num_tokens > ours:  # fewer are valid: D may compute the last ones
        raise ProtocolError(f"P prefilled {remote_prompt.num_tokens} prompt tokens, this request has {ours}")
    if request.prompt_token_ids is None:
        raise ProtocolError("its prompt is given as embeddings, which cannot be told apart from P's")
    prefilled = request.prompt_token_ids
    if remote_prompt.num_tokens < ours:
        prefilled = prefilled[: remote_prompt.num_tokens]
    if prompt_digest(prefilled, request.extra) != remote_prompt.prompt:
        raise ProtocolError("P prefilled another prompt (tokens, LoRA adapter or multi-modal inputs differ)")


def check_adapter(request: RequestView, remote_prompt: RemotePrompt) -> None:
    """Check that P has prefilled the prompt with the request's LoRA adapter, where both know its content.

    Raises:
        ProtocolError: P has another one of that name.
    """
    if request.adapter != remote_prompt.adapter and request.adapter and remote_prompt.adapter:
        raise ProtocolError(
            "P prefilled the prompt with another LoRA adapter of this name; load the same files on both"
        )


def check_kept(tables: Sequence[BlockTable], remote_prompt: RemotePrompt, num_local: int, stop: int) -> None:
    """Check that P still has the tokens with which D's blocks must be filled.

    D fills a block whole or does not load it, because the engine offers the block to other requests. Where P's blocks
    are smaller than D's, P may have freed a part of such a block.

    Args:
        tables: D's block tables.
        remote_prompt: P's description of its prompt and block tables.
        num_local: tokens that D has.
        stop: tokens that D has after the load.

    Raises:
        ProtocolError: P has freed tokens that D needs; names these tokens.
    """
    if any(table.kind == "state" for table in tables) and remote_prompt.num_tokens != stop:
        raise ProtocolError(
            f"P's state is that after {remote_prompt.num_tokens} tokens, needed is the one after {stop}"
        )
    for kind, window, kept in remote_prompt.kept:
        ours = [table for table in tables if (table.kind, table.window) == (kind, window)]
        first = min(
            (max(num_local, t.first_needed(stop) // t.block_size * t.block_size) for t in ours), default=num_local
        )
        if kept > first:
            raise ProtocolError(
                f"P kept the window of {window} tokens from token {kept} on, our blocks begin at {first}"
            )
