"""KVFerry under the class name of vLLM's NIXL connector, for frameworks that hand prompts over under this name only.

``{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.connector.vllm.as_nixl"}``: vLLM takes the
class of this name from the module. Not below MultiConnector, which looks up the classes of its children by name alone.
"""

from __future__ import annotations

from kvferry.connector.vllm.adapter import KVFerryConnector


class NixlConnector(KVFerryConnector):
    """``KVFerryConnector``; nothing of NIXL is used."""
