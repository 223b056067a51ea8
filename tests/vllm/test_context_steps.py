"""Context parallelism, of decode and of prefill, under vLLM's real schedulers: what its configuration, its block tables
and its prefix cache make of it, with the adapter between them. No CPU attention can run it, so the forward and its
order of tokens are those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import ParallelConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.vllm import compat, from_vllm
from kvferry.connector.wire.step_plan import RankAddress
from kvferry.transport.errors import ConfigError
from tests.support.cases import each_once
from tests.support.inside import scheduler_half
from tests.vllm.labelled import BLOCK, HEADS, prompt
from tests.vllm.stepped import ROOM, Engine, EngineGroup, settle, tiny_model

pytestmark = pytest.mark.vllm

PLAIN = {"tp": 1}
TWO = {"tp": 4, "dcp": 2, "interleave": BLOCK}
"""Four ranks, two of which hold each of the two heads."""
TWO_BY_ONE = {"tp": 4, "dcp": 2, "interleave": 1}
FOUR = {"tp": 8, "dcp": 4, "interleave": 8}
MLA = {"groups": ("mla",)}
"""The models that vLLM runs with prefill context parallelism."""
P_FORMS = {
    "PCP 2": {"pcp": 2},
    "TP 2, PCP 2": {"tp": 2, "pcp": 2},
    "PCP 2, DCP 2": {"pcp": 2, "dcp": 2, "interleave": BLOCK},
    "TP 2, PCP 2, DCP 2": {"tp": 2, "pcp": 2, "dcp": 2},
    "TP 2, PCP 2, DCP 4": {"tp": 2, "pcp": 2, "dcp": 4, "interleave": 8},
}
"""Of vLLM's PCP, alone, and with DCP over its ranks or over the whole stage."""


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with query heads enough for eight tensor-parallel ranks."""
    return tiny_model(tmp_path_factory.mktemp("model") / "grouped", heads=8)


@pytest.fixture
def context(grouped: Any) -> Iterator[EngineGroup]:
    group = EngineGroup(grouped)
    yield group
    group.close()


def hand_over(p: Engine, d: Engine, ids: list[int]) -> str:
    """Each rank of D has a part of the tokens, so origins are not counted."""
    request_id = d.add(ids, p.prefill(ids), max_tokens=4)
    d.finish(request_id, beside=[p])
    return request_id


def hand_over_prompts(p: Engine, d: Engine) -> None:
    """Each is loaded as a whole, and its KV is right."""
    for tokens in (70, 3, 2 * BLOCK * 4):
        request_id = hand_over(p, d, prompt(tokens, tokens))
        assert d.answers[request_id].external == tokens - d.step_loads[request_id]
        assert d.computed[request_id] == 4, "the last prompt token, and what is decoded"
    settle(p, d)
    assert not d.failed


@pytest.mark.parametrize(
    ("p_form", "d_form"),
    [(TWO, PLAIN), (PLAIN, TWO), (TWO_BY_ONE, {"tp": 2}), (TWO, TWO_BY_ONE), (TWO, FOUR), (FOUR, TWO_BY_ONE)],
    ids=str,
)
def test_any_form_to_any_form(context: EngineGroup, p_form: dict[str, int], d_form: dict[str, int]) -> None:
    p, d = context.engine(0, extra=ROOM, **p_form), context.engine(1, extra=ROOM, **d_form)
    hand_over_prompts(p, d)


@each_once("p_form d_form", P_FORMS, ["TP 4, DCP 2", "TP 1", "TP 2, PCP 2, DCP 2"])
def test_prefill_context_parallelism_to_any_form(context: EngineGroup, p_form: str, d_form: str) -> None:
    forms: dict[str, dict[str, Any]] = {"TP 1": PLAIN, "TP 4, DCP 2": TWO} | P_FORMS
    p = context.engine(0, extra=ROOM, **MLA, **forms[p_form])
    d = context.engine(1, extra=ROOM, **MLA, **forms[d_form])
    assert len({(rank.host, rank.port) for rank in scheduler_half(p).ranks}) == len(p.workers)
    hand_over_prompts(p, d)


STAGES = [(1, 2, 1, 1), (2, 2, 1, 2), (1, 2, 2, 1), (2, 2, 2, 1), (2, 2, 4, 2), (3, 2, 6, 1), (4, 1, 2, 1)]
"""Ranks of TP, PCP, DCP and pipeline stages."""


@pytest.mark.parametrize(("tp", "pcp", "dcp", "pp"), STAGES)
def test_ranks_are_numbered_as_vllm_groups_them(
    context: EngineGroup, monkeypatch: pytest.MonkeyPatch, tp: int, pcp: int, dcp: int, pp: int
) -> None:
    """vLLM's own code makes the groups; only the processes behind them are missing."""
    config = copy(context.engine(0, extra=ROOM, **MLA).config)
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=tp, prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp,
        pipeline_parallel_size=pp, distributed_executor_backend="mp",
    )  # fmt: skip
    ranks = range(tp * pcp * pp)
    offsets, places = set(), set()
    for rank in ranks:
        with groups_of(rank, len(ranks), config, monkeypatch):
            info = from_vllm.rank_info(config, {})
            assert info.tp_size == tp * pcp and info.tp_rank // pcp == parallel_state.get_tp_group().rank_in_group
            shard = TokenSharding(dcp).shard(info.tp_rank)
            assert shard.rank == parallel_state.get_dcp_group().rank_in_group
            offsets.add(info.port_offset)
            places.add((info.pp_rank, info.tp_rank))
            if pcp > 1 < dcp:  # another vLLM
                parallel_state._DCP.rank_in_group ^= 1
                with pytest.raises(ConfigError, match="numbers the ranks that share tokens out otherwise"):
                    from_vllm.rank_info(config, {})
    assert offsets == set(ranks) and len(places) == len(ranks)


