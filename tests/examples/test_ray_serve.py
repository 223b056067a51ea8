"""``examples/ray_serve``: Ray Serve's own prefill and decode application over two Ray nodes (``make test-ray``)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.engines import ROOT, ServerGroup, free_port, python_path
from tests.support.served import complete, tokens_of
from tests.support.tiny_model import ModelSpec, build_model

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
]
DONE = re.compile(r"kvferry: hand-over of \S+ done: (\d+) tokens, ")
READS_FROM = re.compile(r"kvferry: \w+ pp0 tp0 at ([\d.]+):\d+: this rank reads from")


def run(model: Path) -> str:
    """What the example prints. It has a process group of its own."""
    script = ROOT / "examples" / "ray_serve" / "two_nodes.py"
    command = [sys.executable, str(script), str(model), "--port", str(free_port())]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=900)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, said
    return said


def test_two_nodes_hand_prompts_over(tmp_path):
    model = build_model(tmp_path / "model", ModelSpec(layers=4))
    said = run(model)
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"prompt"')]
    assert [len(answer["prompt"]) for answer in answers] == [33, 300, 1000], said
    (folder,) = re.findall(r"^logs: (\S+)$", said, re.MULTILINE)
    logs = "".join(path.read_text(errors="replace") for path in Path(folder).glob("worker-*.out"))
    loaded = [int(tokens) for tokens in DONE.findall(logs)]
    assert len(loaded) == 3 and " failed, " not in logs
    for answer, tokens in zip(answers, loaded, strict=True):
        assert tokens >= len(answer["prompt"]) - 1  # a load inside a step leaves the last prompt token to it
    assert set(READS_FROM.findall(logs)) == {"127.0.0.2"}, "D reads from the address of P's node"
    with ServerGroup(tmp_path / "logs") as group:
        plain = group.engine("plain", model, connector=None)
        group.wait_ready()
        for answer in answers:
            assert tokens_of(complete(plain, answer["prompt"])) == [answer["answer"]]


def test_the_application_is_built_from_arguments(tmp_path):
    from examples.ray_serve.app import build

    model = build_model(tmp_path / "model", ModelSpec(layers=1))
    assert type(build({"model": str(model), "prefill": "2"})).__name__ == "Application"
    with pytest.raises(KeyError):
        build({})
