"""Hand-overs on a GPU between engines that draft, keep states, have MLA, sleep, or have a store or namespaces beside.

    python3 -m pytest tests/gpu/test_models.py [-k "drafts or states"]

One GPU is enough; the engines of a case and of the next ones share it. They capture CUDA graphs of decode steps and
compile nothing; where one does not start, only its cases fail. Bytes of KV are compared strictly. A token's logits
depend in their last bits on how many tokens the step computes: what D answers after a load, where it computes one token
of the prompt, is compared with what it answers after its own prefill over several prompts (``alike``).

TEST_DEVICE=cpu runs the cases with engines on the CPU, to try the test itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.engine.test_drafts import ANSWER, DRAFTS, Answered, accepted, answered
from tests.support.apart import need_namespaces
from tests.support.drafting_model import build_hybrid_with_mtp, build_with_eagle, build_with_mtp
from tests.support.engines import ServerGroup, python_path, transfer_config
from tests.support.families import FAMILIES, Family
from tests.support.served import (
    PATIENT,
    ForkedServerGroup,
    at_once,
    complete,
    corrupted,
    count,
    counted,
    differ,
    eventually,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    tokens_of,
)
from tests.support.server import Server, metric_sum

ON_CPU = os.environ.get("TEST_DEVICE") == "cpu"
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1 and not ON_CPU, reason="needs a GPU"),
]
BLOCK, AT_ONCE, MOST_ATTEMPTS, MOST_ENGINES = 32, 32, 40, 6
LENGTHS = (1200, 2, BLOCK, BLOCK + 1, 300, 700, 900, 1500)
OTHER = "OTHER_VLLM"
PLANE = "cma" if ON_CPU else "cuda_ipc"
TELLING = re.compile(r"kvferry: | ERROR |\w+Error: ")
DENSE = {"first_k_dense_replace": 4, "qk_nope_head_dim": 128, "v_head_dim": 128}
MLA = replace(FAMILIES["deepseek"], config={**FAMILIES["deepseek"].config, **DENSE})


def family(form: Family) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    return lambda folder: (form.build(folder), {})


BUILD: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "eagle": build_with_eagle, "mimo": build_with_mtp, "hybrid": build_hybrid_with_mtp,
    "falcon": family(FAMILIES["falcon-h1"]), "mla": family(MLA),
}  # fmt: skip
"""Each returns the model's folder, and what of ``speculative_config`` names its drafts. No model has experts."""
STATES = {"falcon": 4, "hybrid": 3, "mla": 0}
"""Layers of a model that keep a state."""


@dataclass(frozen=True)
class Form:
    """One engine. ``drafts``: with what its model drafts. ``kind``: what else is particular about it."""

    model: str
    drafts: bool = True
    kind: str = ""
    arguments: tuple[str, ...] = ()


NO_FLASHINFER = ("--gdn-prefill-backend", "triton", *(["--no-enable-prefix-caching"] * ON_CPU))
"""Prefix caching of states, together with drafts, needs Triton."""
FORMS = {
    **dict.fromkeys(("eagle-p", "eagle-d"), Form("eagle")),
    **dict.fromkeys(("mimo-p", "mimo-d"), Form("mimo")),
    **dict.fromkeys(("hybrid-p", "hybrid-d"), Form("hybrid", kind="vision", arguments=NO_FLASHINFER)),
    **dict.fromkeys(("falcon-p", "falcon-d"), Form("falcon", arguments=FAMILIES["falcon-h1"].arguments)),
    **dict.fromkeys(("mla-p", "mla-d"), Form("mla")),
    "plain": Form("eagle", drafts=False),
    **{kind: Form("eagle", drafts=False, kind=kind) for kind in ("sleeper", "store", "apart", "other")},
}


def not_here(kind: str) -> str:
    """Why an engine of this kind cannot run; empty where it can."""
    if kind == "sleeper":
        if ON_CPU or importlib.util.find_spec("vllm.cumem_allocator") is None:
            return "vLLM has sleep mode on GPUs, with its module cumem_allocator"
        return "" if tuple(map(int, version("vllm").split(".")[:2])) >= (0, 33) else "vLLM 0.32 with KVFerry sleeps not"
    if kind == "other" and OTHER not in os.environ:
        return f"{OTHER} names no folder with another release of vLLM"
    if kind == "vision" and importlib.util.find_spec("torchvision") is None:
        return "transformers imports torchvision for Qwen3.5"
    if kind == "apart":
        if os.geteuid():
            return "a process namespace for the same user needs root"
        try:
            need_namespaces()
        except pytest.skip.Exception as reason:
            return str(reason)
    return ""


