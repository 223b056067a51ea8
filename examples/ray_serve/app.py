"""Ray Serve's own application for disaggregated prefill and decode, with KVFerry as its connector.

    serve run examples.ray_serve.app:build model=Qwen/Qwen3-8B

Ray starts one engine for each replica; the decode replicas ask the prefill replicas first. By Ray's default D is asked
with the ``kv_transfer_params`` of P's answer, as KVFerry needs it. Nothing is set for one replica: vLLM gives each
engine an id, and KVFerry finds a free control port. What holds for a node (its address, the key) is in the environment
of ``ray start``, which the replicas inherit: docs/deployment.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMConfig, build_pd_openai_app

KV_TRANSFER_CONFIG = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def engines(model: str, *, replicas: int, **options: Any) -> LLMConfig:
    """The engines of one role. ``options``: further fields of ``LLMConfig``, such as ``engine_kwargs``."""
    engine_kwargs = {"kv_transfer_config": dict(KV_TRANSFER_CONFIG), **options.pop("engine_kwargs", {})}
    return LLMConfig(
        model_loading_config={"model_id": "model", "model_source": model},
        deployment_config={"num_replicas": replicas},
        engine_kwargs=engine_kwargs,
        **options,
    )


def build(arguments: Mapping[str, str]) -> Application:
    """The application. ``arguments``: ``model``, and the number of ``prefill`` and ``decode`` replicas (1)."""
    model = arguments["model"]
    prefill, decode = (engines(model, replicas=int(arguments.get(role, 1))) for role in ("prefill", "decode"))
    return build_pd_openai_app({"prefill_config": prefill, "decode_config": decode})
