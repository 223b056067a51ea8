"""States of recurrent layers handed over between tensor-parallel sizes: real worker halves, vLLM's sizes and sharding.

Each test compares all of D's memory, padding and other blocks too, with what vLLM's own rules put there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm
kvi = pytest.importorskip("vllm.v1.kv_cache_interface")
if not hasattr(kvi, "KVCacheLayout"):
    pytest.skip("this vLLM registers states as lists", allow_module_level=True)

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout  # noqa: E402

from kvferry.connector.config import Settings  # noqa: E402
from kvferry.connector.engine.worker import WorkerHalf  # noqa: E402
from kvferry.connector.geometry.compatibility import compatible  # noqa: E402
from kvferry.connector.geometry.engine_types import RankInfo  # noqa: E402
from kvferry.connector.geometry.rank_geometry import RankGeometry  # noqa: E402
from kvferry.connector.vllm import from_vllm  # noqa: E402
from kvferry.connector.vllm.from_vllm import layer_groups  # noqa: E402
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, StepPlan, pack_ids  # noqa: E402
from kvferry.transport.errors import IncompatiblePeerError  # noqa: E402
from tests.vllm.sharded_states import FAMILIES, Family, states, write  # noqa: E402

BLOCKS, PADDING = 5, 96
LAYERS = ["model.layers.0.mixer", "model.layers.2.mixer"]
ATTENTION = "model.layers.1.attn"
PROMPT, HEADS, BLOCK = 41, 2, 16
PLANES = ("tcp", "cma", "shm", "zmq")
SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4), (2, 2)]


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from conv_order(request.param, monkeypatch)


@pytest.fixture
def default_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from conv_order(None, monkeypatch)


def conv_order(name: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    if name is not None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", name)
    get_conv_state_layout.cache_clear()
    yield get_conv_state_layout()
    get_conv_state_layout.cache_clear()


class Rank:
    """One rank of a hybrid: two layers of states under one block table, one with KV heads under another."""

    def __init__(
        self, family: Family, rank: int, tp: int, name: str, plane: str = "tcp", groups_known: bool = True
    ) -> None:
        self.family, self.rank, self.tp = family, rank, tp
        spec = family.spec(tp)
        full = kvi.FullAttentionSpec(BLOCK, num_kv_heads=max(1, HEADS // tp), head_size=4, dtype=torch.float32)
        groups = [kvi.KVCacheGroupSpec(LAYERS, spec), kvi.KVCacheGroupSpec([ATTENTION], full)]
        config = kvi.KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        page = spec.state_content_size_bytes + PADDING
        self.memory = torch.full((len(LAYERS) * BLOCKS * page,), -1, dtype=torch.int8)
        self.caches = self._views(self.memory, page)
        self.caches[ATTENTION] = torch.full((BLOCKS, max(1, HEADS // tp), BLOCK, 8), -1.0)
        self.page = page
        self.groups = layer_groups(engine_of(tp, family.groups if groups_known else None), config)
        info = RankInfo(name, tp_rank=rank, tp_size=tp, pp_rank=0, pp_size=1, model={"architectures": "Hybrid"})
        settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=16 << 20)
        self.worker = WorkerHalf(settings, info, self.groups)
        self.worker.register(self.caches, BLOCKS)

    def _views(self, memory: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
        """As vLLM hands them out: the padding shows in the first stride only."""
        content = page - PADDING
        shape, strides = (BLOCKS, 1, 1, content), (page, content, content, 1)
        return {name: memory.as_strided(shape, strides, number * BLOCKS * page) for number, name in enumerate(LAYERS)}

    def expected(self, wholes: list[list[torch.Tensor]], block: int) -> torch.Tensor:
        memory = torch.full_like(self.memory, -1)
        for cache, whole in zip(self._views(memory, self.page).values(), wholes, strict=True):
            write(self.family, self.tp, cache, block, self.family.rank(whole, self.rank, self.tp))
        return memory

    @property
    def heads(self) -> range:
        first = self.rank * HEADS // self.tp
        return range(first, first + max(1, HEADS // self.tp))


def engine_of(tp: int, groups: int | None) -> Any:
    config = SimpleNamespace(n_groups=groups)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, hf_text_config=config, dtype=torch.float32)
    parallel = SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=1)
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Rank] = []

    def make(family: Family, tp: int, name: str, **more: Any) -> list[Rank]:
        for rank in range(tp):
            made.append(Rank(family, rank, tp, name, **more))
        return made[-tp:]

    yield make
    for rank in made:
        rank.worker.close()


def attention_labels() -> torch.Tensor:
    return torch.arange(HEADS * PROMPT * 8, dtype=torch.float32).reshape(HEADS, PROMPT, 8)


def hand_over(p: list[Rank], d: list[Rank], p_ids: list[list[int]], d_ids: list[list[int]]) -> tuple[int, int]:
    """(loads reported, loads that failed)."""
    token = secrets.token_bytes(16)
    addresses = [rank.worker.address for rank in p]
    assert all(addresses)
    peer = PeerEngine("p", len(p), 1, 60.0, tuple(address for address in addresses if address))
    for rank in p:
        lease = LeaseGrant("req-p", token, PROMPT, tuple(map(pack_ids, p_ids)))
        rank.worker.post(StepPlan(leases=(lease,)))
    for rank in d:
        load = Load("req-d", token, peer, tuple(map(pack_ids, d_ids)), ((0, 1), (0, PROMPT)))
        watch = KeepLease("req-d", token, peer, False)
        rank.worker.post(StepPlan(consumer=b"c" * 16, keeps=(watch,), loads=(load,)))
    received = failed = sent = 0
    end = time.monotonic() + 60
    while (received < len(d) or (sent < len(p) and not failed)) and time.monotonic() < end:
        for rank in (*p, *d):
            results = rank.worker.take_results()
            received, failed = received + len(results.received), failed + len(results.failed)
            sent += len(results.sent)
        time.sleep(0.0005)
    assert failed or sent == len(p), "P's blocks were never released"
    return received, failed


@pytest.mark.parametrize(("p_tp", "d_tp"), SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_element_arrives(engines: Any, order: str, name: str, p_tp: int, d_tp: int) -> None:
    family, plane = FAMILIES[name], PLANES[(len(name) + p_tp - d_tp) % len(PLANES)]
    p, d = engines(family, p_tp, "p", plane=plane), engines(family, d_tp, "d", plane=plane)
    wholes = [family.whole(torch.Generator().manual_seed(layer)) for layer in range(len(LAYERS))]
    labels = attention_labels()
    for rank in p:
        rank.memory.copy_(rank.expected(wholes, block=3))
        for token in range(PROMPT):
            block = [4, 1, 2][token // BLOCK]
            rank.caches[ATTENTION][block, :, token % BLOCK] = labels[list(rank.heads), token]
    assert hand_over(p, d, [[3], [4, 1, 2]], [[1], [2, 4, 3]]) == (d_tp, 0)
    for rank in d:
        differs = (rank.memory != rank.expected(wholes, block=1)).nonzero()
        assert not len(differs), f"{len(differs)} bytes of rank {rank.rank}, the first at {int(differs[0])}"
        for token in range(PROMPT):
            block = [2, 4, 3][token // BLOCK]
            assert torch.equal(rank.caches[ATTENTION][block, :, token % BLOCK], labels[list(rank.heads), token])


def test_the_oracle_is_vllms_sharding(order: str) -> None:
    """All ranks together hold every element; only a single group, and what is replicated, is copied."""
    for family in FAMILIES.values():
        (whole,) = [family.whole(torch.Generator().manual_seed(7))]
        for tp in (1, 2, 4):
            held = [family.rank(whole, rank, tp) for rank in range(tp)]
            copies = {"mamba2 of one group": 2 * family.narrow[1] * 3, "replicated": whole[0].numel()}
            sizes = [sum(rank[n].numel() for rank in held) for n in range(len(whole))]
            copied = (tp - 1) * copies.get(family.name, 0)
            assert sizes == [whole[0].numel() + copied, *(array.numel() for array in whole[1:])]
            pages = torch.zeros(1, 1, 1, family.spec(tp).state_content_size_bytes, dtype=torch.int8)
            for rank in held:
                write(family, tp, pages, 0, rank)  # vLLM's own views take them
            assert len(list(states(family, tp, pages))) == len(whole)


def geometry(rank: Rank) -> RankGeometry:
    assert rank.worker.rank_context is not None
    return rank.worker.rank_context.caches.geometry


LONGER = replace(FAMILIES["mamba2"], inputs=4)
WIDER = replace(FAMILIES["mamba2"], dtypes=(torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize(
    ("p_family", "d_family", "says"),
    [
        (WIDER, FAMILIES["mamba2"], r"dtype of layer 'model\.layers\.0\.mixer' \(ssm\) .* float32, .* bfloat16"),
        (LONGER, FAMILIES["mamba2"], r"packing .*\(conv\.x\) .* SD of 3 inputs cpu, .* SD of 4 inputs cpu$"),
        (FAMILIES["mamba2 of one group"], FAMILIES["mamba2"], r"total_heads .*\(conv\.b\) .* 4, .* 1$"),
        (
            FAMILIES["gdn"],
            FAMILIES["mamba2"],
            r"packing of layer .* conv\.x .*, conv\.b .* conv\.q .*, conv\.k .*, conv\.v .*, ssm",
        ),
    ],
    ids=["dtype", "speculative tokens", "groups", "family"],
)
def test_states_that_differ_are_refused_by_name(
    engines: Any, default_order: str, p_family: Family, d_family: Family, says: str
) -> None:
    (p, *_), (d, *_) = engines(p_family, 2, "p"), engines(d_family, 4, "d")
    with pytest.raises(IncompatiblePeerError, match=says) as error:
        compatible(geometry(d), geometry(p))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["order", "platform"])
def test_states_in_another_order_are_refused_by_name(
    engines: Any, default_order: str, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Nothing is written on D, and the load fails."""
    family = FAMILIES["gdn"]
    d = engines(family, 2, "d")
    if other == "order":
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        get_conv_state_layout.cache_clear()
        says = "ours is SD of 3 inputs cpu, .* DS of 3 inputs cpu$"
    else:
        monkeypatch.setattr(
            from_vllm, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_fp8_fnuz=lambda: False)
        )
        says = "ours is SD of 3 inputs cpu, .* SD of 3 inputs$"
    p = engines(family, 1, "p")
    with pytest.raises(
        IncompatiblePeerError, match=rf"packing of layer 'model\.layers\.0\.mixer' \(conv\.q\) .*{says}"
    ):
        compatible(geometry(d[0]), geometry(p[0]))
    before = [rank.memory.clone() for rank in d]
    assert hand_over(p, d, [[3], [4, 1, 2]], [[1], [2, 4, 3]]) == (2, 2)
    assert all(torch.equal(rank.memory, was) for rank, was in zip(d, before, strict=True))


