"""Which prefixes lie in the blocks of this rank now, and which of them D reads. Nothing holds these blocks.

The engine's thread writes, before the device gets the work of a step; the transfer thread reads. A prefix that D reads
is *lent*: it has a life of its own (``PromptBlocks``), which ends when the engine gives one of its blocks to another
request. What D has read counts only where that life had not ended after the read, as with a prompt under computation.
"""

from __future__ import annotations

import secrets
import threading
from array import array

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.wire.messages import DIGEST_BYTES
from kvferry.connector.wire.step_plan import PrefixOffer, StepPlan, unpack_ids

MAX_LENT = 1024
"""Prefixes that are lent at one time. Peers ask for them: one gets no place while it has as many as are free."""
NOTHING = bytes(DIGEST_BYTES)
_WORD = (1 << 64) - 1


class PrefixIndex:
    """The prefixes of one rank, by digest. Each lies in a *place*: place n of a block is for the n-th of the prefixes
    that may end in it. A place takes 28 bytes at most, from the first offer on.

    Attributes:
        params: the ``kv_transfer_params`` that name the engine's ranks, in MessagePack; empty before the first offer.
        lent: by token, the life of each prefix that is lent, its blocks, and the address of the D that reads it.
        lost: the tokens of lent prefixes whose life the engine's thread has ended, for the transfer thread to take.
    """

    def __init__(self, num_blocks: int, per_block: int) -> None:
        """``per_block``: prefixes that may end in one block."""
        self._num_blocks, self._per_block = num_blocks, per_block
        self._lock = threading.Lock()
        self.lent: dict[bytes, tuple[PromptBlocks, frozenset[int], str]] = {}
        self._bits = 0  # of the number of a chain
        self._factor = secrets.randbits(64) | 1  # nobody can choose prompts whose digests lie in one chain
        self._heads = self._next = array("i")  # a hash table of chains of places
        self._digests = bytearray()  # by place
        self.params = b""
        self.lost: list[bytes] = []

    # --- the engine's thread ------------------------------------------------------------------------------------

    def update(self, plan: StepPlan) -> bool:
        """Take what a plan offers, and then take back what it reuses. Returns whether a lent prefix was lost. Must come
        before the device gets work on the blocks, and once for each plan."""
        with self._lock:
            for offer in plan.offers:
                self.params = offer.params or self.params
                self._offer(offer)
            reused = unpack_ids(plan.reused).tolist()
            for block in reused:
                for place in range(block * self._per_block, (block + 1) * self._per_block):
                    self._forget(place)
            lost = [token for token, (_, held, _) in self.lent.items() if not held.isdisjoint(reused)]
            for token in lost:
                self.lent.pop(token)[0].lose()
            self.lost += lost
            return bool(lost)

    def _offer(self, offer: PrefixOffer) -> None:
        if not self._num_blocks:  # of a pipeline stage without layers
            return
        if not self._digests:
            places = self._num_blocks * self._per_block
            self._bits = places.bit_length()
            self._heads, self._next = array("i", [-1]) * (1 << self._bits), array("i", [-1]) * places
            self._digests = bytearray(places * DIGEST_BYTES)
        blocks, first = unpack_ids(offer.block_ids).tolist(), offer.first - offer.first % self._per_block
        for number in range(len(offer.digests) // DIGEST_BYTES):
            digest = offer.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            block, place = divmod(offer.first + number - first, self._per_block)
            self._put(blocks[block] * self._per_block + place, digest)

    def _at(self, place: int) -> bytes:
        return bytes(self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])

    def _chain(self, digest: bytes) -> int:
        return (int.from_bytes(digest[:8], "little") * self._factor & _WORD) >> (64 - self._bits)

    def _put(self, place: int, digest: bytes) -> None:
        if self._at(place) == digest:
            return
        self._forget(place)
        chain = self._chain(digest)
        self._next[place], self._heads[chain] = self._heads[chain], place
        self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest

    def _forget(self, place: int) -> None:
        digest = self._at(place)
        if not digest or digest == NOTHING:
            return
        table, at = self._heads, self._chain(digest)
        while table[at] != place:
            table, at = self._next, table[at]
        table[at] = self._next[place]
        self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = NOTHING

    # --- the transfer thread ------------------------------------------------------------------------------------

    def find(self, digests: bytes) -> int:
        """How many of a prompt's prefixes lie here, from the first one on."""
        with self._lock:
            return len(self._places(digests))

    def lend(self, token: bytes, digests: bytes, address: str) -> tuple[PromptBlocks, list[int]] | None:
        """The begin of a life of the prefix with the last of these digests, and its blocks; ``None`` where it does not
        lie here, or too many are lent: to all, or to the peers at this address."""
        with self._lock:
            places, per_block = self._places(digests).tolist(), self._per_block
            theirs = [other for *_, other in self.lent.values()].count(address)
            if len(places) * DIGEST_BYTES != len(digests) or theirs + len(self.lent) >= MAX_LENT:
                return None
            # A block in which a prefix ends has the tokens before, too. Another may have the same.
            blocks = [place // per_block for place in [*places[per_block - 1 :: per_block], *places[-1:]]]
            if len(places) % per_block == 0:
                blocks.pop()
            life = PromptBlocks()
            self.lent[token] = life, frozenset(blocks), address
            return life, blocks

    def _places(self, digests: bytes) -> NDArray[np.int32]:
        """The places of the first of these digests, up to one that lies nowhere. A long prompt has thousands, and the
        engine's thread may wait for the lock."""
        whole = len(digests) // DIGEST_BYTES * DIGEST_BYTES
        if not (self._digests and whole):
            return np.empty(0, np.int32)
        wanted = np.frombuffer(digests[:whole], "<u8").reshape(-1, 2)
        known = np.frombuffer(self._digests, "<u8").reshape(-1, 2)
        heads, following = np.frombuffer(self._heads, np.int32), np.frombuffer(self._next, np.int32)
        chains = wanted[:, 0] * np.uint64(self._factor) >> np.uint64(64 - self._bits)
        places = heads[chains.astype(np.intp)]
        while (others := np.flatnonzero((places >= 0) & (known[places] != wanted).any(axis=1))).size:
            places[others] = following[places[others]]
        missing = np.flatnonzero(places < 0)
        return places[: missing[0]] if missing.size else places

    def take_lost(self) -> list[bytes]:
        """The tokens of the prefixes that were lost since the last call."""
        with self._lock:
            lost, self.lost = self.lost, []
            return lost

    def end(self, token: bytes) -> None:
        """D reads a prefix no more. Idempotent."""
        with self._lock:
            self.lent.pop(token, None)
