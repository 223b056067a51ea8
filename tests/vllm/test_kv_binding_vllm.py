"""Our KV-binding utilities and the installed vLLM's on the same random inputs: the same caches, the same refusals."""

from __future__ import annotations

import ast
import copy
import itertools
import random
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector import utils as transfer
from vllm.model_executor.models.utils import extract_layer_index as theirs_extract
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.worker import utils as theirs
from vllm.v1.worker.gpu import attn_utils

from kvferry.connector.binding import attention_group, kv_binding, kv_spec
from kvferry.connector.binding.block_ops import KVBlockZeroer, _make_src_and_dst_indices, copy_kv_blocks
from kvferry.connector.engine.aggregator import yield_req_data
from kvferry.transport.errors import ProtocolError
from tests.vllm.fake_layers import (
    BLOCKS,
    DTYPES,
    LAYOUTS,
    Compared,
    FakeAttention,
    fake_backend,
    form,
    place,
    placed,
    random_backend,
    random_groups,
    random_spec,
    vllm_config,
)

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
TABLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "binding_table.py"))
HELD, OWN, UTILITIES = TABLE["HELD"], TABLE["OWN"], TABLE["UTILITIES"]


def draws(count: int) -> Iterator[random.Random]:
    return (random.Random(seed) for seed in range(count))


def test_the_version_is_the_one_in_the_table() -> None:
    if not vllm.__version__.startswith("0.33"):
        assert vllm.__version__.startswith(HELD)
    files = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_vllm.py"))
    compared = set(re.findall(r"^def test_(\w+)", files, re.M))
    for utility in UTILITIES:
        if utility.held != OWN:
            assert any(name.startswith(utility.name) or f"_and_{utility.name}" in name for name in compared), (
                utility.name
            )


# --- caches -------------------------------------------------------------------------------------------------------


def test_get_kv_cache_config_from_groups() -> None:
    seen = Compared()
    names = ("size", "layers", "layer_stride", "block_stride", "offset")
    for seed, layout in itertools.product(range(150), LAYOUTS):
        pair = seen.both(
            place,
            lambda groups, layout: kv_spec.get_kv_cache_config_from_groups(groups, BLOCKS, layout),
            random_groups(random.Random(seed)),
            layout,
        )
        if pair is not None:
            wanted, got = ([[getattr(t, n) for n in names] for t in config.kv_cache_tensors] for config in pair)
            assert got == wanted and pair[0].num_blocks == pair[1].num_blocks == BLOCKS
    seen.at_least(agreed=250, refused=100)


def test_allocate_and_reshape() -> None:
    """Every layout, whole and split blocks; the layouts that a placement does not belong to are left to unit tests."""
    seen = Compared()
    for draw, layout, config in placed(range(150)):
        kernel = draw.choice(
            [None, None, [draw.choice([8, 16, g.kv_cache_spec.block_size]) for g in config.kv_cache_groups]]
        )
        pair = seen.both(
            lambda c, a, k: theirs.allocate_kv_cache(c, CPU, a, k),
            lambda c, a, k: kv_binding.reshape(c, kv_binding.allocate(c, CPU), a, k),
            config,
            layout,
            kernel,
        )
        if pair is None:
            continue
        wanted, got = pair
        assert list(got) == list(wanted) and form(got) == form(wanted)
        again = kv_binding.reshape(config, kv_binding.allocate(config, CPU), layout.stride_order, kernel)
        assert form(again) == form(got)
        seen[layout.name] += 1
        seen[f"{layout.name} split"] += any(cache.shape[0] > BLOCKS for cache in got.values())
    seen.at_least(refused=30, **dict.fromkeys((layout.name for layout in LAYOUTS), 1))
    assert seen["LBHNC split"] and seen["LBNHC split"]


