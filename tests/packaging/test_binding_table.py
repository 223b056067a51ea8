"""The table of the KV-binding utilities names functions that exist, and lists their parameters."""

from __future__ import annotations

import ast
import inspect
import runpy
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "binding_table.py"))
RENAMED = {
    "vllm_config": {"layout", "source", "config", "connector", "num_blocks"}, "available_memory": {"num_blocks"},
    "kv_cache_raw_tensors": {"raw"}, "attn_backends": {"layout"}, "block_tables": set(), "enable_cache": {"cache"},
}  # fmt: skip
"""Parameters of vLLM's functions that ours do not have, and the parameters that replace them."""


def test_every_row_is_there_and_takes_what_its_seed_takes() -> None:
    assert len({utility.name for utility in TABLE["UTILITIES"]}) == len(TABLE["UTILITIES"])
    for utility in TABLE["UTILITIES"]:
        ours = set(inspect.signature(TABLE["resolve"](utility)).parameters)
        (function,) = ast.parse(f"def {utility.seed}: ...").body
        assert isinstance(function, ast.FunctionDef)
        seed = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
        assert seed
        for name in seed - ours:
            assert name in RENAMED and (not RENAMED[name] or RENAMED[name] & ours), (utility.name, name)
