"""States of recurrent layers handed over between tensor-parallel sizes: real worker halves, vLLM's sizes and sharding.

Each test compares all of D's memory, padding and other blocks too, with what vLLM's own rules put there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _make_fused_conv1d_weight_loader
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Calculator
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvferry.connector.config import Settings
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.engine_types import RankInfo
from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.vllm import from_vllm
from kvferry.connector.vllm.from_vllm import layer_groups
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, StepPlan, pack_ids
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.transport.errors import IncompatiblePeerError
from tests.vllm.stepped import PATIENT

pytestmark = pytest.mark.vllm
BLOCKS, PADDING = 5, 96
LAYERS = ["model.layers.0.mixer", "model.layers.2.mixer"]
ATTENTION = "model.layers.1.attn"
PROMPT, HEADS, BLOCK = 41, 2, 16
P_IDS, D_IDS = [[3], [4, 1, 2]], [[1], [2, 4, 3]]
PLANES = ("tcp", "cma", "shm", "zmq")
SIZES = [(1, 2, "SD"), (2, 1, "DS"), (2, 4, "DS"), (4, 2, "SD"), (1, 4, "DS"), (4, 1, "SD"), (2, 2, "SD")]
"""Ranks of P and D, and the order in which both keep the inputs of convolutions."""


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Bits = list[torch.Tensor]
"""The arrays of one state as integers: ``[channels, taps]`` of a convolution, ``[heads, …]`` of a recurrent state."""


@dataclass(frozen=True)
class Family:
    """States of a layer as vLLM shards them: sizes by its calculators, contents by its weight loaders. ``wide``,
    ``narrow``: (heads, head size) of x and of B and C, or of v and of q and k; all ranks together. ``inputs``: what a
    convolution keeps. ``replicated``: every rank holds all of it. ``ring``: with vLLM's replay ring."""

    name: str
    backend: str
    wide: tuple[int, int]
    narrow: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    inputs: int = 3
    replicated: bool = False
    ring: bool = False

    def shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """A rank's, from vLLM's calculators."""
        (heads, size), (narrow, narrow_size) = self.wide, self.narrow
        tp, kernel = 1 if self.replicated else tp, self.inputs + 1
        found: dict[str, Any] = {
            "MAMBA1": lambda: Calculator.mamba1_state_shape(tp, heads * size, narrow_size, kernel),
            "MAMBA2": lambda: Calculator.mamba2_state_shape(tp, heads * size, narrow, heads, size, narrow_size, kernel),
            "GDN_ATTN": lambda: Calculator.gated_delta_net_state_shape(tp, narrow, heads, narrow_size, size, kernel),
            "SHORT_CONV": lambda: Calculator.short_conv_state_shape(tp, heads * size, kernel),
            "LINEAR": lambda: Calculator.linear_attention_state_shape(heads, tp, size),
        }
        if self.name == "kda":
            return Calculator.kda_state_shape(tp, heads, size, conv_kernel_size=kernel)
        shapes = tuple(found[self.backend]())
        if self.ring:
            return Calculator.append_replayssm_ring(shapes, narrow, tp, 4, MambaBackendEnum.TRITON)
        return shapes

    def spec(self, tp: int) -> Any:
        shapes = self.shapes(tp)
        backend = MambaAttentionBackendEnum[self.backend]
        dtypes = (*self.dtypes, torch.bfloat16, torch.float32, torch.bfloat16)[: len(shapes)]
        return kvi.MambaSpec(64, shapes=shapes, dtypes=dtypes, mamba_type=backend, tp_replicated=self.replicated)

    def _projections(self) -> list[int]:
        """Channels of each in the whole model, in the order of the convolution."""
        wide, narrow = self.wide[0] * self.wide[1], self.narrow[0] * self.narrow[1]
        return {"MAMBA2": [wide, narrow, narrow], "GDN_ATTN": [narrow, narrow, wide]}.get(self.backend, [wide])

    def whole(self, draw: torch.Generator) -> Bits:
        """A state of the whole model, without copies for any rank."""
        found: Bits = []
        for shape, dtype in zip(self.shapes(1), self.dtypes, strict=False):
            is_conv = not found and self.backend != "LINEAR"
            size = (sum(self._projections()), self.inputs) if is_conv else shape
            found.append(torch.randint(-(1 << 31), 1 << 31, size, generator=draw).to(BITS[dtype.itemsize]))
        return found

    def rank(self, whole: Bits, rank: int, tp: int) -> Bits:
        """What a rank holds of it, by the rules that its weights are loaded by."""
        if self.replicated:
            return whole
        found = []
        for number, array in enumerate(whole):
            if number == 0 and self.backend != "LINEAR":
                found.append(self._conv_rank(array, rank, tp))
            else:
                found.append(array.chunk(tp)[rank])
        return found

    def _conv_rank(self, channels: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
        parts = self._projections()
        if self.backend == "MAMBA2":
            extra = Calculator.extra_groups_for_head_shards(self.narrow[0], tp)
            size = self.narrow[1]
            shared = ((self.narrow[0] + extra) * size, extra * size, extra > 0)
            param = torch.zeros((parts[0] + 2 * shared[0]) // tp, self.inputs, dtype=channels.dtype)
            mamba_v2_sharded_weight_loader([(parts[0], 0, False), shared, shared], tp, rank)(param, channels)
            return param
        param = torch.zeros(len(channels) // tp, self.inputs, dtype=channels.dtype)
        if self.name == "kda":
            load = _make_fused_conv1d_weight_loader(parts, tp, rank)
            for shard, piece in enumerate(channels.split(parts)):
                load(param.unsqueeze(1), piece, shard)
            return param
        mamba_v2_sharded_weight_loader([(size, 0, False) for size in parts], tp, rank)(param, channels)
        return param


FAMILIES = {
    family.name: family
    for family in (
        Family("mamba2", "MAMBA2", (8, 4), (4, 6)),
        Family("mamba2 of one group", "MAMBA2", (8, 4), (1, 6)),
        Family("mamba2 of one dtype", "MAMBA2", (4, 16), (4, 16), (torch.float32, torch.float32)),
        Family("gdn", "GDN_ATTN", (8, 6), (4, 10)),
        Family("kda", "GDN_ATTN", (4, 8), (4, 8), (torch.float32, torch.float32)),
        Family("mamba1", "MAMBA1", (1, 2048), (0, 5)),
        Family("short conv", "SHORT_CONV", (1, 24)),
        Family("replicated", "SHORT_CONV", (1, 24), replicated=True),
        Family("linear", "LINEAR", (4, 6)),
    )
}


CASES = [
    (name, *SIZES[size])
    for number, name in enumerate(FAMILIES)
    for size in (range(7) if "one group" in name else (2 * number % 6, (2 * number + 3) % 6))
]
"""Each family to more and to fewer ranks, in both orders; groups that ranks share pass in all ways."""


def write(family: Family, tp: int, cache: torch.Tensor, block: int, held: Bits) -> None:
    """A rank's arrays into a block of a cache ``[B, 1, 1, bytes]`` by vLLM's own views, in the order of its setting."""
    layer = SimpleNamespace(get_state_shape=lambda: family.shapes(tp), get_state_dtype=lambda: family.dtypes)
    MambaBase.bind_kv_cache(layer, cache)
    for number, (array, bits) in enumerate(zip(layer.kv_cache, held, strict=True)):
        is_conv = number == 0 and family.backend != "LINEAR"
        oriented = bits.T if is_conv and get_conv_state_layout() == "SD" else bits
        array[block] = oriented.contiguous().view(array.dtype)


@pytest.fixture(autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By vLLM's setting, which it reads once."""
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    if hasattr(request, "param"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield
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
        self.groups = layer_groups(engine_of(tp, family.narrow[0] if groups_known else None), config)
        info = RankInfo(name, tp_rank=rank, tp_size=tp, pp_rank=0, pp_size=1, model={"architectures": "Hybrid"})
        settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=16 << 20, **PATIENT)
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
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: HEADS, hf_text_config=config, dtype=torch.float32,
        model_arch_config=SimpleNamespace(per_layer_overrides=None),
    )  # fmt: skip
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


def hand_over(p: list[Rank], d: list[Rank]) -> tuple[int, int]:
    """(loads reported, loads that failed)."""
    token = secrets.token_bytes(16)
    addresses = [rank.worker.address for rank in p]
    assert all(addresses)
    peer = PeerEngine("p", len(p), 1, 600.0, tuple(address for address in addresses if address))
    for rank in p:
        lease = LeaseGrant("req-p", token, PROMPT, tuple(map(pack_ids, P_IDS)))
        rank.worker.post(StepPlan(leases=(lease,)))
    for rank in d:
        load = Load("req-d", token, peer, tuple(map(pack_ids, D_IDS)), ((0, 1), (0, PROMPT)))
        watch = KeepLease("req-d", token, peer, False)
        rank.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(watch,), loads=(load,)))
    received = failed = sent = 0
    end = time.monotonic() + 300
    while (received < len(d) or (sent < len(p) and not failed)) and time.monotonic() < end:
        for rank in (*p, *d):
            results = rank.worker.take_results()
            received, failed = received + len(results.received), failed + len(results.failed)
            sent += len(results.sent)
        time.sleep(0.0005)
    assert failed or sent == len(p), "P's blocks were never released"
    return received, failed


@pytest.mark.parametrize(("name", "p_tp", "d_tp", "order"), CASES, indirect=["order"])
def test_every_element_arrives(engines: Any, name: str, p_tp: int, d_tp: int) -> None:
    family, plane = FAMILIES[name], PLANES[(len(name) + p_tp - d_tp) % len(PLANES)]
    p, d = engines(family, p_tp, "p", plane=plane), engines(family, d_tp, "d", plane=plane)
    wholes = [family.whole(torch.Generator().manual_seed(layer)) for layer in range(len(LAYERS))]
    labels = attention_labels()
    for rank in p:
        rank.memory.copy_(rank.expected(wholes, block=3))
        for token in range(PROMPT):
            block = [4, 1, 2][token // BLOCK]
            rank.caches[ATTENTION][block, :, token % BLOCK] = labels[list(rank.heads), token]
    assert hand_over(p, d) == (d_tp, 0)
    for rank in d:
        differs = (rank.memory != rank.expected(wholes, block=1)).nonzero()
        assert not len(differs), f"{len(differs)} bytes of rank {rank.rank}, the first at {int(differs[0])}"
        for token in range(PROMPT):
            block = [2, 4, 3][token // BLOCK]
            assert torch.equal(rank.caches[ATTENTION][block, :, token % BLOCK], labels[list(rank.heads), token])


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
def test_states_that_differ_are_refused_by_name(engines: Any, p_family: Family, d_family: Family, says: str) -> None:
    (p, *_), (d, *_) = engines(p_family, 2, "p"), engines(d_family, 4, "d")
    with pytest.raises(IncompatiblePeerError, match=says) as error:
        compatible(geometry(d), geometry(p))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["order", "platform"])
def test_states_in_another_order_are_refused_by_name(engines: Any, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
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
    assert hand_over(p, d) == (2, 2)
    assert all(torch.equal(rank.memory, was) for rank, was in zip(d, before, strict=True))


UNKNOWN = [(replace(FAMILIES["mamba2"], ring=True), True), (FAMILIES["mamba2"], False)]
"""A family, and whether the model's configuration tells how many groups it has."""


@pytest.mark.parametrize(("p_tp", "d_tp"), [(4, 4), (4, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize(("family", "groups_known"), UNKNOWN, ids=["replay ring", "number of groups"])
def test_states_that_are_shared_in_unknown_ways_pass_between_equal_sizes_only(
    engines: Any, family: Family, groups_known: bool, p_tp: int, d_tp: int
) -> None:
    p, d = (engines(family, tp, name, groups_known=groups_known) for tp, name in ((p_tp, "p"), (d_tp, "d")))
    if p_tp != d_tp:
        with pytest.raises(IncompatiblePeerError, match=r"(total_heads|packing) of layer 'model\.layers\.0\.mixer'"):
            compatible(geometry(d[0]), geometry(p[0]))
        return
    assert {group.part for group in geometry(d[0]).regions} == {""}
    for rank in p:
        content = torch.randint(-128, 128, rank.caches[LAYERS[0]][3].shape, dtype=torch.int8)
        for name in LAYERS:
            rank.caches[name][3] = content
    assert hand_over(p, d) == (4, 0)
    for ours, theirs in zip(d, p, strict=True):
        for name in LAYERS:
            assert torch.equal(ours.caches[name][1], theirs.caches[name][3])
            assert (ours.caches[name][[0, 2, 3, 4]] == -1).all()