UNKNOWN = [(replace(FAMILIES["mamba2"], ring=True), True), (FAMILIES["mamba2"], False)]
"""A family, and whether the model's configuration tells how many groups it has."""


@pytest.mark.parametrize(("family", "groups_known"), UNKNOWN, ids=["replay ring", "number of groups"])
def test_states_that_are_shared_in_unknown_ways_pass_between_equal_sizes(
    engines: Any, default_order: str, family: Family, groups_known: bool
) -> None:
    p, d = engines(family, 4, "p", groups_known=groups_known), engines(family, 4, "d", groups_known=groups_known)
    assert {group.part for group in geometry(d[0]).regions} == {""}
    for rank in p:
        content = torch.randint(-128, 128, rank.caches[LAYERS[0]][3].shape, dtype=torch.int8)
        for name in LAYERS:
            rank.caches[name][3] = content
    assert hand_over(p, d, [[3], [4, 1, 2]], [[1], [2, 4, 3]]) == (4, 0)
    for ours, theirs in zip(d, p, strict=True):
        for name in LAYERS:
            assert torch.equal(ours.caches[name][1], theirs.caches[name][3])
            assert (ours.caches[name][[0, 2, 3, 4]] == -1).all()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(4, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize(("family", "groups_known"), UNKNOWN, ids=["replay ring", "number of groups"])
def test_states_that_are_shared_in_unknown_ways_are_refused_between_others(
    engines: Any, default_order: str, family: Family, groups_known: bool, p_tp: int, d_tp: int
) -> None:
    (p, *_), (d, *_) = (
        engines(family, p_tp, "p", groups_known=groups_known),
        engines(family, d_tp, "d", groups_known=groups_known),
    )
    with pytest.raises(IncompatiblePeerError, match=r"(total_heads|packing) of layer 'model\.layers\.0\.mixer'"):
        compatible(geometry(d), geometry(p))
