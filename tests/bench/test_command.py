"""``kvferry bench``: for real between two processes, and every wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from kvferry.cli import bench as bench_command
from kvferry.cli.bench import BenchRow
from kvferry.cli.main import app
from kvferry.cli.rank_pair import CacheForm

SMALL = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_planes_are_measured_on_the_model_s_caches(model: Path, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    done = run(
        "--model", model, "--plane", "cma", "--plane", "tcp", "--prompt", 40, "--prompt", 100, "--rounds", 3,
        "--json", written, "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(written.read_text())
    token = 2 * 2 * 2 * 16 * 2  # layers, heads, K and V, elements, bytes
    assert [(row["plane"], row["tokens"], row["nbytes"]) for row in result["rows"]] == [
        (plane, tokens, tokens * token) for plane in ("cma", "tcp") for tokens in (40, 100)
    ]
    for row in result["rows"]:
        assert len(row["samples_ms"]) == 3 and row["samples_ms"] != [0] * 3
        assert min(row["samples_ms"]) <= row["p50_ms"] <= max(row["samples_ms"])
    assert result["copy_gb_per_second"] > 0
    assert "one contiguous copy" in done.output


def test_wrong_bytes_are_a_failure_and_a_model_whose_layers_differ_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "measure", lambda *_: [BenchRow("shm", 16, 100, 2.0, 1.0, [1.0, 2.0, 3.0], 7)])
    done = run("--model", model, "--plane", "shm", "--prompt", 16)
    assert done.exit_code == 1 and "shm: 7 bytes arrived wrong" in done.output
    (model / "config.json").write_text(json.dumps(SMALL | {"model_type": "gemma2", "sliding_window": 64}))
    done = run("--model", model)
    assert done.exit_code == 2 and "this one has windows" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plane", "tpc"], "tpc"),
        (["--model", ""], "--model is empty"),
        (["--json", "no/such/folder.json"], "no/such/folder.json cannot be written: No such file or directory"),
        (["--plane", "cuda_ipc", "--device", "cpu"], None),
        (["--rounds", "2"], "Invalid value for '--rounds': "),
        (["--prompt", "0"], "Invalid value for '--prompt': "),
        (["--prompt", str(1 << 30)], "Invalid value for '--prompt': "),
        (["--tp", "3"], "--tp is 3, expected a divisor of the 32 attention heads"),
        (["--d-block-size", "16"], "bench --d-block-size is gone: both ranks have blocks of 16 tokens, NHD"),
        (["--model", "nowhere"], "nowhere is no file and no folder, nor a model in the cache"),
        (["--prompt", "4000000"], "MiB are free; give a smaller --prompt"),
        (["--device", "cuda"], "PyTorch sees no GPU; give --device cpu"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str | None) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run(*arguments)
    if said is None:
        said = "kvferry: not measured: cuda_ipc: it carries no host memory\n"
        assert done.exit_code == 1 and done.output == said, "and the baselines were not measured"
    else:
        assert done.exit_code == 2 and said in done.output
        assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1


def test_each_element_of_the_pattern_is_another() -> None:
    form = CacheForm(2, 3, 4, 50)
    assert len(form.pattern(0, 1).unique()) == form.blocks * 16 * 3 * 4
    assert not torch.equal(form.pattern(0, 1), form.pattern(0, 2))
    assert not torch.equal(form.pattern(0, 1), form.pattern(1, 1))
    assert form.caches("cpu")["layer 0"].shape == (4, 3, 16, 4)
