"""Which P has computed the beginning of a prompt before, by hashes of its blocks. Pure.

A router sees no token ids. It hashes blocks of the JSON of a prompt, which are not the engine's blocks: affinity is a
guess at what P's prefix cache holds, and only the choice of a P follows from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 256
BYTES_PER_TOKEN = 4  # English text; only loads and affinity are weighed by it
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
MAX_BLOCKS = 64  # So many blocks of a prompt are hashed: prompts that share more differ little in cost
REMEMBERED_BLOCKS = 1 << 16
PROMPT = ("tools", "instructions", "system", "messages", "input", "prompt")
"""The members of a body that make the prompt, in the order in which templates write them."""


@dataclass(frozen=True)
class PromptPrefix:
    """Length of a prompt in tokens, estimated, and a hash of each beginning of whole blocks."""

    tokens: float
    blocks: tuple[int, ...]


def prompt_prefix(body: Mapping[str, Any]) -> PromptPrefix:
    """Of a body whose members are JSON as it came. Prompts with one prefix for different models, or with different
    ``cache_salt``, share no blocks."""
    parts = [body[name] for name in PROMPT if name in body]
    begin = b"".join(bytes(memoryview(part)[: (MAX_BLOCKS + 1) * BLOCK_BYTES]) for part in parts).lstrip(b' ["')
    tokens = max(1.0, sum(map(len, parts)) / BYTES_PER_TOKEN)
    blocks: list[int] = []
    before = 0
    for at in range(0, min(len(begin) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        if not blocks:
            before = xxh3_64_intdigest(b"%b\0%b" % (bytes(body.get("model", b"")), bytes(body.get("cache_salt", b""))))
        before = xxh3_64_intdigest(begin[at : at + BLOCK_BYTES], before)
        blocks.append(before)
    return PromptPrefix(tokens, tuple(blocks))


class PrefixAffinity:
    """The P that last took a prompt with a prefix, for as many prefixes as are remembered."""

    def __init__(self, remembered: int = REMEMBERED_BLOCKS) -> None:
        self._remembered = remembered
        self._by_block: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def find(self, prefix: PromptPrefix, known: set[str]) -> tuple[str | None, float]:
        """The P, one of ``known``, that took the longest part of this prefix, and the tokens of that part."""
        for count in range(len(prefix.blocks), 0, -1):
            url, tokens = self._by_block.get(prefix.blocks[count - 1], (None, 0.0))
            if url in known:
                return url, min(tokens, prefix.tokens)
        return None, 0.0

    def note(self, prefix: PromptPrefix, url: str, tokens: float = 0.0) -> None:
        """This P takes a prompt with this prefix. ``tokens``: it has so many, with those behind the whole blocks."""
        for count, block in enumerate(prefix.blocks, 1):
            self._by_block[block] = url, float(count * BLOCK_TOKENS)
            self._by_block.move_to_end(block)
        if prefix.blocks and tokens:
            self._by_block[prefix.blocks[-1]] = url, tokens
        while len(self._by_block) > self._remembered:
            self._by_block.popitem(last=False)
