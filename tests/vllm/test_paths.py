"""Each path of the installed vLLM's server is known to the router: as harmless, or as one that changes an engine."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from kvferry.router.request_bodies import WITH_P, changes_engine

HARMLESS = """
    /openapi.json /docs /docs/oauth2-redirect /redoc /load /version /kv_event_sources /health /metrics /tokenize
    /detokenize /tokenizer_info /v1/models /v1/systemone /ping /invocations /server_info /is_sleeping /is_paused
    /weight_info /get_world_size /v1/chat/completions /v1/chat/completions/batch /v1/responses
    /v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/completions /v1/messages
    /v1/messages/count_tokens /generative_scoring /is_scaling_elastic_ep /v1/chat/completions/render
    /v1/messages/render /v1/completions/render /v1/responses/render /v1/chat/completions/derender
    /v1/completions/derender /inference/v1/generate /v1/realtime /v1/audio/transcriptions /v1/audio/translations
    /pooling /classify /v1/embeddings /v2/embed /score /v1/score /rerank /v1/rerank /v2/rerank /v2/chat
"""


def names(of: Any) -> set[str]:
    return {of} if isinstance(of, str) else set().union(*map(names, typing.get_args(of)))


def test_a_path_of_vllm_is_harmless_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one fails here until somebody has read what it does."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    from fastapi import FastAPI
    from vllm import tasks
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.pooling.classify.api_router import router as classify
    from vllm.entrypoints.pooling.embed.api_router import router as embed
    from vllm.entrypoints.pooling.pooling.api_router import router as pooling
    from vllm.entrypoints.pooling.scoring.api_router import router as scoring
    from vllm.entrypoints.serve.profile.api_router import router as profile
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.enable_fault_tolerance = arguments.enable_tokenizer_info_endpoint = True
    app: FastAPI = build_app(arguments, tuple(names(tasks.SupportedTask)))
    for router in (classify, embed, pooling, scoring, profile):
        app.include_router(router)
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    assert len(paths) > 60 and set(WITH_P) <= paths
    assert {path for path in paths if not changes_engine(path)} - set(HARMLESS.split()) == set()
    assert not [path for path in HARMLESS.split() if changes_engine(path)]
