"""The byte check itself: what it reads, and that it tells one flipped bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kv_bytes import Cached, KVBytes, compare, digest, places_of, prompt_digest, rows_of

PAGE = 32
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


class _Worker(KVBytes):
    """A worker with caches of its own and a runner that does nothing."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.caches = {name: torch.rand(8, 2, PAGE, 4) for name in LAYERS}
        context = {name: SimpleNamespace(kv_cache=cache) for name, cache in self.caches.items()}
        group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=SimpleNamespace(block_size=PAGE))
        self.model_runner = SimpleNamespace(
            execute_model=self.forward, kv_cache_config=SimpleNamespace(kv_cache_groups=[group])
        )
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        self._kvb_table = {name: Cached(0, PAGE, (cache,)) for name, cache in self.caches.items()}
        self.connector = SimpleNamespace(start_load_kv=self.load)
        self.kv_watch()

    def forward(self, step: Any) -> None: ...

    def load(self) -> None: ...

    def _kvb_connector(self) -> Any:
        return self.connector

    def step(
        self, scheduled: dict[str, int], new: Sequence[Any] = (), cached: Any = None, inside: bool = False
    ) -> None:
        empty = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        self.model_runner.execute_model(
            SimpleNamespace(
                finished_req_ids=set(),
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached or empty,
                num_scheduled_tokens=scheduled,
                has_sync_kv_loads=inside,
            )
        )


def request(name: str, tokens: list[int], blocks: list[int], computed: int) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, prompt_token_ids=tokens, block_ids=(blocks,), num_computed_tokens=computed)


PROMPT = list(range(100, 170))


def handed_over(corrupt: bool = False, short: bool = False) -> tuple[list[Any], list[Any]]:
    """Records of D and P: P prefills PROMPT in two chunks, D has the same rows in other blocks."""
    p, d = _Worker(1), _Worker(2)
    p.step({"a": 40}, [request("a", PROMPT, [3, 1], 0)])
    chunk = SimpleNamespace(req_ids=["a"], new_block_ids=[([6],)], num_computed_tokens=[40], resumed_req_ids=set())
    p.step({"a": 30}, cached=chunk)
    for name in LAYERS:
        for ours, theirs in zip([5, 2, 7], [3, 1, 6], strict=True):
            d.caches[name][ours] = p.caches[name][theirs]
    if corrupt:
        d.kv_corrupt("1")
    d.step({"b": 1}, [request("b", PROMPT, [5, 2, 7], len(PROMPT) - 1 - 32 * short)])
    return d.kv_records(), p.kv_records()


def test_equal_bytes_compare_equal_and_one_flipped_bit_is_told() -> None:
    of_d, of_p = handed_over()
    assert [(r["when"], r["tokens"]) for r in of_d + of_p] == [("loaded", 69), ("computed", 69)]
    assert of_d[0]["prompt"] == prompt_digest(PROMPT) and compare(of_d, of_p) is None
    assert compare(*handed_over(corrupt=True)) == f"KV bytes differ in 1 of 2 layers: {LAYERS[0]}"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("corrupt", [True, False])
def test_a_state_is_digested_between_its_load_and_the_forward_that_changes_it(inside: bool, corrupt: bool) -> None:
    """As ``KVConnectorModelRunnerMixin`` orders a step: loads inside it start before the forward, others after it."""
    theirs = torch.arange(6.0)

    class Worker(_Worker):
        def __init__(self) -> None:
            self.state = torch.zeros(8, 6)
            super().__init__(2)
            self._kvb_table = {"mixer": Cached(0, PAGE, (self.state,), kind="state", aligned=True)}

        def forward(self, step: Any) -> None:
            if step.has_sync_kv_loads:
                self.connector.start_load_kv()
            self.state += 1
            if not step.has_sync_kv_loads:
                self.connector.start_load_kv()

        def load(self) -> None:
            self.state[7] = theirs

    d = Worker()
    if not inside:
        d.load()
    if corrupt:
        d.kv_corrupt("1")
    d.step({"b": 1}, [request("b", PROMPT, [5, 2, 7], len(PROMPT) - 1)], inside=inside)
    (record,) = d.kv_records()
    assert record["inside"] is inside and (record["layers"] == {"mixer": digest(theirs)}) is not corrupt


@pytest.mark.vllm
def test_packing_of_vllm_on_the_cpu_is_found() -> None:
    """vLLM's own writer of the cache: keys are transposed or in pairs, and what it writes is read back."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("packing inside blocks is vLLM's CPU attention's")
    current_platform.import_kernels()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    for dtype, block_tokens in itertools.product((torch.float32, torch.bfloat16, torch.float16), (32, 64)):
        isa = _get_attn_isa(dtype, block_tokens, 64)
        layer = SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
        cache = torch.zeros(4, 2, block_tokens, 128, dtype=dtype)
        places = places_of(layer, cache)
        assert places is not None and places[0, :64].tolist() != list(range(64))
        key, value = torch.rand(2, 70, 2, 64).to(dtype)
        slots = torch.arange(70) + block_tokens
        impl.do_kv_cache_update(layer, key, value, cache, slots)
        rows = rows_of(cache, [1, 2, 3], block_tokens, 70, places)
        assert torch.equal(rows, torch.cat([key, value], dim=-1).transpose(0, 1))
