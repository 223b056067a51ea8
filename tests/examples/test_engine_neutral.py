"""The example without vLLM: real tensor-parallel ranks, bytes and tokens equal, and it fails when they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import fork_server

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine_neutral.py"


def run(*arguments: object) -> Any:
    return fork_server().run(str(EXAMPLE), *map(str, arguments), timeout=800)


def test_all_prompts_are_handed_over() -> None:
    done = run("--prompts", 2, 47, 150, "--tokens", 8, "--prefill-tp", 3, "--decode-tp", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (line, tokens) in enumerate(zip(done.stdout.splitlines(), (2, 47, 150), strict=True)):
        assert line.startswith(f"prompt-{number}: {tokens} of {tokens} tokens loaded by ")
        assert line.endswith("KV bytes equal, 8 tokens equal")
    assert "dropped" not in done.stderr, "a regular end is no warning"


def test_it_fails_on_planted_corruption() -> None:
    sizes = "--prefill-tp", 1, "--decode-tp", 1
    done = run("--prompts", 60, 20, "--tokens", 8, "--plant-corruption", "--plane", "tcp", *sizes)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "prompt-0: KV bytes differ in layers [1]" in done.stderr
    first, second = done.stdout.splitlines()
    assert "KV bytes DIFFER" in first and " loaded by tcp in " in second
    assert second.endswith("KV bytes equal, 8 tokens equal")


@pytest.mark.parametrize(
    ("plane", "said"),
    [
        ("smoke", "'smoke' is not usable: expected one of auto, "),
        ("cuda_ipc", "prefill rank 0 ended early; its message is above"),
    ],
)
def test_it_fails_where_the_plane_cannot_be_had(plane: str, said: str) -> None:
    done = run("--plane", plane, "--prefill-tp", 1, "--decode-tp", 1)
    assert done.returncode == 1 and "Traceback" not in done.stderr and said in done.stderr
    if plane == "cuda_ipc":
        (why,) = [line for line in done.stderr.splitlines() if line.startswith("prefill rank 0: ")]
        assert "the caches lie in host memory; expected one of" in why


def test_no_vllm_is_imported() -> None:
    script = (
        "import sys, runpy; assert 'vllm' not in sys.modules\n"
        "sys.modules['vllm'] = None; sys.argv = ['x', '--help']\n"
        f"sys.path.insert(0, {str(EXAMPLE.parent / 'lib')!r})\n"
        "import tp_engine, tp_rank, kvferry.connector.worker.worker, kvferry.connector.scheduler.scheduler\n"
        f"table = runpy.run_path({str(EXAMPLE.parents[1] / 'docs' / 'binding_table.py')!r})\n"
        "[table['resolve'](each) for each in table['UTILITIES']]\n"
    )
    done = fork_server().run("-c", script, timeout=800)
    assert done.returncode == 0, done.stderr
