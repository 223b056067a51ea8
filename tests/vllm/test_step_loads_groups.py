"""Loads inside the step of models with several block tables, windows, local chunks and states, and the end of those
that fail: as ``test_step_loads.py``, which has one table of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.vllm import from_vllm
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.connector.wire.transfer_estimate import TransferEstimate
from tests.support.cases import each_once
from tests.support.inside import scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import KVFERRY, MAX_LENGTH, PATIENT, ROOM, Engine, EngineGroup, Lines, Pair, run, settle
from tests.vllm.stepped_family import FamilyEngine
from tests.vllm.test_step_loads import (
    AGES,
    IN_STEP,
    POLICIES,
    Failing,
    add,
    beside,
    falls,
    meet,
    met,
    shared_prefix,
    waits_on_a_failed_prefix,
)

pytestmark = pytest.mark.vllm
WINDOW = 64
FORMS = {
    "two of all tokens": ("full", "full"),
    "and a window": ("full", "window"),
    "and local chunks": ("full", "chunk"),
    "a window alone": ("window",),
}
FORM = pytest.mark.parametrize("form", FORMS)
MAMBA2, NUM_BLOCKS = "align, with states of the middle of a prompt", 200
MODES = ("align", MAMBA2, "none")


def options(form: str, **more: Any) -> dict[str, Any]:
    return {"groups": FORMS[form], "window": WINDOW, "num_blocks": 400, "runner": "v2 eager"} | more


def inside(d: Engine, request_id: str) -> None:
    d.finish(request_id)
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]
    assert d.answers[request_id].external == len(d.answers[request_id].prompt) - 1


@each_once("form ahead", FORMS, (0, 1))
def test_the_first_step_computes_with_the_load(group: EngineGroup, form: str, ahead: int) -> None:
    p, d = met(group, **options(form, ahead=ahead))
    for number, tokens in enumerate((2, WINDOW, WINDOW + BLOCK, WINDOW + BLOCK + 1, 300)):
        request_id = add(p, d, prompt(tokens, 10 + number), max_tokens=40)
        d.step()
        assert d.computed[request_id] == 1
        inside(d, request_id)
        settle(p, d)
    assert not d.failed


@each_once("form policy how", FORMS, ("fail", "recompute"), ("revoked", "not copied", "late"))
def test_alone(group: EngineGroup, form: str, policy: str, how: str, lines: Lines) -> None:
    """Another one decodes, and has freed blocks outside its window: these are nobody's."""
    p, d = met(group, **options(form, ahead=1, policy=policy))
    decoding = d.add(prompt(200, 3), max_tokens=60)
    for _ in range(3):
        d.step()
    request_id = add(p, d, prompt(300, 9), max_tokens=9)
    failing = Failing(d, how)
    d.finish(request_id)
    assert d.scheduler.requests[decoding].num_preemptions == 0
    failing.end()
    falls(d, request_id, policy)
    assert len(lines("failed inside its step", request_id)) == 1
    assert d.finish(decoding).finish == "length"
    settle(p, d)


@each_once("form policy same_step", FORMS, ("fail", "recompute"), (True, False))
def test_another_one_found_its_blocks(group: EngineGroup, form: str, policy: str, same_step: bool) -> None:
    both = shared_prefix(group, same_step=same_step, **options(form, policy=policy))
    both.d.step()
    assert 0 < both.d.computed[both.other] < len(both.longer), "it found them"
    both.after(lambda step: None)
    both.end_well(both.request_id, both.other)


@each_once("form policy who", FORMS, ("fail", "recompute"), ("it", "both"))
def test_clients_have_left_meanwhile(group: EngineGroup, form: str, policy: str, who: str) -> None:
    both = shared_prefix(group, **options(form, policy=policy))
    leaving = {"it": [both.request_id], "both": [both.request_id, both.other]}[who]
    both.after(lambda step: [both.d.abort(name) for name in leaving if both.d.status(name) is not None])
    both.end_well(*({both.request_id, both.other} - set(leaving)))


@FORM
def test_preempted_meanwhile(group: EngineGroup, form: str) -> None:
    both = shared_prefix(group, **options(form))
    d = both.d
    d.abort(both.other)

    def preempt(step: Any) -> None:
        d.before_update = None
        d.preempt(both.request_id)

    both.after(preempt)
    both.end_well(both.request_id)


@each_once("form policy", FORMS, ("fail", "recompute"))
def test_a_third_one_found_what_the_second_has_made_of_it(group: EngineGroup, form: str, policy: str) -> None:
    """Of a window the third has none of the blocks that were to be filled."""
    both = shared_prefix(group, **options(form, policy=policy, ahead=2, max_batched=512))
    d = both.d
    d.step()
    longest = [*both.longer, *prompt(60, 78)]
    third = d.add(longest, max_tokens=9)
    d.step()
    assert 0 < d.computed[third] < len(both.ids), "it found them"
    both.after(lambda step: None)
    both.end_well(both.request_id, both.other, third)
    d.finish(d.add(longest, max_tokens=3))
    settle(both.p, d)


