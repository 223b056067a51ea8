"""kv_bytes.KVBytes with a digest per KV head of the model, so that engines with different numbers of ranks compare."""

from __future__ import annotations

from typing import Any

from kv_bytes import KVBytes, digest, rows_of


class KVHeads(KVBytes):
    """``layers`` of a record are named ``LAYER#HEAD``; each rank has those of its own heads."""

    def _kvb_record(self, when: str, request_id: str, seen: Any, tokens: int) -> None:
        super()._kvb_record(when, request_id, seen, tokens)
        heads = {}
        for name, (group, page_tokens, cache, places) in self._kvb_layers().items():
            rows = rows_of(cache, seen.blocks[group], page_tokens, tokens, places)
            first = self.rank * rows.shape[0]  # type: ignore[attr-defined]
            for number, head in enumerate(rows):
                heads[f"{name}#{first + number}"] = digest(head)
        self._kvb_records[-1]["layers"] = heads
