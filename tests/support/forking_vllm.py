"""vLLM's command, whose engine core and workers import nothing: ``python -m tests.support.forking_vllm serve ...``."""

from __future__ import annotations

from vllm.entrypoints.cli.main import main

from tests.support.engine_process import import_nothing

if __name__ == "__main__":
    import_nothing()
    main()
