"""The table of the KV-binding utilities names what is there, by its own parameters."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

from kvferry.connector.binding.binding_table import UTILITIES, markdown, resolve

RENAMED = {
    "vllm_config": {"layout", "source", "config", "connector", "num_blocks"},
    "available_memory": {"num_blocks"},
    "kv_cache_raw_tensors": {"raw"},
    "attn_backends": {"layout"},
    "block_tables": set(),
}
"""What of vLLM's is not taken as it is, and the parameters that stand for it."""


def test_every_row_is_there_and_takes_what_its_seed_takes() -> None:
    assert len({utility.name for utility in UTILITIES}) == len(UTILITIES)
    for utility in UTILITIES:
        ours = set(inspect.signature(resolve(utility)).parameters)
        (function,) = ast.parse(f"def {utility.seed}: ...").body
        assert isinstance(function, ast.FunctionDef)
        seed = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
        assert seed
        for name in seed:
            assert name in ours or (name in RENAMED and (not RENAMED[name] or RENAMED[name] & ours)), (
                utility.name,
                name,
            )


def test_it_prints_as_markdown() -> None:
    lines = markdown().splitlines()
    assert len(lines) == len(UTILITIES) + 2 and all(line.count(" | ") == 4 for line in lines[:1] + lines[2:])
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.connector.binding.binding_table"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.rstrip() == markdown()
