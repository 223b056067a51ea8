"""The command ``kvferry doctor``: what it prints, its exit status, and what it says of a user's mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from typer.testing import CliRunner

from kvferry.cli.doctor import command, peer, planes
from kvferry.cli.doctor.findings import DoctorSection, Finding, Level, fault, ok, warning
from kvferry.cli.main import GONE, app
from tests.doctor.planted import is_bad
from tests.support.pair import RemoteRank

QUICK = ["doctor", "--no-self-test"]
FLAG = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@pytest.fixture
def invoke(monkeypatch):
    for name in ("KVFERRY_PLANE", "KVFERRY_KEY_FILE", "KVFERRY_SIDE_CHANNEL_PORT"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str):
        result = CliRunner().invoke(app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return call


def findings_of(result) -> list[dict[str, str]]:
    content = json.loads(result.stdout)
    assert "this section" not in result.stdout and content["fit"] is (result.exit_code == 0)
    return [finding for section in content["sections"] for finding in section["findings"]]


def test_version_and_help_of_80_columns(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert invoke("--version").output == f"kvferry {metadata.version('kvferry')}\n"
    for name, options in (
        ("plan", ("--prefill-tokens-per-second", "--link")),
        ("router", ("--abandoned-prefill-timeout", "--otlp-traces-endpoint")),
    ):
        shown = invoke(name, "--help").output
        assert [option for option in options if option not in shown] == []


def test_a_fit_machine(invoke):
    result = invoke(*QUICK)
    assert result.exit_code == 0, result.output
    assert "This machine is fit for KVFerry" in result.output.splitlines()[-1]
    titles = [line for line in result.output.splitlines() if line and not line.startswith(" ")]
    assert titles[:-1] == ["Versions", "Settings, key and port", "Limits", "GPUs", "Data planes"]


@pytest.mark.parametrize(
    "config",
    [
        {**FLAG, "kv_connector_extra_config": {"plane": "no"}},
        {**FLAG, "kv_connector_extra_config": {"key_file": "a\0b"}}, {"key_file": "a\0b"},
        {"key_file": "x" * 5000}, {"side_channel_host": f"{'a' * 64}.b"}, {"side_channel_host": 7},
        {"allowed_peers": ["10.0.0.0/99"]}, {"plane": ["tcp"]}, {"peer_keys": "abc"}, {"slot_bytes": 1e400}, {"": 1},
    ],
    ids=lambda config: str(config)[:40].encode("unicode_escape").decode(),
)  # fmt: skip
def test_odd_settings_are_a_fault_in_the_json(invoke, config):
    found = findings_of(invoke(*QUICK, "--json", "--config", json.dumps(config)))
    faults = [finding for finding in found if finding["level"] == "fault"]
    assert len(faults) == 1 and len(faults[0]["value"]) < 400, faults
    if "kv_connector" in config:
        assert faults[0]["what"] in ("kv_connector_extra_config['plane']", "key")


@pytest.mark.parametrize(
    "error", ["ModuleNotFoundError: No module named 'torch'", "OSError: libcudart.so.13: no such file"]
)
def test_without_pytorch_it_says_so(tmp_path, error):
    kind, _, text = error.partition(": ")
    (tmp_path / "torch.py").write_text(f"raise {kind}({text!r})")
    command = [sys.executable, "-m", "kvferry.cli.main", "doctor", "--json", "--config", '{"plane": "tpc"}']
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    found = [finding for section in json.loads(done.stdout)["sections"] for finding in section["findings"]]
    faults = {finding["what"]: finding for finding in found if finding["level"] == "fault"}
    assert error in faults["torch"]["value"] and "kv_connector_extra_config['plane']" in faults
    (left_out,) = [finding for finding in found if finding["what"] == "not looked at"]
    assert error in left_out["value"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "nowhere"], "expected HOST:PORT"), (["--peer", "a:99999"], "1 to 65535"),
        (["--config", "x.json"], "give the JSON itself, not a file"), (["--config", "[1]"], "expected a JSON object"),
        (["--config", "[" * 100000], "--config: no JSON"), (["--perr", "a:1"], "No such option: --perr"),
        (["--config", ""], "--config is empty"), (["--config", " "], "--config is empty"),
        (["--share", "file"], "doctor --share is gone: redirect"), (["--model", "m"], "give --peer HOST:PORT, too"),
        (["--peer", "a:1", "--model", "nowhere"], "nowhere is no file and no folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_status_2(invoke, arguments, words):
    result = invoke("doctor", *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert not result.stdout and result.stderr.startswith("kvferry: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("gone", GONE)
def test_what_is_gone_is_refused_in_one_line_that_says_what_to_use(invoke, gone):
    result = invoke(*gone.split(), "1")
    assert result.exit_code == 2 and result.stderr == f"kvferry: {gone} is {GONE[gone]}\n"


@pytest.mark.parametrize("arguments", [["plan"], ["router", "--port", "x"], ["topp"], ["--bad"], ["bench", "a"]])
def test_a_mistake_that_typer_finds_is_one_line(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("kvferry: ") and result.stderr.count("\n") == 1


BAD, SLOW = fault("key_file", "has mode 0644", "make a new key", expected="0600"), warning("clock", "hpet", "another")


@pytest.mark.parametrize(
    ("findings", "status", "line"),
    [
        ([ok("a", "1"), SLOW], 0, "kvferry: this machine is fit"),
        (
            [SLOW, BAD, BAD],
            1,
            "0644, expected 0600; make a new key / key_file: has mode 0644, expected 0600; make a new key",
        ),
    ],
)
def test_a_gate_says_one_line(invoke, monkeypatch, findings, status, line):
    tests_itself = []

    def sections(*_: object, self_test: bool) -> Iterator[DoctorSection]:
        tests_itself.append(self_test)
        yield DoctorSection("Planted", findings)

    monkeypatch.setattr(command, "sections", sections)
    result = invoke("doctor", "--gate")
    assert result.exit_code == status and not result.stdout
    (said,) = result.stderr.splitlines()
    assert said.endswith(line)
    result = invoke("doctor")
    assert result.exit_code == status and ("is not fit" in result.stdout) is bool(status)
    assert tests_itself == [False, True], "an init container does not hand 64 MiB over"


def test_a_gate_refuses_a_flag_without_a_failure_policy(invoke):
    config = json.dumps({name: value for name, value in FLAG.items() if name != "kv_load_failure_policy"})
    result = invoke("doctor", "--gate", "--config", config)
    assert result.exit_code == 1 and "is not fit: kv_load_failure_policy: is" in result.stderr
    assert invoke("doctor", "--gate", "--config", json.dumps(FLAG)).exit_code == 0


def test_the_engine_that_peer_names(invoke, monkeypatch):
    monkeypatch.setattr(peer.findings, "__defaults__", (None, 300.0))
    p = RemoteRank(engine_id="engine-p", model={"architectures": "Labelled"})
    try:
        result = invoke(*QUICK, "--peer", f"127.0.0.1:{p.address.port}")
        assert result.exit_code == 0, result.output
        assert "architectures=Labelled" in result.output
    finally:
        p.close()
    result = invoke(*QUICK, "--peer", f"127.0.0.1:{p.address.port}")
    assert result.exit_code == 1 and "refuses the connection" in result.output


def test_the_self_test_belongs_to_it(invoke, monkeypatch):
    def no_test(host: str, usable: list[object]) -> Iterator[Finding]:
        assert host == "127.0.0.1" and len(usable) >= 3
        yield ok("cma", "1 GB/s")

    monkeypatch.setattr(planes, "self_test", no_test)
    assert "Self-test: 64 MiB" in invoke("doctor").output


def test_an_error_of_a_section_is_a_finding():
    def look() -> Iterator[Finding]:
        yield ok("one", "1")
        raise RuntimeError("an odd machine\nwith two lines")

    first, failed = command.section("T", look()).findings
    assert first.level is Level.OK
    is_bad(failed, Level.WARNING, "RuntimeError: an odd machine", "kvferry doctor")
    with pytest.raises(AssertionError, match="says what to do"):
        Finding(Level.WARNING, "a", "1")
