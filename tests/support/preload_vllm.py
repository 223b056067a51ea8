"""The imports of vLLM's server, engine core and CPU worker, for a fork server of engines (see ``engine_process``)."""

from __future__ import annotations

import vllm.config
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
import vllm.entrypoints.launchers.api_server.entry
import vllm.model_executor.models.llama
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
