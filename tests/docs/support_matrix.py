"""The tables of families and features of docs/compatibility.md, made from the tests: a mark stands for a test that has
this family among its parameters, so a test that goes takes its mark with it.

python tests/docs/support_matrix.py pairings|families|features|caches
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from kvferry.connector.vllm import cache_kinds
from tests.ranks import matrix as table
from tests.support import families
from tests.vllm.test_families_vllm import KINDS

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "llama"
CASES = "tests/vllm/test_families_vllm.py"
STEPS = "tests/vllm/test_handover_steps.py"
COLUMNS = {
    "engines": ("tests/engine/test_families.py::test_family", "tests/engine/test_pair.py::"),
    "scheduler": (f"{CASES}::test_d_finds_all_that_it_reads_and_has_computed_none_of_it", f"{STEPS}::"),
    "prefix caching": (
        f"{CASES}::test_a_prompt_that_begins_alike_loads_only_the_rest",
        f"{STEPS}::test_a_prefix_hit_loads_only_the_rest",
    ),
    "both legs at once": (f"{CASES}::test_both_legs_at_once", "tests/vllm/test_rendezvous.py::"),
}
"""By column the test that has families as its parameters, and the one of Llama's. Without a name: all of the file."""
SPECS = {
    "FullAttentionSpec": "all tokens", "MLAAttentionSpec": "MLA", "SlidingWindowSpec": "sliding windows",
    "ChunkedLocalAttentionSpec": "local chunks", "MambaSpec": "states", "UniformTypeKVCacheSpecs": "states, all tokens",
}  # fmt: skip
"""vLLM's kinds of cache, in words."""
CARRIED = {
    "full": "all tokens", "mla": "MLA", "sliding_window": "sliding windows", "chunked_local": "local chunks",
    "state": "states",
}  # fmt: skip
"""Likewise, by KVFerry's kind."""
FEATURES = {
    "chunked prefill": [f"{STEPS}::test_a_prompt_prefilled_in_chunks"],
    "preemption": [f"{STEPS}::test_preempted_on_p", f"{STEPS}::test_preempted_on_d_after_its_load"],
    "speculative decoding": [
        f"{STEPS}::test_drafts_on_both_sides",
        f"{STEPS}::test_drafts_on_one_side_alone",
        "tests/vllm/test_draft_layers.py::",
        "tests/engine/test_drafts.py::",
    ],
    "several samples of a prompt": [f"{STEPS}::test_three_samples_of_one_prompt_read_under_one_lease"],
    "LoRA adapters": ["tests/vllm/test_handover_steps.py::test_d_loads_what_p_computed_with_the_same_adapter"],
    "MultiConnector beside a store": [
        "tests/vllm/test_beside_connectors.py::test_d_has_the_choice",
        "tests/vllm/test_beside_connectors.py::test_both_load",
    ],
    "tensor parallelism, pipeline stages": ["tests/engine/test_engine_forms.py::test_two_and_one"],
    "data parallelism": ["tests/engine/test_engine_forms.py::test_two_replicas_of_an_engine"],
    "decode context parallelism": ["tests/vllm/test_context_steps.py::test_any_form_to_any_form"],
    "prefill context parallelism": ["tests/vllm/test_context_steps.py::test_prefill_context_parallelism_to_any_form"],
    "both failure policies": ["tests/vllm/test_peer_loss.py::", "tests/vllm/test_step_loads.py::"],
    "sleep and wake (vLLM 0.33)": [
        "tests/vllm/test_contract.py::test_engines_sleep_and_wake",
        "tests/gpu/test_models.py::test_sleep",
    ],
    "pause, resets, new weights": ["tests/vllm/test_resets.py::"],
}
"""What is tested with Llama alone."""


def functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(test: str) -> bool:
    """Whether a test is there: ``FILE::`` is one with any test, ``FILE::NAME`` that test."""
    file, _, name = test.partition("::")
    found = functions(file) if (ROOT / file).is_file() else {}
    return name in found if name else any(one.startswith("test_") for one in found)


def parameters(test: str) -> set[str]:
    """The families that a test runs with: the table of tests/support/families.py that its ``parametrize`` names."""
    file, _, name = test.partition("::")
    found: set[str] = set()
    for call in functions(file)[name].decorator_list if test else ():
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            found |= set(getattr(families, ast.unparse(call.args[1])))
    return found


def family_table() -> str:
    lines = ["| family | caches | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    marks = {
        column: parameters(test) | ({LLAMA} if exists(llama) else set()) for column, (test, llama) in COLUMNS.items()
    }
    for name in (LLAMA, *families.ALL):
        kinds = KINDS.get(name, {"FullAttentionSpec"})
        row = [
            name,
            ", ".join(sorted(SPECS[kind] for kind in kinds)),
            *("✓" * (name in marks[column]) for column in marks),
        ]
        lines.append(f"| {' | '.join(row)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def feature_table() -> str:
    lines = ["| feature of vLLM | tests |", "|---|---|"]
    for feature, tests in FEATURES.items():
        if all(map(exists, tests)):
            lines.append(f"| {feature} | {', '.join('`' + test.removesuffix('::') + '`' for test in tests)} |")
    return "\n".join(lines)


def cache_table() -> str:
    lines = ["| vLLM's class | handed over as |", "|---|---|"]
    carried = {name: CARRIED[kind] for name, (kind, _) in cache_kinds.CARRIED.items()}
    carried |= {cache_kinds.RING: "rings", cache_kinds.WRAPPER: "what its layers are"}
    refused = {name: f"refused: {why}" for name, why in cache_kinds.REFUSED.items()}
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in (carried | refused).items())])


SHOWN = {
    "pairings": lambda: table.render(table.load()), "families": family_table, "features": feature_table,
    "caches": cache_table,
}  # fmt: skip

if __name__ == "__main__":
    print(SHOWN[sys.argv[1]]())