@contextmanager
def groups_of(rank: int, world: int, config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's groups as one rank has them."""

    def group(group_ranks: list[list[int]], *_: object, **__: object) -> Any:
        (ours,) = [ranks for ranks in group_ranks if rank in ranks]
        return SimpleNamespace(rank_in_group=ours.index(rank), world_size=len(ours), rank=rank)

    with monkeypatch.context() as patch:
        for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
            patch.setattr(parallel_state, name, None, raising=False)
        patch.setattr(parallel_state, "init_model_parallel_group", group)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=rank, device_group=None))
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda *_: world)
        patch.setattr(torch.distributed, "get_rank", lambda *_: rank)
        patch.setattr(torch.distributed, "get_backend", lambda *_: "gloo")
        parallel = config.parallel_config
        with set_current_vllm_config(config):
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size,
            )  # fmt: skip
        yield


def test_each_rank_tells_where_its_whole_group_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DCP is off, vLLM keeps the word of one rank of them."""
    ranks = [RankAddress(0, rank, "127.0.0.1", 5600 + rank, b"life") for rank in range(2)]
    pcp = SimpleNamespace(world_size=2, cpu_group=object())

    def gathered(found: list[Any], ours: RankAddress, group: object) -> None:
        assert (ours, group) == (ranks[1], pcp.cpu_group)
        found[:] = ranks

    monkeypatch.setattr(from_vllm, "get_pcp_group", lambda: pcp)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    config = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=2))
    assert from_vllm.addresses(cast(Any, config), ranks[1]) == tuple(ranks)


def test_a_peer_may_have_more_ranks_than_heads_by_prefill_context_parallelism() -> None:
    text = SimpleNamespace(num_attention_heads=4, num_hidden_layers=3)
    for mla, heads in ((True, MAX_RANKS), (False, 4)):
        model = SimpleNamespace(hf_text_config=text, use_mla=mla)
        assert from_vllm.max_sizes(cast(Any, SimpleNamespace(model_config=model))) == (heads, 3)


def test_what_prefill_context_parallelism_cannot_carry_is_refused(context: EngineGroup) -> None:
    engine = context.engine(0, extra=ROOM, **MLA, pcp=2)
    (group,) = engine.kv_config.kv_cache_groups
    compat.check_config(engine.config, engine.kv_config)
    for spec, text in (
        (replace(group.kv_cache_spec, tokens_per_state=4), "a MLAAttentionSpec with 4 tokens in an entry"),
        (FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32), "a FullAttentionSpec with 1"),
    ):
        caches = replace(engine.kv_config, kv_cache_groups=[group, KVCacheGroupSpec(["more"], spec)])
        with pytest.raises(ConfigError, match=f"prefill_context_parallel_size 2: KV cache group 1 is {text}"):
            compat.check_config(engine.config, caches)


def test_a_prefix_hit_is_whole_blocks_of_all_ranks(context: EngineGroup) -> None:
    p, d = context.engine(0, extra=ROOM, **PLAIN), context.engine(1, extra=ROOM, **TWO)
    ids = prompt(100)
    d.finish(d.add(ids[:70]))
    request_id = hand_over(p, d, ids)
    assert d.answers[request_id].external == 100 - 2 * (2 * BLOCK) - d.step_loads[request_id]
    again = hand_over(p, d, ids)
    assert d.answers[again].external == 100 - 3 * (2 * BLOCK) - d.step_loads[again]
    settle(p, d)


def test_what_vllm_tells_of_it(context: EngineGroup) -> None:
    engine = context.engine(0, extra=ROOM, **TWO)
    assert from_vllm.shardings(engine.config, engine.kv_config) == (TokenSharding(2, BLOCK),)
    (table,) = from_vllm.block_tables(engine.config, engine.kv_config)
    (group,) = from_vllm.layer_groups(engine.config, engine.kv_config)
    assert (table.block_size, group.block_size, group.total_heads) == (2 * BLOCK, BLOCK, HEADS)
    parallel = engine.config.parallel_config
    parallel.dcp_kv_cache_interleave_size = 4  # the old name, which vLLM's workers put in place of the new one
    assert from_vllm.shardings(engine.config, engine.kv_config) == (TokenSharding(2, 4),)
    assert parallel.cp_kv_cache_interleave_size == BLOCK, "vLLM's own is left as it is"
    assert engine.prefill(prompt(40))["dcp_size"] == 2


def test_a_replicated_cache_beside_shared_ones(context: EngineGroup) -> None:
    """As vLLM keeps that of a drafter, and states."""
    engine = context.engine(0, extra=ROOM, **TWO)
    (shared,) = engine.kv_config.kv_cache_groups
    drafter = KVCacheGroupSpec(["drafter"], replace(shared.kv_cache_spec, dcp_sharded=False))
    both = replace(engine.kv_config, kv_cache_groups=[shared, drafter])
    assert from_vllm.shardings(engine.config, both) == (TokenSharding(2, BLOCK), TokenSharding())
    assert [table.block_size for table in from_vllm.block_tables(engine.config, both)] == [2 * BLOCK, BLOCK]
    assert [group.sharding.size for group in from_vllm.layer_groups(engine.config, both)] == [2, 1]


def test_what_cannot_be_carried_is_refused_at_start(context: EngineGroup, grouped: Any) -> None:
    engine = context.engine(0, extra=ROOM, **TWO)
    config, caches = engine.config, engine.kv_config
    parallel = config.parallel_config
    before = parallel.cp_kv_cache_interleave_size
    parallel.cp_kv_cache_interleave_size = 3
    with pytest.raises(ConfigError, match="cp_kv_cache_interleave_size 3 does not divide"):
        compat.check_config(config, caches)
    parallel.cp_kv_cache_interleave_size = before
    compat.check_config(config, caches)
