"""Hand-overs under vLLM's scheduler: lengths, prefixes, chunks, blocks that run out, windows, adapters."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from kvferry.connector.decode_side import renew
from kvferry.connector.step_loads.step_loads import StepLoads
from kvferry.connector.vllm import compat
from kvferry.connector.vllm.lora_content import (
    BLOCK_BYTES,
    BLOCKS,
    MAX_ADAPTERS,
    REPLACED,
    known_adapters,
    lora_content,
)
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, PeerEngine
from kvferry.transport.errors import ConfigError
from tests.support.cases import each_once
from tests.support.engines import free_port
from tests.support.inside import leases_of, scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import (
    PREFILL,
    ROOM,
    Engine,
    EngineGroup,
    Lines,
    Pair,
    eventually,
    hand_over,
    loaded,
    run,
    settle,
)

pytestmark = pytest.mark.vllm
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])
"""With async scheduling, vLLM's default on GPUs, or without."""
FEW_BLOCKS = 1 + 12
"""Of 16 tokens each, one of which vLLM keeps to itself."""


@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 400])
def test_a_prompt_of_any_length_is_handed_over(pair: Pair, tokens: int) -> None:
    p, d = pair
    request_id = hand_over(p, d, prompt(tokens), max_tokens=20)
    assert d.origins[request_id].ours == 0 and d.answers[request_id].external == tokens
    settle(p, d)
    assert not d.failed


def test_a_client_is_told_of_no_more_cached_tokens_than_by_d_alone(pair: Pair) -> None:
    p, d = pair
    ids = prompt(10 * BLOCK)
    first, second = hand_over(p, d, ids), hand_over(p, d, ids)
    assert (d.answers[first].cached, d.answers[second].cached) == (0, 9 * BLOCK)
    settle(p, d)


@pytest.mark.parametrize("ranks", ["alone", "data parallel", "pipeline"])
def test_a_step_is_idle_that_computes_nothing_and_holds_up_nobody(pair: Pair, ranks: str) -> None:
    p, d = pair
    connector = d.scheduler.connector
    real, seen = connector.build_connector_meta, set()

    def build(output: Any) -> Any:
        meta = real(output)
        seen.add((output.total_num_scheduled_tokens == 0, meta.plan.idle))
        return meta

    connector.build_connector_meta = build
    if ranks != "alone":  # as the constructor decides
        connector.alone = connector.stepping_alone(
            ParallelConfig(data_parallel_size=2 if "data" in ranks else 1, pipeline_parallel_size=1 + ("pipe" in ranks))
        )
    hand_over(p, d, prompt(100))
    assert seen == {(False, False), (True, ranks == "alone")}


@pytest.mark.parametrize(("tokens", "sampling"), [(1, {}), (100, {"prompt_logprobs": 1})])
def test_what_needs_no_load_releases_p(pair: Pair, tokens: int, sampling: dict[str, int]) -> None:
    """D computes the last prompt token in any case, and log probabilities need a forward over the whole prompt."""
    p, d = pair
    request_id = hand_over(p, d, prompt(tokens), 0, **sampling)
    assert d.computed[request_id] == tokens and not d.loads
    settle(p, d)
    assert p.workers[0].sent


# --- prefix hits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [4 * BLOCK + 1, 1])
def test_nothing_left_to_load_releases_p_at_once(pair: Pair, lines: Lines, tokens: int) -> None:
    """D has all but the last token, which it computes in any case: P must not hold its blocks until the lease ends."""
    p, d = pair
    ids = prompt(tokens)
    d.finish(d.add(ids))
    params = p.prefill(ids)
    p.step()
    eventually(lambda: len(leases_of(p)) == 1)
    request_id = d.add(ids, params, max_tokens=3)
    assert loaded(p, d, request_id, 0).external == 0
    assert d.computed[request_id] == 3 and not d.loads
    settle(p, d)
    assert not lines("expired")


@pytest.mark.parametrize("shared", [BLOCK - 1, 5 * BLOCK, 99])
def test_a_prefix_hit_loads_only_the_rest(pair: Pair, shared: int) -> None:
    """Only whole blocks are hits; the rest of the last one is loaded over what another prompt left in a copy of it."""
    p, d = pair
    ids = prompt(100)
    d.finish(d.add([*ids[:shared], 7, 7, 7], max_tokens=4))
    hit = shared // BLOCK * BLOCK
    request_id = hand_over(p, d, ids, 99 - hit, max_tokens=5)
    assert d.origins[request_id].ours == hit and d.answers[request_id].external == 100 - hit
    settle(p, d)


