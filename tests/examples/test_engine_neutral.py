"""The example without vLLM: real tensor-parallel ranks, bytes and tokens equal, and it fails when they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine_neutral.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


@pytest.mark.parametrize(("p_size", "d_size", "plane"), [(2, 1, "auto"), (1, 2, "tcp"), (3, 2, "auto")])
def test_all_prompts_are_handed_over(p_size: int, d_size: int, plane: str) -> None:
    sizes = "--prefill-tp", p_size, "--decode-tp", d_size
    done = run("--prompts", 2, 47, 150, "--tokens", 8, "--plane", plane, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for number, (line, tokens) in enumerate(zip(lines, (2, 47, 150), strict=True)):
        assert line.startswith(f"prompt-{number}: {tokens} of {tokens} tokens loaded by ")
        assert line.endswith("KV bytes equal, 8 tokens equal")
        assert plane == "auto" or " loaded by tcp in " in line


def test_it_fails_on_planted_corruption() -> None:
    done = run("--prompts", 60, 20, "--tokens", 8, "--plant-corruption", "--prefill-tp", 2, "--decode-tp", 4)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "prompt-0: KV bytes differ in layers [1]" in done.stderr
    lines = done.stdout.splitlines()
    assert "KV bytes DIFFER" in lines[0] and lines[1].endswith("KV bytes equal, 8 tokens equal")


def test_it_fails_where_the_plane_cannot_be_had() -> None:
    done = run("--plane", "smoke")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "'smoke' is not usable: expected one of auto, " in done.stderr


def test_it_fails_where_a_rank_ends() -> None:
    done = run("--plane", "cuda_ipc")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (why,) = [line for line in done.stderr.splitlines() if line.startswith("prefill rank 0: ")]
    assert "the caches lie in host memory; expected one of" in why
    assert "prefill rank 0 ended early; its message is above" in done.stderr


def test_no_vllm_is_imported() -> None:
    """The library and the example run where vLLM is not installed."""
    script = (
        "import sys; sys.modules['vllm'] = None; sys.argv = ['x', '--help']; import runpy\n"
        f"sys.path.insert(0, {str(EXAMPLE.parent / 'lib')!r})\n"
        "import tp_engine, tp_rank, kvferry.connector.engine.worker, kvferry.connector.engine.scheduler\n"
        f"table = runpy.run_path({str(EXAMPLE.parents[1] / 'docs' / 'binding_table.py')!r})\n"
        "[table['resolve'](each) for each in table['UTILITIES']]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
