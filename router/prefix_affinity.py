"""Which P has computed the beginning of a prompt before, by hashes of its blocks. Pure.

A router sees no token ids of a text. It hashes blocks of characters, which are not the engine's blocks: affinity is a
guess at what P's prefix cache holds, and only the choice of a P follows from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 256
CHARS_PER_TOKEN = 4
"""English text; only loads and affinity are weighed by it."""
MAX_BLOCKS = 64
"""So many blocks of a prompt are hashed: prompts that share more differ little in cost."""
REMEMBERED_BLOCKS = 1 << 16


@dataclass(frozen=True)
class PromptPrefix:
    """Length of a prompt in tokens, estimated for a text, and a hash of each beginning of whole blocks."""

    tokens: float
    blocks: tuple[int, ...]


def prompt_prefix(body: dict[str, Any]) -> PromptPrefix:
    """Of a completion or a chat. Prompts with one prefix for different models, or with different ``cache_salt``, share
    no blocks."""
    seed = xxh3_64_intdigest(f"{body.get('model')}\0{body.get('cache_salt')}".encode("utf-8", "surrogatepass"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        blocks = (msgspec.json.encode(prompt[at : at + BLOCK_TOKENS]) for at in _starts(len(prompt), BLOCK_TOKENS))
        return PromptPrefix(len(prompt), tuple(_chain(seed, blocks)))
    text = prompt if isinstance(prompt, str) else "".join(_texts(body))
    chars = BLOCK_TOKENS * CHARS_PER_TOKEN
    blocks = (text[at : at + chars].encode("utf-8", "surrogatepass") for at in _starts(len(text), chars))
    return PromptPrefix(max(1.0, len(text) / CHARS_PER_TOKEN), tuple(_chain(seed, blocks)))


def _starts(length: int, block: int) -> range:
    """Of whole blocks."""
    return range(0, min(length // block, MAX_BLOCKS) * block, block)


def _chain(seed: int, blocks: Iterator[bytes]) -> Iterator[int]:
    for block in blocks:
        seed = xxh3_64_intdigest(block, seed)
        yield seed


def _texts(body: dict[str, Any]) -> Iterator[str]:
    """Of a chat, in the order in which templates write them: tools, and each message's role and content."""
    if body.get("tools"):
        yield msgspec.json.encode(body["tools"]).decode()
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            yield f"\0{message.get('role')}\0"
            yield content if isinstance(content, str) else msgspec.json.encode(content).decode()


class PrefixAffinity:
    """The P that last took a prompt with a prefix, for as many prefixes as are remembered."""

    def __init__(self, remembered: int = REMEMBERED_BLOCKS) -> None:
        self._remembered = remembered
        self._by_block: OrderedDict[int, str] = OrderedDict()

    def find(self, prefix: PromptPrefix, known: set[str]) -> tuple[str | None, float]:
        """The P, one of ``known``, that took the longest part of this prefix, and the tokens of that part."""
        for count in range(len(prefix.blocks), 0, -1):
            url = self._by_block.get(prefix.blocks[count - 1])
            if url in known:
                return url, min(float(count * BLOCK_TOKENS), prefix.tokens)
        return None, 0.0

    def note(self, prefix: PromptPrefix, url: str) -> None:
        """This P takes a prompt with this prefix."""
        for block in prefix.blocks:
            self._by_block[block] = url
            self._by_block.move_to_end(block)
        while len(self._by_block) > self._remembered:
            self._by_block.popitem(last=False)