# --- several requests, ranks and engines --------------------------------------------------------------------------
def vllms_ids(given: str, samples: int = 1) -> list[str]:
    """Of the engine's requests that vLLM makes of one. ``given``: by its server."""
    request: Any = SimpleNamespace(request_id=given, external_req_id=None, params=SamplingParams(n=samples))
    InputProcessor.assign_request_id(request)
    parent = ParentRequest(request)
    return [parent.get_child_info(n)[0] for n in range(samples)] if samples > 1 else [request.request_id]


@pytest.mark.parametrize("server", ["cmpl-{}-0", "chatcmpl-{}"])
def test_a_client_that_chooses_an_id_like_that_of_a_sample_delays_no_release(
    pair: Pair, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renew, "SIBLING_SECONDS", 600.0)
    p, d = pair
    (name,) = vllms_ids(server.format("7_abc"))
    hand_over(p, d, prompt(100), request_id=name, max_tokens=5)
    settle(p, d)


@pytest.mark.parametrize("gap", [0.0, 0.2])
def test_three_samples_of_one_prompt_read_under_one_lease(
    pair: Pair, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``n=3`` vLLM makes three requests with the same parameters; P may free after the last one only."""
    monkeypatch.setattr(renew, "SIBLING_SECONDS", 600.0)
    p, d = pair
    ids = prompt(100)
    params = p.prefill(ids)
    names = vllms_ids("cmpl-parent-0", samples=3)
    for name in names:
        d.add(ids, params, request_id=name, max_tokens=5)
        end = time.monotonic() + gap
        run([p, d], lambda end=end: time.monotonic() >= end)
    d.finish(*names, beside=[p])
    assert not d.failed and d.computed.total() == 3 * 5
    assert not p.idle, "a fourth one may still come"
    d.let_time_pass(601)
    settle(p, d)


def test_a_producer_and_a_consumer(group: EngineGroup) -> None:
    p, d = group.engine(0, role="kv_producer"), group.engine(1, role="kv_consumer")
    hand_over(p, d, prompt(50))
    settle(p, d)


def replicas(group: EngineGroup, origin: int, tp: int) -> list[Engine]:
    """Two data-parallel ranks of one engine, with the same settings, of which the port is one."""
    for _ in range(20):
        extra = {"side_channel_port": (first := free_port())}
        try:
            engines = [group.engine(origin, dp_rank=rank, tp=tp, extra=extra) for rank in range(2)]
        except ConfigError:
            continue  # somebody else has one of those in a row
        taken = [rank.port for engine in engines for rank in scheduler_half(engine).ranks]
        assert taken == list(range(first, first + 2 * tp))
        return engines
    raise AssertionError("no ports to be had")


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 1), (2, 1)])
def test_every_data_parallel_rank_is_an_engine_of_its_own(group: EngineGroup, p_ranks: int, d_ranks: int) -> None:
    """Each hands over its own blocks: the same block ids mean another prompt on the other rank."""
    on_p, on_d = replicas(group, 0, p_ranks), replicas(group, 1, d_ranks)
    assert [p.engine_id.rpartition("_")[2] for p in on_p] == ["dp0", "dp1"]
    for (rank, p), d in itertools.product(enumerate(on_p), on_d):
        hand_over(p, d, prompt(100, rank), max_tokens=4)
    settle(*on_p, *on_d)
    assert all(len(p.leases) == 2 for p in on_p)


# --- chunks and preemption ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_prompt_prefilled_in_chunks(group: EngineGroup, ahead: int) -> None:
    """Nothing is handed over before the last one; D is busy meanwhile."""
    p, d = group.pair(max_batched=64, ahead=ahead)
    ids, other = prompt(300), d.add(prompt(200, seed=5), max_tokens=40)
    on_p = p.add(ids, PREFILL)
    for chunk in range(1, 5):
        p.step(), d.step()
        assert p.computed[on_p] == 64 * chunk and not p.leases
    loaded(p, d, d.add(ids, p.finish(on_p).params))
    d.finish(other)
    settle(p, d)


class Preempted(Counter[str]):
    """How often vLLM preempted each request of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        real = engine.scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            self[request.request_id] += 1
            real(request, *args, **kwargs)

        engine.scheduler._preempt_request = preempt


@pytest.mark.parametrize("fill", [False, True], ids=["blocks-kept", "blocks-taken"])
@each_once("ahead chunks", (1, 0), (2, 4, 5))
def test_preempted_on_p(group: EngineGroup, ahead: int, chunks: int, fill: bool) -> None:
    """In the middle of its prompt, at its last chunk, and after it, when (running ahead) its answer is under way.

    The blocks of then are not those of the lease.
    """
    p, d = group.pair(max_batched=64, ahead=ahead, num_blocks=31)
    ids = prompt(300)
    on_p = p.add(ids, PREFILL, max_tokens=3)
    for _ in range(chunks):
        p.step()
    p.preempt(on_p)
    if fill:  # another has all blocks meanwhile
        waiting = p.scheduler.requests[on_p]
        p.scheduler.waiting.remove_requests([waiting])
        p.finish(p.add(prompt(450, 1), max_tokens=2))
        assert p.scheduler.reset_prefix_cache()
        p.scheduler.waiting.add_request(waiting)
    params = p.finish(on_p).params
    assert not fill or p.computed[on_p] > 302
    loaded(p, d, d.add(ids, params))
    settle(p, d)


@pytest.mark.parametrize(("ahead", "overwritten"), [(0, False), (1, False), (0, True)])
def test_preempted_on_d_after_its_load(group: EngineGroup, ahead: int, overwritten: bool) -> None:
    """Asked again, the connector offers nothing: the lease is over, and the same answer would loop for ever."""
    p, d = group.pair(ahead=ahead)
    request_id = d.add(prompt(100), p.prefill(prompt(100)), max_tokens=20)
    run([p, d], lambda: len(d.answers[request_id].tokens) >= 3)
    d.preempt(request_id)
    assert not overwritten or d.scheduler.reset_prefix_cache()
    d.finish(request_id, beside=[p])
    assert d.all_loads[request_id] == 1
    assert not overwritten or d.computed[request_id] >= 100 + 20, "the prompt is computed anew"
    settle(p, d)


def hand_all_over(p: Engine, d: Engine, prompts: list[list[int]], on_p: int, on_d: int) -> list[str]:
    """All at once on P, each passed on to D when P is done with it; their ids on D."""
    names = [p.add(ids, PREFILL, max_tokens=on_p) for ids in prompts]
    passed: dict[str, str] = {}

    def over() -> bool:
        for name, ids in zip(names, prompts, strict=True):
            if name not in passed and p.answers[name].finish is not None:
                passed[name] = d.add(ids, p.answers[name].params, max_tokens=on_d)
        return len(passed) == len(names) and all(d.answers[name].finish is not None for name in passed.values())

    run([p, d], over)
    for name, ids in zip(names, prompts, strict=True):
        assert d.origins[passed[name]].theirs == len(ids) - 1 and d.all_loads[passed[name]] == 1
    assert not d.failed
    return list(passed.values())


def test_out_of_blocks_on_both_sides(pair: Pair) -> None:
    """More prompts than either pool holds: they queue on P for leases to end and on D for blocks."""
    hand_all_over(*pair, [prompt(150 + 7 * n, seed=n) for n in range(8)], on_p=1, on_d=30)
    settle(*pair)


@pytest.mark.parametrize(("where", "drafts", "ahead"), [("p", 3, 1), ("d", 0, 0), ("pd", 3, 0)])
def test_out_of_blocks_while_it_decodes(group: EngineGroup, where: str, drafts: int, ahead: int) -> None:
    """vLLM preempts by itself. What P hands over are the blocks that the prompt has in the end; a loaded prompt that is
    preempted is prefilled by D: the lease is over, and nothing is loaded twice."""
    p, d = (
        group.engine(number, ahead=ahead, drafts=drafts, num_blocks=FEW_BLOCKS if side in where else 41)
        for number, side in enumerate("pd")
    )
    preempted = {"p": Preempted(p), "d": Preempted(d)}
    # On D any two that overlap run out of blocks, whenever the second one comes.
    on_p, on_d = 1 if where == "d" else 40, 5 if where == "p" else 100
    for name in hand_all_over(p, d, [prompt(60, n) for n in range(4)], on_p, on_d):
        assert d.answers[name].external == 60 - d.step_loads[name]
    assert all(preempted[side].total() for side in where)
    settle(p, d)


# --- speculative decoding -----------------------------------------------------------------------------------------
@AHEAD
def test_drafts_on_both_sides(group: EngineGroup, ahead: int, runner: str) -> None:
    """The KV of drafts that were wrong lies behind the prompt, in blocks of the lease and of the load."""
    p, d = group.pair(drafts=3, ahead=ahead, runner=runner)
    for tokens, decoded in ((2, 1), (BLOCK - 1, 6), (BLOCK, 1), (4 * BLOCK + 1, 6)):
        ids = prompt(tokens, tokens + decoded)
        request_id = d.add(ids, p.prefill(ids, max_tokens=decoded), max_tokens=30)
        assert loaded(p, d, request_id).external == tokens - d.step_loads[request_id]
    assert p.drafts_kept and d.drafts_kept
    settle(p, d)


@AHEAD
@pytest.mark.parametrize("drafts", [(3, 0), (0, 3)])
def test_drafts_on_one_side_alone(group: EngineGroup, ahead: int, drafts: tuple[int, int]) -> None:
    p, d = (group.engine(n, drafts=count, ahead=ahead) for n, count in enumerate(drafts))
    hand_over(p, d, prompt(100), max_tokens=30)
    settle(p, d)


# --- leases and reports -------------------------------------------------------------------------------------------
def test_what_vllm_does_not_know_never_reaches_it(pair: Pair) -> None:
    """Its scheduler asserts on unknown ids and on ids told twice, and the engine dies."""
    p, d = pair
    request_id = hand_over(p, d, prompt(40))
    settle(p, d)
    engine = PeerEngine("P", 1, 1, 30.0, ())
    for name, ok in (("unknown", True), (request_id, True), (request_id, False)):
        (load,) = StepLoads().post([Load(name, b"t" * 16, engine, (), ())])
        d.thread.results.finished(load, LoadEnd() if ok else LOST)
    p.thread.results.leases.extend(["unknown", *p.leases])
    settle(p, d)


WINDOW = 64


def pair(
    group: EngineGroup, p_block: int = 16, d_block: int = 16, windows: tuple[int | None, int | None] = (WINDOW, WINDOW)
) -> Pair:
    p = group.engine(0, extra=ROOM, window=windows[0], block=p_block, num_blocks=90)
    return p, group.engine(1, extra=ROOM, window=windows[1], block=d_block, num_blocks=90)


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 79, 80, 81, 300])
def test_each_length_around_the_window_is_handed_over(group: EngineGroup, tokens: int) -> None:
    p, d = pair(group)
    hand_over(p, d, prompt(tokens), max_tokens=20)
    assert not d.failed
    settle(p, d)