@each_once("form policy", FORMS, ("fail", "recompute"))
def test_one_that_waits_for_its_own_load_found_its_blocks(group: EngineGroup, form: str, policy: str) -> None:
    p, d = met(group, **options(form, policy=policy, ahead=1))
    request_id, other, longer = waits_on_a_failed_prefix(p, d)
    on_it = form != "a window alone"  # else it needs none of these blocks
    assert d.answers[request_id].finish == ("error" if policy == "fail" else "length")
    assert d.answers[other].finish == ("error" if policy == "fail" and on_it else "length")
    settle(p, d)
    d.finish(d.add(longer, max_tokens=3))
    settle(p, d)


@POLICIES
def test_one_that_has_run_for_long_on_the_same_tokens_goes_on(group: EngineGroup, policy: str) -> None:
    """It has no block of their window any more, so the load fills all of it; and the other one finds the old blocks of
    all tokens, beside the window of the load that fails."""
    p, d = met(group, **options("and a window", policy=policy, ahead=1))
    ids = prompt(160, 9)
    old = d.add([*ids, *prompt(20, 5)], max_tokens=150)
    d.step()
    request, (_, window) = d.scheduler.requests[old], d.block_tables(old)
    while d.computed[old] < 2 * len(ids):
        d.step()
    d.scheduler.kv_cache_manager.evict_blocks(set(window))
    scheduler_half(d).step_load_rule.hold_seconds = 60.0
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d)
    d.step()
    other = d.add([*ids, *prompt(70, 8)], max_tokens=9)
    d.step()
    assert d.loads[request_id] == 0 and d.step_loads[request_id] == 1
    assert 0 < d.computed[other] < len(ids) + 70, "it found them"
    failing.end()
    d.finish(request_id, other)
    end = "error" if policy == "fail" else "length"
    assert (d.answers[request_id].finish, d.answers[other].finish) == (end, end)
    d.finish(old)
    assert (d.answers[old].finish, request.num_preemptions) == ("length", 0)
    settle(p, d)


# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "drafts", "now"), [(64, 0, False), (65, 0, True), (79, 0, True), (79, 1, False)])
def test_not_where_vllm_moves_the_state_before_the_step(tokens: int, drafts: int, now: bool) -> None:
    """To the block where the step works on it, before the connector hears of the step."""
    ids, ranks = list(range(tokens + 1)), (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),)
    remote = RemotePrompt(b"t" * 16, tokens, prompt_digest(ids[:tokens], ()), PeerEngine("p", 1, 1, 30.0, ranks))
    half = SchedulerHalf(
        Settings(), "d", [BlockTable("full", 16), BlockTable("state", 16)], tp_size=1, pp_size=1, produces=True,
        consumes=True, step_loads=True, steps=StepsInFlight(), drafts=drafts,
    )  # fmt: skip
    half.loads_finished((), {}, {("p", 0): TransferEstimate(0.001, 1000)})
    view = RequestView("r", to_transfer_params(remote), ids, tokens + 1, 0)
    assert half.num_new_matched_tokens(view, 0) == (tokens, not now)


