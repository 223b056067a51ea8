"""Which tokens the blocks of a request's block table hold, after the engine has freed blocks outside a window."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.geometry.engine_types import BlockTable

NULL_BLOCK = 0
"""vLLM puts this number in a block table in place of a block that it freed."""


def first_held(table: BlockTable, block_ids: Sequence[int]) -> int:
    """The first token from which on the engine has freed no block."""
    if table.whole:
        return 0
    gone = next((place for place in reversed(range(len(block_ids))) if block_ids[place] == NULL_BLOCK), -1)
    return (gone + 1) * table.block_size


def used_blocks(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> list[int]:
    """The blocks that matter once ``num_computed`` tokens are computed: of a table of tokens the blocks of these
    tokens, without those behind them, which the engine may have for drafts; of a table of states the one block that
    holds the state after these tokens."""
    place = (num_computed - 1) // table.block_size
    return list(block_ids[place if table.kind == "state" else 0 : place + 1])


def covers(table: BlockTable, block_ids: Sequence[int], num_computed: int) -> bool:
    """Whether the blocks reach as far as ``num_computed`` tokens, and the engine still holds the last of them."""
    place = (num_computed - 1) // table.block_size
    return place < len(block_ids) and (table.whole or block_ids[place] != NULL_BLOCK)