def test_init_kv_cache() -> None:
    """Layers that share, layers elsewhere, and a target that has no cache."""
    seen = Compared()
    for draw, layout, config in placed(range(60)):
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        shared = {
            f"model.layers.{90 + n}.self_attn.attn": draw.choice([*names, "model.layers.77.attn"]) for n in range(2)
        }
        here = draw.sample(names, draw.randint(1, len(names)))
        other, mine = (
            {n: FakeAttention() for n in here} | {n: FakeAttention(target=t) for n, t in shared.items()} for _ in "ab"
        )
        kernel = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        pair = seen.both(
            lambda c, k, a, o=other: attn_utils.init_kv_cache(o, c, CPU, k, vllm_config(a, o)),
            lambda c, k, a, m=mine: kv_binding.init_kv_cache(m, c, CPU, k, a),
            config,
            kernel,
            layout,
        )
        if pair is not None:
            assert list(pair[1]) == list(pair[0]) and form(pair[1]) == form(pair[0])
            bound = [{name: layer.kv_cache for name, layer in each.items()} for each in (other, mine)]
            assert form(bound[1]) == form(bound[0])
    seen.at_least(agreed=50, refused=20)


NAMES = ["layers.{}.self_attn", "layers.{}.cross_attn", "layers.{}.attn.0", "layers.{}.attn.1", "layers.x", "{}.mlp.3"]


def test_extract_layer_index() -> None:
    seen = Compared()
    names = *(name.format(n) for name in NAMES for n in (0, 7, 12)), "a.1.attn.2.3", "attn", ""
    for name, modules in itertools.product(names, (1, 2, 3)):
        seen.same(theirs_extract, kv_binding.extract_layer_index, name, modules)
    seen.at_least(agreed=20, refused=5)


def test_bind_kv_cache() -> None:
    seen = Compared()
    for seed, draw in enumerate(draws(400)):
        pool = NAMES[:2] if seed % 2 else NAMES
        names = list({draw.choice(pool).format(draw.randrange(4)): None for _ in range(draw.randint(1, 5))})
        caches = {name: torch.zeros(2, 1, 2, 2) for name in names}
        views = {name: cache.flatten() for name, cache in caches.items()} if draw.random() < 0.3 else None
        known = names if draw.random() < 0.9 else names[:-1]
        other, mine = ({name: FakeAttention() for name in known} for _ in range(2))
        filled = [torch.zeros(1)] if draw.random() < 0.05 else []
        runner, ours = [*filled], [*filled]
        pair = seen.both(
            lambda n, o=other, r=runner, c=caches, v=views: theirs.bind_kv_cache(c, o, r, n, layer_kv_caches=v),
            lambda n, m=mine, r=ours, c=caches, v=views: kv_binding.bind_kv_cache(c, m, r, n, layer_kv_caches=v),
            draw.choice([1, 2]),
        )
        if pair is None:
            assert len(ours) == len(filled) and all(layer.kv_cache is None for layer in mine.values())
            continue
        assert [cache.data_ptr() for cache in ours] == [cache.data_ptr() for cache in runner]
        assert all(layer.kv_cache is other[name].kv_cache for name, layer in mine.items())
    seen.at_least(agreed=150, refused=50)


def test_add_kv_sharing_layers_to_kv_cache_groups() -> None:
    seen = Compared()
    for draw in draws(300):
        groups = random_groups(draw)
        names = [name for group in groups for name in group.layer_names]
        shared = {f"s.{n}": draw.choice(names if draw.random() < 0.9 else ["none"]) for n in range(draw.randint(0, 3))}
        other, mine = copy.deepcopy(groups), copy.deepcopy(groups)
        alone: list[set[str] | None] = [None, None] if draw.random() < 0.5 else [{"x"}, {"x"}]
        pair = seen.both(
            lambda s, g=other, a=alone[0]: theirs.add_kv_sharing_layers_to_kv_cache_groups(s, g, a),
            lambda s, g=mine, a=alone[1]: kv_binding.add_kv_sharing_layers_to_kv_cache_groups(s, g, a),
            shared,
        )
        assert (mine == groups) if pair is None else (mine == other and alone[0] == alone[1])
    seen.at_least(refused=10)