class Group(ForkedServerGroup):
    """``apart`` has a process namespace of its own, as a container has."""

    def spawn(self, name: str, command: Sequence[str], **options: Any) -> Server:
        before = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if name == "apart" else []
        start = super().spawn if ON_CPU else partial(ServerGroup.spawn, self)
        return start(name, [*before, *command], **options)


@dataclass
class Engines:
    """Those of the case that runs and of the next ones. ``cases``: of each that can run and is not over, in order."""

    group: Group
    built: dict[str, tuple[Path, dict[str, Any]]]
    cases: list[Sequence[str]]
    started: dict[str, Server] = field(default_factory=dict)

    @contextmanager
    def of(self, names: Sequence[str]) -> Iterator[list[Server]]:
        """Engines for one case: with its failure, what they logged."""
        if reason := "; ".join(filter(None, (not_here(FORMS[name].kind) for name in names))):
            pytest.skip(reason)
        self.cases = self.cases[self.cases.index(names) :]
        needed = dict.fromkeys(name for case in self.cases for name in case)
        for name in self.started.keys() - needed:
            self.group.stop(self.started.pop(name))
        for name in needed:
            if name not in self.started and (name in names or len(self.started) < MOST_ENGINES):
                self.started[name] = start(self.group, name, FORMS[name], *self.built[FORMS[name].model])
        found = [self.started[name] for name in names]
        try:
            self.group.wait_ready(servers=found)
            for server in found:
                server.rpc("kv_watch")
            yield found
            assert all(server.alive for server in found), "an engine has ended"
            no_block_held(*found)
        except Exception as error:
            error.add_note("\n".join(telling(server) for server in found))
            raise


def telling(server: Server) -> str:
    """The end of what it says about itself or an error."""
    lines = [line[:300] for line in server.log_text().splitlines() if TELLING.search(line)]
    return "\n".join([f"--- log of {server.name}:", *lines[-25:]])