def state_engine(
    group: EngineGroup, model: ModelConfig, origin: int, mode: str, policy: str = "recompute", unit: int | None = None
) -> FamilyEngine:
    """Two layers of attention and a recurrent one, with states as vLLM keeps them in this mode. ``unit``: tokens of
    which prefix hits are multiples, if not of blocks."""
    block, cached = 16, mode != "none"
    size = block if cached else MAX_LENGTH
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=cached, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=512, max_model_len=MAX_LENGTH, is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        parallel_config=ParallelConfig(distributed_executor_backend="mp"),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.connector.vllm.adapter",
            kv_role="kv_both", kv_load_failure_policy=policy, kv_connector_extra_config=PATIENT | ROOM | IN_STEP,
        ),
    )  # fmt: skip
    config.scheduler_config.async_scheduling = True
    cache = config.cache_config
    checkpoints = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if mode == MAMBA2 else {}
    cache.mamba_cache_mode = "align" if cached else "none"
    cache.mamba_block_size, cache.kv_cache_layout = size, "LBHNC"
    cache.prefix_cache_retention_interval = None  # states are found after every block, not only before a prompt's end
    cache.prefix_match_unit = unit
    attention = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=size, shapes=((attention.page_size_bytes // 4,),), dtypes=(torch.float32,),
        mamba_cache_mode=cache.mamba_cache_mode, **checkpoints,
    )  # fmt: skip
    specs: dict[str, Any] = {f"model.layers.{n}.self_attn.attn": attention for n in range(2)}
    engine = FamilyEngine(config, specs | {"model.layers.2.mixer": state}, origin, {}, ahead=1)
    group.engines.append(engine)
    return engine


@pytest.fixture
def states(group: EngineGroup, tiny: ModelConfig, mode: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(from_vllm, "packing_name", lambda config, spec, layers: "")
    p, d = (state_engine(group, tiny, origin, mode, policy) for origin in range(2))
    scheduler_half(d).step_load_rule.hold_seconds = AGES
    meet(p, d)
    return p, d


@each_once("mode policy", MODES, ["recompute"])
def test_a_state_and_what_the_step_makes_of_it(states: Pair, mode: str, policy: str) -> None:
    p, d = states
    assert scheduler_half(d).clears_blocks
    caches = d.config.cache_config.enable_prefix_caching
    for tokens in (2, 63, 64, 65, 66, 80, 300):
        request_id = add(p, d, prompt(tokens, tokens), max_tokens=40)
        moves = caches and tokens % BLOCK == 1
        if moves:
            d.finish(request_id)
            assert d.loads[request_id] == 1 and not d.step_loads[request_id]
        else:
            inside(d, request_id)
        settle(p, d)


@each_once("mode policy", MODES, ("fail", "recompute"))
def test_a_state_that_does_not_come(states: Pair, mode: str, policy: str) -> None:
    """Beside another request that begins alike, and comes in that step or in the next one. The step has written the
    state of 304 tokens, which end a block, to where that of 303 should have been, and vLLM has given it their hash.
    ``old``: of the load the other one finds only this, beside right KV of long ago."""
    p, d = states
    for how, tokens, later, old in (
        ("revoked", 300, True, False), ("not copied", 304, True, False), ("late", 303, True, False),
        ("revoked", 304, False, False), ("late", 304, True, False), ("not copied", 304, True, True),
    ):  # fmt: skip
        ids = prompt(tokens, tokens + len(how) + later + 9 * old)
        longer = [*ids, *prompt(50, 7)]
        if old:
            before = d.add([*ids, 5], max_tokens=9)
            d.step()
            tables = zip(scheduler_half(d).tables, d.block_tables(before), strict=True)
            kept = {block_id for table, held in tables if table.whole for block_id in held}
            d.finish(before)
            d.scheduler.kv_cache_manager.evict_blocks(set(range(1, NUM_BLOCKS)) - kept)
        request_id = add(p, d, ids, max_tokens=9)
        failing = Failing(d, how)
        other = "" if later else d.add(longer, max_tokens=9)
        d.step()
        failing.end()
        other = other or d.add(longer, max_tokens=9)
        d.step()
        found = d.computed[other] <= 50
        assert found == (tokens == 304 and d.config.cache_config.enable_prefix_caching)
        d.finish(request_id, other)
        assert d.step_loads[request_id] == 1
        ends = [d.answers[name].finish for name in (request_id, other)]
        assert ends == ["error" if policy == "fail" else "length", "error" if policy == "fail" and found else "length"]
        run([d], lambda: not d.scheduler.requests)
        for again in (ids, [*longer, 5]):
            assert d.finish(d.add(again, max_tokens=20)).finish == "length"
        beside(d, add(p, d, prompt(100, tokens)))  # after a failure nothing is expected
        settle(p, d)


@each_once("mode policy what", MODES, ("fail", "recompute"), ("left", "preempted"))
def test_a_state_that_does_not_come_to_a_request_that_has(states: Pair, mode: str, policy: str, what: str) -> None:
    """Before the engine knows: nobody has the block, and another request may get it next."""
    p, d = states
    ids = prompt(304, 9)
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d)
    d.step()
    failing.end()
    if what == "left":
        d.abort(request_id)
    else:
        d.preempt(request_id)
    others = [d.add(each, max_tokens=9) for each in ([*ids, *prompt(50, 7)], prompt(200, 8))]
    d.finish(*others, *([request_id] if what == "preempted" else []))
    assert d.answers[others[1]].finish == "length"
    d.finish(d.add([*ids, 5], max_tokens=20))
    settle(p, d)


# --- which rule -----------------------------------------------------------------------------------------------------


def test_the_log_says_once_which_rule_sends_loads_beside_the_steps(
    group: EngineGroup, tiny: ModelConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.multi(0, KVFERRY)
    assert len(lines("all loads go beside the steps", "below MultiConnector a store may keep")) == 1
    group.engine(1, groups=("full", "window"), window=WINDOW, num_blocks=90)
    assert len(lines("all loads go beside the steps")) == 1
    monkeypatch.setattr(from_vllm, "packing_name", lambda config, spec, layers: "")
    state_engine(group, tiny, 0, "align")
    assert len(lines("all loads go beside the steps")) == 1
    state_engine(group, tiny, 0, "align", unit=8)
    assert len(lines("all loads go beside the steps", "vLLM copies states of mamba_cache_mode align")) == 1