def test_p_leaves_its_last_token_to_d_where_its_window_would_lose_a_block(group: EngineGroup) -> None:
    p, _ = pair(group)
    counts = {}
    for tokens in range(60, 120):
        request_id = p.add(prompt(tokens, seed=tokens), PREFILL)
        counts[tokens] = tokens - p.scheduler.requests[request_id].num_prompt_tokens
        p.abort(request_id)
    assert [tokens for tokens, count in counts.items() if count] == [79, 95, 111]
    request_id = p.add(prompt(79))
    assert p.scheduler.requests[request_id].num_prompt_tokens == 79, "what is not handed over is computed whole"
    request_id = p.add(prompt(79), PREFILL, prompt_logprobs=1)
    assert p.scheduler.requests[request_id].num_prompt_tokens == 79, "D computes all of this one"


def test_what_is_left_to_d_leaves_nothing_behind(group: EngineGroup) -> None:
    """Neither in the caller's list nor in the hashes, by which a block with P's own next token would be found."""
    p, _ = pair(group)
    ids = prompt(80)
    theirs = [*ids]
    request, whole = (p.scheduler.requests[p.add(given)] for given in (theirs, ids))
    assert len(request.block_hashes) == len(whole.block_hashes) == 5
    compat.truncate_prompt(request, 1)
    assert theirs == ids and list(request.prompt_token_ids) == ids[:-1] == list(request.all_token_ids)
    request.append_output_token_ids(ids[-1] + 1)
    assert request.block_hashes[:4] == whole.block_hashes[:4] and len(request.block_hashes) == 5
    assert request.block_hashes[4] != whole.block_hashes[4]


