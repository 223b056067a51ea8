"""``KVFerryConnector`` under the name ``NixlConnector``, for launchers and routers that take known names only.

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_module_path": "kvferry.connector.vllm.as_nixl"}'

vLLM looks the class up in the module before it looks into its own registry. The setting ``kv_connector_extra_config``
and the metrics are those of KVFerry.
"""

from __future__ import annotations

from kvferry.connector.vllm.adapter import KVFerryConnector


class NixlConnector(KVFerryConnector):
    """KVFerry, by the name that Dynamo and others look for."""
