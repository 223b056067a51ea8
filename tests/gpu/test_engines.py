"""Hand-overs between real vLLM engines on GPUs: bytes, counters, data plane, on fresh and scattered block tables.

    pytest -m multi_gpu tests/gpu/test_engines.py [-k "tp1-tp1 or same-gpu"]

Engines run with CUDA graphs, and with the policy ``recompute`` where a case names no other. Two GPUs are enough for all
but tp3-tp2: ranks of P and D share them. On one GPU the same-gpu cases run. All engines of the selected cases start at
once and serve every case that needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from tests.gpu.gpu_forms import Case, Form, cases
from tests.support.engines import ServerGroup
from tests.support.kv_bytes import in_sequence, prompt_digest, scatter
from tests.support.served import (
    LONG_SECONDS,
    at_once,
    complete,
    corrupted,
    count,
    counted,
    differ,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    tokens_of,
)
from tests.support.server import Server
from tests.support.tiny_model import ModelSpec, build_model

THERE = torch.cuda.device_count()
pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(600), pytest.mark.skipif(THERE < 1, reason="needs a GPU")]
MODELS = {
    8: ModelSpec(layers=4, dtype="bfloat16"),
    6: ModelSpec(layers=4, hidden=192, heads=12, kv_heads=6, intermediate=384, vocabulary=1152, dtype="bfloat16"),
}
LAYERS = 4


def params(*names: str) -> list[Any]:
    """The cases, or those of these names; the ones that need more GPUs than there are, skipped."""
    found = [case for case in cases() if not names or case.name in names]
    reason = "{} needs {} GPUs, P's ranks are one to a GPU; there are {}"
    return [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.skipif(case.needs > THERE, reason=reason.format(case.name, case.needs, THERE)),
        )
        for case in found
    ]


@dataclass
class SharedEngines:
    """The engines, by form; ``scattered`` are those whose free blocks are in scattered order."""

    engines: dict[Form, Server]
    scattered: set[Form] = field(default_factory=set)

    def pair(self, case: Case) -> tuple[Server, Server]:
        return self.engines[case.p], self.engines[case.d]

    def scatter(self, *forms: Form) -> None:
        fresh = [form for form in forms if form not in self.scattered]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda form: scatter(self.engines[form], form.block, form.blocks // 5, 1000), fresh))
        self.scattered.update(fresh)


def start(group: ServerGroup, form: Form, models: Path) -> Server:
    spec = MODELS[form.heads]
    arguments = [
        "--worker-extension-cls", "tests.support.kv_bytes.KVHeads",
        "--attention-backend", form.attention, "--num-gpu-blocks-override", str(form.blocks),
        "--tensor-parallel-size", str(form.tensor), "--pipeline-parallel-size", str(form.pipeline),
        "--max-num-seqs", str(form.blocks // 5), "--disable-custom-all-reduce",
    ]  # fmt: skip
    return group.engine(
        form.name, build_model(models / f"{form.heads}-heads", spec), dtype=spec.dtype, block_size=form.block,
        extra={"plane": form.plane, "lease_seconds": LONG_SECONDS}, gpus=form.gpus(THERE), kv_bytes=False,
        policy=form.policy, arguments=arguments,
        environment={"VLLM_KV_CACHE_LAYOUT": form.layout, "VLLM_LOGGING_LEVEL": "DEBUG"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Engines of all cases that this run selected, started at once."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = [call.params["case"] for call in calls if isinstance(call.params.get("case"), Case)]
    forms = {form: None for case in chosen if case.needs <= THERE for form in (case.p, case.d)}
    folder = tmp_path_factory.mktemp("gpu")
    with ServerGroup(folder / "logs") as group:
        engines = {form: start(group, form, folder) for form in forms}
        group.wait_ready()
        for engine in engines.values():
            engine.rpc("kv_watch")
        yield SharedEngines(engines)


def prompt_for(case: Case, tokens: int, what: str) -> list[int]:
    """Of no other test and case, for engines serve several of them and keep what they have seen."""
    return prompt(tokens, crc32(f"{case.name} {what} {tokens}".encode()))


def hand_over(p: Server, d: Server, ids: list[int], plane: str) -> tuple[list[int], list[int], list[list[int]]]:
    """Hand one prompt over: all bytes of all ranks equal, all tokens counted, over this plane, nothing left held.

    P's and D's block tables of it, and the tokens of D's answer.
    """
    records(p), records(d)
    before = count(d)
    answer = complete(d, ids, kv_transfer_params=prefill_leg(p, ids))
    assert set(counted(d, before, len(ids)).by_plane) == {plane}
    of_d, of_p = records(d), records(p)
    problem = differ(of_d, of_p, ids)
    assert problem is None, problem
    no_block_held(p, d)
    ours = [record for record in of_d if record["prompt"] == prompt_digest(ids)]
    return of_p[-1]["blocks"][0], ours[0]["blocks"][0], tokens_of(answer)


@pytest.mark.parametrize("case", params())
def test_bytes_counters_and_plane(shared: SharedEngines, case: Case) -> None:
    p, d = shared.pair(case)
    for tokens in (2, 64, 65, 1500):
        hand_over(p, d, prompt_for(case, tokens, "fresh"), case.d.plane)
    chosen = re.findall(r"kvferry: data plane to .+? is (\w+)", d.log.read_text(errors="replace"))
    assert chosen and set(chosen) == {case.d.plane}, "each pair of ranks has its line"
    in_step = d.log.read_text(errors="replace").count("inside the step")
    one_stage_reads = case.d.pipeline == 1 and case.d.plane == "cuda_ipc"
    assert bool(in_step) == one_stage_reads


@pytest.mark.parametrize("case", params())
def test_scattered_block_tables(shared: SharedEngines, case: Case) -> None:
    p, d = shared.pair(case)
    shared.scatter(case.p, case.d)
    for tokens in (700, 3000):
        *tables, _ = hand_over(p, d, prompt_for(case, tokens, "scattered"), case.d.plane)
        for form, table in zip((case.p, case.d), tables, strict=True):
            assert len(table) >= tokens // form.block
            assert in_sequence(table) < 0.7, f"{form.name}: {table}"


@pytest.mark.parametrize(
    "case", params("tp1-tp1-flash-cuda_ipc", "tp1-tp1-flash-ucx", "tp2-tp2-cuda_ipc", "same-gpu-ucx")
)
def test_sixteen_at_once(shared: SharedEngines, case: Case) -> None:
    p, d = shared.pair(case)
    prompts = [prompt_for(case, 20 + 37 * n, "at once") for n in range(16)]
    ranks = case.d.tensor * case.d.pipeline
    _, grown = at_once(p, d, prompts, lambda ids: complete(d, ids, kv_transfer_params=prefill_leg(p, ids)), ranks)
    assert set(grown.by_plane) == {case.d.plane}
    no_block_held(p, d)


@pytest.mark.parametrize("case", params("tp1-tp1-flash-cuda_ipc", "tp1-tp1-flash-ucx"))
def test_planted_corruption_is_noticed(shared: SharedEngines, case: Case) -> None:
    """One bit, flipped on D after the load and before its first decode step."""
    p, d = shared.pair(case)
    said = corrupted(p, d, prompt_for(case, 300, "corrupt"))
    assert f"KV bytes differ in 1 of {LAYERS * case.d.heads} layers" in said