# --- attention groups ---------------------------------------------------------------------------------------------


def test_select_common_block_size() -> None:
    seen = Compared()
    for draw in draws(2000):
        backends = [random_backend(draw) for _ in range(draw.randint(1, 3))]
        manager = draw.choice([8, 16, 32, 48, 64, 96])
        specs = [random_spec(draw, manager) for _ in backends] if draw.random() < 0.5 else None
        seen.same(theirs.select_common_block_size, attention_group.select_common_block_size, manager, backends, specs)
    seen.at_least(agreed=500, refused=300)
    ours, other = (fake_backend(kind(8), 12) for kind in (kv_spec.MultipleOf, MultipleOf))
    for manager in (8, 12, 16, 24, 48):
        assert attention_group.select_common_block_size(manager, [ours]) == theirs.select_common_block_size(
            manager, [other]
        )


def test_prepare_kernel_block_sizes() -> None:
    seen = Compared()
    for draw, _, config in placed(range(120)):
        names = iter("xyz")
        for extra in draw.sample([
            kvi.EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.int8),
            kvi.MambaSpec(block_size=64, shapes=((2, 3),), dtypes=(torch.float32,)),
        ], draw.randint(0, 2)):  # fmt: skip
            config.kv_cache_groups.insert(0, kvi.KVCacheGroupSpec([next(names)], extra))
        made: list[list[list[Any]]] = [[], []]
        for number, group in enumerate(config.kv_cache_groups):
            backends = [random_backend(draw) for _ in range(draw.randint(1, 2))]
            for groups, kind in zip(made, (theirs.AttentionGroup, attention_group.AttentionGroup), strict=True):
                groups.append([kind(backend, group.layer_names, group.kv_cache_spec, number) for backend in backends])
        seen.same(
            lambda c, m: theirs.prepare_kernel_block_sizes(c, m[0]),
            lambda c, m: attention_group.prepare_kernel_block_sizes(c, m[1]),
            config,
            made,
        )
    seen.at_least(agreed=150, refused=20)


def test_get_kv_cache_spec() -> None:
    for draw in draws(200):
        layers: dict[str, Any] = {"x": object()}
        for number in range(5):
            spec = random_spec(draw, draw.choice([16, 48])) if draw.random() < 0.8 else None
            target = draw.choice([None, None, "layers.0"])
            layers[f"layers.{number}"] = FakeAttention(spec, random_backend(draw), target)
        config = vllm_config(layers=layers)
        wanted, got = attn_utils.get_kv_cache_spec(config), attention_group.get_kv_cache_spec(config)
        assert list(got) == list(wanted)
        for name, spec in got.items():
            assert spec.get_block_stride_alignment() == wanted[name].get_block_stride_alignment()
            same = {"block_stride_alignment": None}
            assert {**vars(spec), **same} == {**vars(wanted[name]), **same} and type(spec) is type(wanted[name])


def test_get_current_attn_backend() -> None:
    for draw in draws(100):
        layers: dict[str, Any] = {f"layers.{n}": FakeAttention(None, random_backend(draw)) for n in range(5)}
        config = vllm_config(layers=layers | {"x": object()})
        names = draw.choice([None, draw.sample(list(layers), 2)])
        for name in ("get_current_attn_backends", "get_current_attn_backend"):
            assert getattr(attention_group, name)(config, names) == getattr(transfer, name)(config, names)
        assert attention_group.get_current_attn_backend(layers) is transfer.get_current_attn_backend(config)


