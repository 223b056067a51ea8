"""A connector that does nothing: what vLLM itself does in a step where it has any connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


def nothing(*_: Any, **__: Any) -> Any:
    return None


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands nothing over."""

    update_state_after_alloc = nothing
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