def test_a_prompt_with_embeddings_is_left_alone(group: EngineGroup) -> None:
    """Beside them vLLM has ids that stand for them, alike for all, and of the same length."""
    p, _ = pair(group)
    request = p.scheduler.requests[p.add(prompt(79))]
    request.prompt_embeds = torch.zeros(79, 8)
    request.kv_transfer_params = PREFILL
    p.connector.on_new_request(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == 79
    given, params = p.connector.request_finished_all_groups(request, ((1, 2, 3, 4, 5),) * 2)
    assert (given, params) == (False, None)


@pytest.mark.parametrize(("p_block", "d_block"), [(48, 16), (16, 32), (32, 48)])
def test_other_block_sizes(group: EngineGroup, p_block: int, d_block: int) -> None:
    """Handed over, or prefilled on D where P has given back a part of D's first block: right either way."""
    p, d = pair(group, p_block, d_block)
    came = []
    for tokens in (40, 64, 111, 129, 200, 215, 230, 250, 288):
        ids = prompt(tokens, seed=tokens)
        request_id = d.add(ids, p.prefill(ids), max_tokens=5)
        d.finish(request_id, beside=[p])
        came.append(d.origins[request_id].theirs == tokens - 1)
    assert not d.failed
    settle(p, d)
    assert came[0]
    if p_block % d_block == 0:
        assert all(came)
    else:
        assert any(came[3:]) and not all(came)


def test_a_block_that_p_cannot_fill_is_never_offered_to_another_request(group: EngineGroup, lines: Lines) -> None:
    """P kept a window that begins at token 137 from token 128 on; D's blocks of 48 begin at 96. Loaded in part, that
    block would count as whole, and a second request with the first 144 tokens would attend to what it lacks."""
    p, d = pair(group, 16, 48)
    ids = prompt(200)
    loaded(None, d, d.add(ids, p.prefill(ids), max_tokens=20), 0)
    assert len(lines("prefills locally", "kept the window of 64 tokens from token 128", "begin at 96")) == 1
    d.finish(d.add(ids[:150] + prompt(20, seed=9), max_tokens=20))
    settle(p, d)


def test_what_p_says_it_kept_is_not_what_p_goes_by(group: EngineGroup) -> None:
    """A D that believes it may load gets no block that P has given back: the load fails, and D prefills."""
    p, d = pair(group, 16, 48)
    ids = prompt(200)
    params = p.prefill(ids)
    params["kvferry"]["kept"] = []
    request_id = d.add(ids, params, max_tokens=20)
    d.finish(request_id, beside=[p])
    assert d.workers[0].failed == {request_id: 1}
    d.finish(d.add(ids[:150] + prompt(20, seed=9), max_tokens=20))
    settle(p, d)


def test_a_d_without_windowed_tables_takes_what_p_has_in_full(group: EngineGroup) -> None:
    p, d = pair(group, windows=(WINDOW, None))
    for tokens, theirs in ((60, 59), (200, 0)):
        hand_over(p, d, prompt(tokens, seed=tokens), theirs, max_tokens=5)
    assert not d.failed
    settle(p, d)


def test_a_p_without_windowed_tables_has_all_that_d_needs(group: EngineGroup) -> None:
    p, d = pair(group, 32, 48, windows=(None, WINDOW))
    for tokens in (60, 111, 200, 250):
        hand_over(p, d, prompt(tokens, seed=tokens), max_tokens=5)
    settle(p, d)


IDS = prompt(100)


def adapter(folder: Path, *, weights: bytes = b"header weights", rank: int = 8, base: str = "here") -> str:
    folder.mkdir(exist_ok=True)
    config = {"r": rank, "lora_alpha": 16, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_what_an_adapter_is_does_not_depend_on_its_folder(tmp_path: Path) -> None:
    content = lora_content(adapter(tmp_path / "a"))
    assert content and content == lora_content(adapter(tmp_path / "b", base="there"))
    assert content != lora_content(adapter(tmp_path / "c", weights=b"header Weights"))
    assert content != lora_content(adapter(tmp_path / "d", rank=16))


def test_any_end_of_large_weights_counts(tmp_path: Path) -> None:
    plain = bytearray(3 * BLOCKS * BLOCK_BYTES)
    changed = [bytearray(plain) for _ in range(3)]
    changed[1][-1] = changed[2][0] = 1
    changed.append(plain + b"\0")
    folders = [adapter(tmp_path / str(n), weights=bytes(weights)) for n, weights in enumerate(changed)]
    assert len(set(map(lora_content, folders))) == len(folders)


def test_an_adapter_that_is_replaced_in_its_folder_is_another(tmp_path: Path) -> None:
    """As ``load_inplace`` has it. Otherwise vLLM keeps what it has, under one number."""
    folder = adapter(tmp_path / "a")
    first = lora_content(folder)
    assert lora_content(folder, 1) == first
    adapter(tmp_path / "a", weights=b"header Weights")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    second = lora_content(folder)
    assert lora_content(folder, 2) == second not in (first, "", REPLACED) and lora_content(folder, 1) == REPLACED
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert lora_content(folder, 2) == second, "vLLM cannot load another"


def test_how_many_adapters_are_known_is_bounded(tmp_path: Path) -> None:
    """Those that are used stay."""
    folder = adapter(tmp_path / "a")
    lora_content(folder, 1)
    second = lora_content(adapter(tmp_path / "a", weights=b"header, other weights"))
    for number in range(2, MAX_ADAPTERS + 10):
        assert lora_content(folder, number) == second and lora_content(folder, 1) == REPLACED
    assert len(known_adapters) == MAX_ADAPTERS


@pytest.mark.parametrize("broken", ["no folder", "no weights", "no config", "no object", "no mount"])
def test_an_adapter_that_cannot_be_read_goes_by_its_name(
    tmp_path: Path, lines: Lines, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "org/name-of-a-repository" if broken == "no folder" else adapter(tmp_path / "a")
    if broken == "no weights":
        (tmp_path / "a" / "adapter_model.safetensors").unlink()
    elif broken == "no config":
        (tmp_path / "a" / "adapter_config.json").unlink()
    elif broken == "no object":
        (tmp_path / "a" / "adapter_config.json").write_text("[]")
    elif broken == "no mount":
        monkeypatch.setattr(Path, "is_file", Mock(side_effect=OSError(errno.ENOTCONN, "not connected")))
    assert lora_content(folder) == lora_content(folder) == ""
    assert broken == "no folder" or len(lines(folder, "its name must mean the same on both engines")) == 1


@pytest.mark.parametrize("at_d", ["copy", "other", "unknown"])
def test_d_loads_what_p_computed_with_the_same_adapter(
    group: EngineGroup, tmp_path: Path, lines: Lines, at_d: str
) -> None:
    p, d = group.pair(extra={"plane": "cma"})
    params = p.prefill(IDS, lora=LoRARequest("helper", 1, adapter(tmp_path / "p")))
    folder = {"copy": adapter(tmp_path / "d"), "other": adapter(tmp_path / "o", rank=16), "unknown": "org/name"}[at_d]
    request_id = d.add(IDS, params, max_tokens=4, lora=LoRARequest("helper", 1, folder))
    loaded(p, d, request_id, 0 if at_d == "other" else None)
    assert bool(lines(request_id, "with another LoRA adapter of this name")) == (at_d == "other")
    settle(p, d)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_that_was_replaced_in_p_s_folder_is_not_the_one_that_p_has(
    group: EngineGroup, tmp_path: Path, in_place: bool
) -> None:
    """P has loaded it for its first request, whatever that was. D has the new one."""
    p, d = group.pair(extra={"plane": "cma"})
    of_p = LoRARequest("helper", 31, adapter(tmp_path / "p"), load_inplace=in_place)
    p.finish(p.add(prompt(20, 9), lora=of_p))
    adapter(tmp_path / "p", weights=b"header, other weights")
    of_d = LoRARequest("helper", 32, adapter(tmp_path / "d", weights=b"header, other weights"))
    request_id = d.add(IDS, p.prefill(IDS, lora=of_p), max_tokens=4, lora=of_d)
    loaded(p, d, request_id, None if in_place else 0)
    settle(p, d)
