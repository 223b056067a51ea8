"""A second child for vLLM's MultiConnector: a store on the side that knows the first block of every prompt.

It loads within the step, as offloading connectors do, and writes the same labels as a forward of P.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.vllm.labelled import BLOCK, HEADS, labels


@dataclass
class Fills(KVConnectorMetadata):
    blocks: dict[int, list[int]] = field(default_factory=dict)


class Greeting(KVConnectorHandshakeMetadata):
    pass


class Bystander(KVConnectorBase_V1, SupportsHMA):
    """``kv_connector_extra_config``: ``offers`` tokens per prompt, 0 or a block; ``greets`` in the handshake or not."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._offers, self._greets = extra.get("offers", 0), extra.get("greets", False)
        self._fills = Fills()
        self._caches: dict[str, torch.Tensor] = {}
        self.chosen = 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Greeting() if self._greets else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = self._offers if num_computed_tokens == 0 and request.num_prompt_tokens > BLOCK else 0
        return wanted, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.chosen += 1
            self._fills.blocks[blocks.get_block_ids()[0][0]] = list(request.prompt_token_ids[:BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> Fills:
        fills, self._fills = self._fills, Fills()
        return fills

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Fills)
        for block, ids in metadata.blocks.items():
            values = labels(range(HEADS), 0, ids, 0)
            for number, cache in enumerate(self._caches.values()):
                cache.view(torch.int32)[block] = values[number]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