def test_AttentionGroup() -> None:
    """Packed compressed caches as kernel blocks and back, and block tables."""
    seen = Compared()
    for draw in draws(300):
        per_state, heads = draw.choice([1, 4, 4]), draw.choice([1, 1, 2])
        spec = kvi.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=4, dtype=draw.choice(DTYPES), tokens_per_state=per_state
        )
        states = spec.num_states
        cache = torch.zeros(BLOCKS, draw.randint(1, 4), heads, states + draw.choice([0, 0, 1]), 8)[:, 0, :, :states]
        kernel = draw.choice([None, 16, 32, 64])
        given = fake_backend(16), ["layers.0"], spec, 0, kernel
        other, mine = theirs.AttentionGroup(*given), attention_group.AttentionGroup(*given)
        if kernel and (
            pair := seen.both(other.map_kv_cache_to_kernel_blocks, mine.map_kv_cache_to_kernel_blocks, cache)
        ):
            assert form({"a": pair[0]}) == form({"a": pair[1]})
            assert other.kernel_block_stride == mine.kernel_block_stride
            if mine.kernel_block_stride:
                back = [group.map_kv_cache_to_manager_blocks(pair[0], BLOCKS) for group in (other, mine)]
                assert form({"a": back[0]}) == form({"a": back[1]}) == form({"a": cache})
        table = torch.randint(0, BLOCKS, (3, 4), dtype=torch.int32)
        if kernel:
            other.kernel_block_table = torch.zeros(1, 3, 4 * (64 // kernel), dtype=torch.int32)
            other.kernel_block_offsets = torch.arange(64 // kernel, dtype=torch.int32)
        assert torch.equal(mine.map_to_kernel_block_table(table), other.map_to_kernel_block_table(table))
    seen.at_least(agreed=50, refused=30)


@pytest.mark.parametrize("asked", [None, "LBHNC", "LBNHC"])
def test_get_kv_connector_cache_layout(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = type("Asks", (), {"get_required_kvcache_layout": classmethod(lambda cls, config: config.asked)})
    monkeypatch.setattr(transfer.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: connector))
    for transfers in (object(), None):
        config = SimpleNamespace(kv_transfer_config=transfers, asked=asked)
        ours = attention_group.get_kv_connector_cache_layout(connector if transfers else None, config)
        assert ours == transfer.get_kv_connector_cache_layout(config) == (asked if transfers else None)


# --- blocks -------------------------------------------------------------------------------------------------------


def test_KVBlockZeroer() -> None:
    """The same segments; where vLLM's asserts multiples of 4 bytes, ours takes any number."""
    agreed = 0
    for draw, layout, config in placed(range(120)):
        kernel = [draw.choice([16, g.kv_cache_spec.block_size]) for g in config.kv_cache_groups]
        try:
            caches = theirs.allocate_kv_cache(config, CPU, layout, kernel)
        except (AssertionError, ValueError, RuntimeError):
            continue
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        layers = {name: SimpleNamespace(kv_cache=caches[name]) for name in names}
        for layer in layers.values():
            if layer.kv_cache.shape[1] == 1 and draw.random() < 0.5:
                layer.kv_cache = layer.kv_cache.squeeze(1)
        alone = set(draw.sample(names, draw.choice([0, 0, 1])))
        made: list[list[Any]] = [[], []]
        for number, group in enumerate(config.kv_cache_groups):
            specs = getattr(
                group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(group.layer_names, group.kv_cache_spec)
            )
            for groups, kind in zip(made, (theirs.AttentionGroup, attention_group.AttentionGroup), strict=True):
                groups += [kind(None, [name], spec, number) for name, spec in specs.items()]
        kernel = kernel[: draw.choice([1, 9])]
        mine = KVBlockZeroer(CPU, made[1], kernel, layers, BLOCKS, alone).segments
        other = theirs.KVBlockZeroer(CPU, made[0], kernel, layers, BLOCKS, alone)._meta
        agreed += 1
        got = sorted(zip(mine.addresses.tolist(), mine.strides.tolist(), mine.sizes.tolist(), strict=True))
        wanted = [] if other is None else [each.tolist() for each in other[:3]]
        assert got == sorted((a, 4 * s, 4 * n) for a, s, n in zip(*wanted, strict=True))
    assert agreed > 100
    spec = kvi.FullAttentionSpec(block_size=3, num_kv_heads=1, head_size=5, head_size_v=6, dtype=torch.int8)
    layers = {"layers.0": SimpleNamespace(kv_cache=torch.ones(BLOCKS, 1, 3, 11, dtype=torch.int8))}
    with pytest.raises(AssertionError):
        theirs.KVBlockZeroer(CPU, [theirs.AttentionGroup(None, ["layers.0"], spec, 0)], [3], layers, BLOCKS)
    group = attention_group.AttentionGroup(None, ["layers.0"], spec, 0)
    KVBlockZeroer(CPU, [group], [3], layers, BLOCKS).zero_block_ids([1])
    assert layers["layers.0"].kv_cache.flatten(1).sum(1).tolist() == [33, 0, 33, 33, 33]


def platform_copies() -> Any:
    """The block copies of the installed vLLM's GPU platforms, whose module cannot be imported without their driver."""
    path = Path(vllm.__file__).parent / "platforms" / "cuda.py"
    tree = ast.parse(path.read_text())
    wanted = ("insert_blocks_to_device", "swap_out_blocks_to_host")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert sorted({node.name for node in found}) == sorted(wanted)
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([*found], []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: (lambda *a, f=scope[name]: f(None, *a)) for name in wanted})


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy_kv_blocks(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "current_platform", platform_copies())
    for draw in draws(60):
        dtype, shape = draw.choice([torch.bfloat16, torch.float32, torch.int8]), (7, 2, 4, 3)
        source = {name: torch.randint(-99, 99, shape).to(dtype) for name in "ab"}
        if draw.random() < 0.5:
            source = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in source.items()}
        other, mine = ({name: torch.full(shape, 5).to(dtype) for name in "abc"} for _ in range(2))
        count = draw.randint(0, 4)
        blocks = draw.sample(range(7), count), draw.sample(range(7), count)
        transfer.copy_kv_blocks(source, other, *blocks, direction)
        copy_kv_blocks(source, mine, *blocks, direction)
        assert all(torch.equal(mine[name], other[name]) for name in "abc")
        assert count == 0 or not torch.equal(mine["a"], torch.full(shape, 5).to(dtype))


def test__make_src_and_dst_indices() -> None:
    for draw in draws(100):
        sources, targets = ([draw.randrange(1 << 40) for _ in range(draw.randint(0, 5))] for _ in range(2))
        device: Any = draw.choice(["cpu", CPU])
        wanted = transfer._make_src_and_dst_indices(sources, targets, "cpu", device)
        got = _make_src_and_dst_indices(sources, targets, "cpu", device)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.device == other.device


# --- steps --------------------------------------------------------------------------------------------------------


def test_yield_req_data() -> None:
    whole = "is_full_table" in (transfer.yield_req_data.__doc__ or "")
    assert whole == hasattr(transfer.KVOutputAggregator, "ft_defer_kv_connector_outputs"), "both came with 0.33"
    for draw in draws(50):
        ids = [f"r{n}" for n in range(draw.randint(0, 4))]
        blocks: list[Any] = [draw.choice([None, ([draw.randrange(9)], [])]) for _ in ids]
        new = [NewRequestData(f"n{n}", [1], [], None, None, ([n], [2]), 0, None) for n in range(draw.randint(0, 2))]
        cached = CachedRequestData(ids, set(ids[::2]), [], {}, blocks, [0] * len(ids), [0] * len(ids))
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        mine, theirs = list(yield_req_data(output)), list(transfer.yield_req_data(output))
        if not whole:  # before 0.33 the third value said nothing of new requests
            theirs = [(name, ids, is_all or name.startswith("n")) for name, ids, is_all in theirs]
        assert mine == theirs
    cached = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[None], resumed_req_ids=set())
    with pytest.raises(ProtocolError, match="2 running requests with 1 lists of blocks"):
        list(yield_req_data(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)))
