"""The ``vllm.general_plugins`` entry point, run in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Make ``KVFerryConnector`` known to vLLM by name. May run more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVFerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.connector.vllm.adapter", "KVFerryConnector")