def start(group: ServerGroup, name: str, form: Form, model: Path, drafts: Mapping[str, Any]) -> Server:
    arguments = ["--worker-extension-cls", "tests.support.kv_bytes.KVDrafts", "--max-num-seqs", str(AT_ONCE)]
    arguments += [*form.arguments, *([] if ON_CPU else ["-cc.mode=none", "-cc.cudagraph_mode=FULL_DECODE_ONLY"])]
    if drafts and form.drafts:
        arguments += ["--speculative-config", json.dumps({**drafts, "num_speculative_tokens": DRAFTS})]
    if form.kind == "sleeper":
        arguments += ["--enable-sleep-mode"]
    extra: dict[str, Any] = {**PATIENT, "step_hold_seconds": 1.0}
    options: dict[str, Any] = {"extra": extra}
    if form.kind == "store":
        of_store: dict[str, Any] = {"cpu_bytes_to_use": 1 << 28}
        if ON_CPU:  # vLLM's copier is for GPUs
            of_store |= {"spec_name": "HostStoreSpec", "spec_module_path": "tests.support.host_store"}
        children = [transfer_config("KVFerryConnector", extra), transfer_config("OffloadingConnector", of_store)]
        options = {"connector": "MultiConnector", "extra": {"connectors": children}}
    if form.kind == "other":
        options["environment"] = {"PYTHONPATH": python_path(Path(os.environ[OTHER]))}
    sizes = [(1 + DRAFTS) * 2**n for n in range(6)]  # up to all requests with all their drafts
    return group.engine(
        name, model, **options, dtype="bfloat16", max_model_len=2048, block_size=BLOCK, kv_bytes=False,
        arguments=arguments, gpus=() if ON_CPU else (0,), kv_cache_bytes=1 << 30, graph_sizes=(1, 2, *sizes),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Those of the cases that this run selected."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [item.callspec.params["names"] for item in items]
    cases = [names for names in selected if not any(not_here(FORMS[name].kind) for name in names)]
    folder = tmp_path_factory.mktemp("models")
    built = {model: BUILD[model](folder / model) for model in {FORMS[name].model for case in cases for name in case}}
    with Group(folder / "logs") as group:
        yield Engines(group, built, cases)


def cases(*names: Sequence[str]) -> pytest.MarkDecorator:
    """The engines of each case."""
    return pytest.mark.parametrize("names", names, ids=["-".join(each) for each in names])


def same_bytes(of_d: list[dict[str, Any]], of_p: list[dict[str, Any]], ids: Sequence[int]) -> None:
    """All that D has loaded of this prompt is what P has. P's layers that draft are left out where D has none."""
    layers = {name for record in of_d for name in record["layers"]}
    wanted = [
        {**record, "layers": {name: of for name, of in record["layers"].items() if name in layers}} for record in of_p
    ]
    problem = differ(of_d, wanted, ids)
    assert problem is None, problem


def handed_over(p: Server, d: Server, ids: Sequence[int], plane: str = PLANE) -> tuple[Answered, list[dict[str, Any]]]:
    """D's answer to a prompt of P whose bytes are right, which came over this plane (any, where empty); P's records."""
    records(p), records(d)
    before = count(d)
    answer = answered(d, ids, kv_transfer_params=prefill_leg(p, ids))
    planes = set(counted(d, before, len(ids)).by_plane)
    assert planes == {plane} or not plane, f"{len(ids)} tokens came over {planes}, expected {plane}"
    of_p = records(p)
    same_bytes(records(d), of_p, ids)
    no_block_held(p, d)
    return answer, of_p


def alike(alone: Sequence[Sequence[int]], loaded: Sequence[Sequence[int]], of_alone: float, of_loaded: float) -> None:
    """Drafts that were accepted differ by at most a tenth, and at least two answers of three do not differ at all.

    ``of_alone``, ``of_loaded``: how many were accepted. The last token of a prompt, and in a batch every token, is
    computed with other numbers of tokens beside it: now and then rounding decides between two tokens or drafts. Without
    the KV of its prompt, or with a wrong state, next to no draft is accepted.
    """
    equal = sum(one == other for one, other in zip(alone, loaded, strict=True))
    said = f"{equal} of {len(alone)} answers equal; accepted {of_loaded:g} drafts, {of_alone:g} after D's own prefill"
    print(said)
    assert abs(of_loaded - of_alone) <= 0.1 * of_alone and 3 * equal >= 2 * len(alone), said


@cases(("eagle-p", "eagle-d"), ("mimo-p", "mimo-d"), ("hybrid-p", "hybrid-d"))
def test_drafts(engines: Engines, names: Sequence[str]) -> None:
    """D drafts as a D does that has prefilled."""
    with engines.of(names) as (p, d):
        prompts = [prompt(tokens, tokens) for tokens in LENGTHS]
        alone = [answered(d, ids, cache_salt="alone") for ids in prompts]
        loaded = [handed_over(p, d, ids)[0] for ids in prompts]
        before, after = (sum(each.accepted for each in some) for some in (alone, loaded))
        assert before >= len(prompts) * ANSWER / 4, f"{before} drafts are seldom right, which shows nothing"
        alike([each.tokens for each in alone], [each.tokens for each in loaded], before, after)


@cases(("hybrid-p", "hybrid-d"))
def test_drafts_of_many_requests_with_states(engines: Engines, names: Sequence[str]) -> None:
    """vllm#47466: fewer drafts were accepted on D, where it had loaded the states of requests that it ran at once."""
    with engines.of(names) as (p, d):
        prompts = [prompt(20 + 23 * n, 4000 + n) for n in range(AT_ONCE)]
        begun = accepted(d)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            alone = list(pool.map(lambda ids: complete(d, ids, max_tokens=ANSWER, cache_salt="alone"), prompts))
        between, all_prefilled = accepted(d), Barrier(AT_ONCE)

        def loading(ids: list[int]) -> dict[str, Any]:
            params = prefill_leg(p, ids)
            all_prefilled.wait(300)
            return complete(d, ids, max_tokens=ANSWER, kv_transfer_params=params)

        loaded, grown = at_once(p, d, prompts, loading)
        assert set(grown.by_plane) == {PLANE}, grown
        first, second = ([tokens_of(answer)[0] for answer in answers] for answers in (alone, loaded))
        alike(first, second, between - begun, accepted(d) - between)


@cases(("hybrid-p", "hybrid-d"), ("falcon-p", "falcon-d"), ("mla-p", "mla-d"))
def test_states_and_mla_inside_a_step(engines: Engines, names: Sequence[str]) -> None:
    """After a load inside a step D's tokens are those after one beside the steps, with the same bytes: in both cases D
    computes one token of the prompt."""
    with engines.of(names) as (p, d):
        assert len(d.rpc("kv_watch")[0]["states"]) == STATES[FORMS[names[0]].model]
        for tokens in LENGTHS:
            handed_over(p, d, prompt(tokens, 100 + tokens))
        ids, found = prompt(700, 5), dict[bool, list[list[int]]]()
        for attempt in range(MOST_ATTEMPTS):
            records(p), records(d)
            salt: dict[str, Any] = {"cache_salt": f"attempt {attempt}"}
            params = prefill_leg(p, ids, **salt)
            params["report"] = False not in found  # a client that asks for the time of a load gets it beside the steps
            answer = complete(d, ids, max_tokens=ANSWER, kv_transfer_params=params, **salt)
            of_d = records(d)
            same_bytes(of_d, records(p), ids)
            (inside,) = [record["inside"] for record in of_d if record["when"] == "loaded"]
            found[inside] = tokens_of(answer)
            if len(found) == 2:
                break
        assert found.keys() == {True, False}, "no load has gone inside a step, or none beside"
        assert found[True] == found[False]
        assert "KV bytes differ in 1 of" in corrupted(p, d, prompt(300, 9))


@cases(("eagle-p", "sleeper", "plain"))
def test_sleep(engines: Engines, names: Sequence[str]) -> None:
    """An engine that has slept loads, and hands over; over another plane than ``cuda_ipc``, for its memory has no IPC
    handles. What it had granted before it slept, D computes itself."""
    with engines.of(names) as (p, sleeper, d):
        for seed in range(3):
            handed_over(p, sleeper, prompt(300, 10 + seed))
            handed_over(sleeper, d, prompt(300, 20 + seed), plane="")
            ids = prompt(300, 30 + seed)
            doomed = prefill_leg(sleeper, ids)
            sleeper.post("/sleep?level=1")
            sleeper.post("/wake_up")
            answer = complete(d, ids, kv_transfer_params=doomed)
            assert tokens_of(answer) == tokens_of(complete(d, ids, cache_salt="alone"))
        assert "cuda_ipc" not in re.findall(r"data plane to .+? is (\w+)", d.log_text())


@cases(("eagle-p", "store"))
def test_beside_offloading_connector(engines: Engines, names: Sequence[str]) -> None:
    """What D loads from P its store keeps, and the store's bytes are right."""
    with engines.of(names) as (p, d):

        def moved(what: str) -> float:
            complete(d, [7], max_tokens=1)  # with a step, what earlier ones counted reaches the front end
            return metric_sum(d.metrics(), f"vllm:kv_offload_{what}_bytes_total") or 0

        for blocks in (1, 10, 40):
            ids, before = prompt(blocks * BLOCK + 1, 50 + blocks), moved("store")
            _, of_p = handed_over(p, d, ids)
            eventually(lambda before=before: moved("store") > before, "the store keeps the prompt", 60)
            eventually(lambda: d.post("/reset_prefix_cache")["success"], "D's prefix cache is empty", 60)
            records(d)
            before = moved("load")
            complete(d, ids)
            same_bytes(records(d), of_p, ids)
            eventually(lambda before=before: moved("load") > before, "the store has loaded the prompt", 60)


@cases(("eagle-p", "apart"), ("apart", "plain"))
def test_process_namespaces(engines: Engines, names: Sequence[str]) -> None:
    """Of one host: ``cuda_ipc``, or, where CUDA cannot tell the processes apart, another plane, with a line that says
    so. ``cma`` cannot."""
    with engines.of(names) as (p, d):
        for tokens in LENGTHS:
            handed_over(p, d, prompt(tokens, 7000 + tokens), plane="")
        line = re.findall(r"data plane to .*", d.log_text())[-1]
        print(line)
        assert " is cuda_ipc" in line or "namespace" in line, line


@cases(("plain", "other"), ("other", "plain"))
def test_two_releases(engines: Engines, names: Sequence[str]) -> None:
    """P and D of two releases of vLLM: that of this process and the one in the folder that OTHER_VLLM names."""
    with engines.of(names) as (p, d):
        releases = [json.load(urllib.request.urlopen(f"{each.url}/version"))["version"] for each in (p, d)]
        assert len(set(releases)) == 2, releases
        for tokens in LENGTHS:
            handed_over(p, d, prompt(tokens, 9000 * (1 + names.index("plain")) + tokens))
