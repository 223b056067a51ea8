"""A rolling upgrade of vLLM: prompts go from an engine of one release to one of another, in both directions.

The other engine is in a process of its own, which imports the other release. ``make test-vllm`` has both: the Python
files of one before the installed one. Every step checks all KV that it reads: ``stepped``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import vllm

from kvferry.connector.step_loads import step_hold
from tests.support.fork_server import ROOT
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import ROOM, Engine, EngineGroup, loaded, settle, tiny_model

pytestmark = pytest.mark.vllm
LENGTHS = (2, BLOCK + 1, 250)


def load(d: Engine, ids: Sequence[int], params: dict[str, Any]) -> int | None:
    """Tokens that vLLM counts as loaded. Fails where the first forward reads another prompt, or KV of D's own."""
    return loaded(None, d, d.add(ids, params, max_tokens=8)).external


def end(engine: Engine) -> dict[str, Any]:
    """What there was, when no request, load or lease is left."""
    settle(engine)
    failed, loads, leases = engine.failed | engine.fallen_loads, sum(engine.all_loads.values()), len(engine.leases)
    return {"loads": loads, "leases": leases, "prompts": dict(engine.prompts), "failed": len(failed)}


def serve(calls: Connection, folder: Path) -> None:
    """Does with an engine of the release that is imported here what the test says."""
    step_hold.PATIENCE_SECONDS = 60.0
    with mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()):
        engine = EngineGroup(tiny_model(folder / "tiny")).engine(1, extra=ROOM)
    calls.send(vllm.__version__)
    while True:
        function, *arguments = calls.recv()
        calls.send(function(engine, *arguments))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Calls a function with the engine of the other release."""
    brought = [str(folder) for folder in sorted(ROOT.glob(".vllm-[0-9]*"))]
    if not brought:
        pytest.skip("there is one release of vLLM here; make test-vllm brings the files of another")
    here = Path(vllm.__file__).parents[1]
    first = [] if here.name.startswith(".vllm-") else brought[-1:]
    path = os.pathsep.join([str(ROOT / ".typing"), *first])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(tmp_path)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    with process, ours:
        assert ours.recv() != vllm.__version__, "both engines would be of one release"

        def call(*what: Any) -> Any:
            ours.send(what)
            return ours.recv()

        yield call
        process.kill()


def test_engines_of_two_releases_hand_over(group: EngineGroup, other: Callable[..., Any]) -> None:
    engine = group.engine(0, extra=ROOM)

    def here(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(engine, *arguments)

    for seed, (p, d) in enumerate([(here, other), (other, here)]):
        for tokens in LENGTHS:
            ids = prompt(tokens, 10 * tokens + seed)
            assert d(load, ids, p(Engine.prefill, ids)) in (tokens - 1, tokens)
    for side in (here, other):
        assert side(end) == {"loads": 3, "leases": 3, "prompts": {"loaded": 3}, "failed": 0}


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as from_test:
        serve(from_test, Path(sys.argv[2]))
