"""The command ``kvferry plan``: tables, JSON, errors of one line; and the commands of docs/planning.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from kvferry.cli.main import app
from kvferry.cli.plan.command import PlanResult, bytes_per_second
from kvferry.transport.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text()
CONFIG = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


def plan(model: Path, *options: str) -> Result:
    given = ["plan", "--model", str(model), "--prefill-tokens-per-second", "20000", *options]
    return CliRunner().invoke(app, given, env={"COLUMNS": "160"})


def test_the_plan_of_two_deployments(model: Path) -> None:
    out = model / "plan.json"
    done = plan(model, "--p-tp", "2", "--d-tp", "1", "--link", "12.5GB/s", "--prompt", "1000", "--prompt", "8000",
                "--plane", "tcp/host", "--json", str(out))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "pp0 tp1" in done.output and "524.29" in done.output and "share of TTFT" in done.output
    result = msgspec.json.decode(out.read_bytes(), type=PlanResult)
    assert result.form == "kvferry-plan-2" and result.plane == "tcp/host" and result.link_bytes_per_second == 12.5e9
    assert [prompt.tokens for prompt in result.prompts] == [1000, 8000]
    assert [prompt.nbytes for prompt in result.prompts] == [1000 * 131072, 8000 * 131072]
    assert [read.p for read in result.reads] == [(0, 0), (0, 1)]
    long = result.prompts[1]
    assert long.messages == sum(read.messages for read in result.reads) > 0
    assert long.seconds > long.nbytes / 12.5e9 and long.p95_seconds >= long.seconds
    assert long.share == pytest.approx(long.seconds / (long.seconds + 0.4))


def test_a_model_with_windows_says_what_it_keeps(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(json.loads(CONFIG) | {"model_type": "gemma2", "sliding_window": 64}))
    done = plan(model, "--p-tp", "2", "--prompt", "1000")
    assert "131072 bytes of KV a token in 32 layers, in 16 of them for 64 tokens\n" in done.output
    assert "16 in 1..31" in done.output and "16 in 0..30" in done.output


def test_a_model_by_its_name_and_the_planes_of_a_default_installation(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model / "cache"
    folder = cache / "models--some-org--Some-8B"
    (folder / "snapshots" / "0f1e").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0f1e")
    (folder / "snapshots" / "0f1e" / "config.json").write_text(CONFIG)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    name = Path("some-org/Some-8B")
    here, apart = plan(name), plan(name, "--link", "100Gbps")
    assert here.exit_code == apart.exit_code == 0, here.output + apart.output
    assert "Hand-overs over cuda_ipc/gpu" in here.output and "Hand-overs over tcp/gpu" in apart.output
    assert "tcp/gpu has not been measured" in apart.output


@pytest.mark.parametrize(("plane", "measured"), [("nixl/gpu", "ucx/gpu"), ("tcp/gpu", "tcp/host")])
def test_a_plane_that_was_not_measured_is_a_guess_and_says_so(model: Path, plane: str, measured: str) -> None:
    out = model / "plan.json"
    done = plan(model, "--plane", plane, "--link", "25Gb/s", "--prompt", "8000", "--json", str(out))
    assert done.exit_code == 0, done.output
    line = f"{plane} has not been measured: its times are a guess, by the costs of {measured} and --link\n"
    assert line in done.output
    result = msgspec.json.decode(out.read_bytes(), type=PlanResult)
    assert (result.plane, result.costs_of) == (plane, measured)
    (prompt,) = result.prompts
    assert prompt.messages > 0 and prompt.seconds > prompt.nbytes / 3.125e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere.json"], "nowhere.json is no file and no folder, nor a model in the cache"),
        (["--model", "meta-llama/Llama-3.1-8B"], "meta-llama/Llama-3.1-8B is no file and no folder, nor a model in"),
        (["--model", "a\0b"], "is no file and no folder"),
        (["--model", "x" * 300], "is no file and no folder"),
        (["--model", ""], "kvferry: --model is empty; name the config.json of a model, or its folder"),
        (["--plane", "tcp"], "(did you mean 'tcp/gpu' or 'tcp/host'?)"),
        (["--plane", "nixl/gpu"], "--plane nixl/gpu has not been measured: give --link"),
        (["--d-pp", "33"], "D: PP 33 is outside 1..32"),
        (["--p-tp", "0"], "Invalid value for '--p-tp': "),
        (["--d-block-size", "0"], "Invalid value for '--d-block-size': "),
        (["--link", "fast"], "--link 'fast' is no rate"),
        (["--prefill-tokens-per-second", "-1"], "--prefill-tokens-per-second is -1"),
        (["--calibration", "config.json"], "plan --calibration is gone: write the costs into"),
        (["--json", "no/such/folder.json"], "no/such/folder.json cannot be written"),
    ],
)
def test_errors_have_one_line(model: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    monkeypatch.chdir(model)
    done = plan(model, *options)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("kvferry: ") and done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.parametrize("config", ["", "[]", '{"num_hidden_layers": 1e9}', "[" * 100_000])
def test_a_bad_config_is_one_line(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    done = plan(tmp_path)
    assert done.exit_code == 2 and done.stderr.startswith("kvferry: ") and done.stderr.count("\n") == 1


def test_rates() -> None:
    bits = ("100Gbit/s", "100Gbps", "100 gbps", "100G", "100 Gb", "100GbE", "100Gb/s", "0.1T", "100000 Mbits/s")
    for text in bits:
        assert bytes_per_second(text) == 12.5e9, text
    for text, rate in (("12.5GB/s", 12.5e9), ("12.5 GBps", 12.5e9), ("1 MB/s", 1e6), ("800 bit/s", 100.0)):
        assert bytes_per_second(text) == rate
    for text in ("", "0GB/s", "-1GB/s", "12.5", "12.5b", "50GB", "12.5GiB/s", "nanGB/s", "1" * 400 + "GB/s", "10P"):
        with pytest.raises(ConfigError, match="is no rate"):
            bytes_per_second(text)


def test_it_needs_no_pytorch(model: Path) -> None:
    (model / "torch.py").write_text("raise ImportError('planted')")
    command = [sys.executable, "-m", "kvferry.cli.main", "plan", "--model", str(model)]
    command += ["--prefill-tokens-per-second", "20000"]
    environment = {**os.environ, "PYTHONPATH": f"{model}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)
    assert done.returncode == 0 and "share of TTFT" in done.stdout, done.stderr
