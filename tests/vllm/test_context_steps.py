"""Decode context parallelism under vLLM's real schedulers: what its configuration, its block tables and its prefix
cache make of it, with the adapter between them. No CPU attention can run it, so the forward and its order of tokens
are those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.vllm import compat, from_vllm
from kvferry.transport.errors import ConfigError
from tests.vllm.labelled import BLOCK, HEADS, prompt
from tests.vllm.stepped import ROOM, Engine, EngineGroup, settle, tiny_model

pytestmark = pytest.mark.vllm
if not hasattr(from_vllm, "shardings") or not compat.HAS_TRANSFER_RESULTS:
    pytest.skip("this vLLM shares tokens out by other rules", allow_module_level=True)

PLAIN = {"tp": 1}
TWO = {"tp": 4, "dcp": 2, "interleave": BLOCK}
"""Four ranks, two of which hold each of the two heads."""
TWO_BY_ONE = {"tp": 4, "dcp": 2, "interleave": 1}
FOUR = {"tp": 8, "dcp": 4, "interleave": 8}


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


@pytest.mark.parametrize(
    ("p_form", "d_form"),
    [(TWO, PLAIN), (PLAIN, TWO), (TWO_BY_ONE, {"tp": 2}), (TWO, TWO_BY_ONE), (TWO, FOUR), (FOUR, TWO_BY_ONE)],
    ids=str,
)
def test_any_form_to_any_form(context: EngineGroup, p_form: dict[str, int], d_form: dict[str, int]) -> None:
    p, d = context.engine(0, extra=ROOM, **p_form), context.engine(1, extra=ROOM, **d_form)
    for tokens in (70, 3, 2 * BLOCK * 4):
        request_id = hand_over(p, d, prompt(tokens, tokens))
        assert d.answers[request_id].external == tokens - d.step_loads[request_id]
        assert d.computed[request_id] == 4, "the last prompt token, and what is decoded"
    settle(p, d)
    assert not d.failed


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
    for name, value, text in (
        ("cp_kv_cache_interleave_size", 3, "cp_kv_cache_interleave_size 3 does not divide"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel_size 2 is not carried yet"),
    ):
        before = getattr(parallel, name)
        setattr(parallel, name, value)
        with pytest.raises(ConfigError, match=text):
            compat.check_config(config, caches)
        setattr(parallel, name, before)
    compat.check_config(config, caches)
