"""KVBytes with a digest per KV head of the model, so that engines with different numbers of ranks compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.kv_bytes import KVBytes, digest


class KVHeads(KVBytes):
    """``layers`` of a record are named ``LAYER#HEAD``; each rank has those of its own layers and heads."""

    def kv_corrupt(self, count: str = "1", rank: str = "") -> dict[str, Any]:
        """As ``KVBytes.kv_corrupt``, on one rank of the engine if it is named."""
        return super().kv_corrupt(count) if rank in ("", str(self._kvb_rank)) else {}

    def kv_save_records(self, folder: str) -> dict[str, Any]:
        """``kv_records`` into a file ``dpD-rankN.json``: of several data-parallel ranks vLLM passes one answer on."""
        replica = self.vllm_config.parallel_config.data_parallel_index  # type: ignore[attr-defined]
        (Path(folder) / f"dp{replica}-rank{self._kvb_rank}.json").write_text(json.dumps(self.kv_records()))
        return {}

    @property
    def _kvb_rank(self) -> int:
        """Counted through all pipeline stages."""
        return int(self.rank)  # type: ignore[attr-defined]

    def _kvb_record(self, when: str, request_id: str, seen: Any, tokens: int) -> None:
        super()._kvb_record(when, request_id, seen, tokens)
        in_stage = self._kvb_rank % self.vllm_config.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]
        heads = {}
        for name, layer in self._kvb_layers().items():
            rows = layer.content(seen.blocks[layer.group], tokens)
            first = in_stage * rows.shape[0]
            for number, head in enumerate(rows):
                heads[f"{name}#{first + number}"] = digest(head)
        self._kvb_records[-1]["layers"] = heads
