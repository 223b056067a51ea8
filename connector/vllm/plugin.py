"""The ``vllm.general_plugins`` entry point, run in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Make ``KVFerryConnector`` known to vLLM by name. May run more than once."""
    from kvferry.connector.vllm.compat import register_connector

    register_connector("KVFerryConnector", "kvferry.connector.vllm.adapter")
