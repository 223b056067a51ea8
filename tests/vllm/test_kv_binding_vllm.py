"""Our KV-binding utilities and the installed vLLM's on the same random inputs: the same caches, the same refusals."""

from __future__ import annotations

import ast
import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm
kvi = pytest.importorskip("vllm.v1.kv_cache_interface")
if not hasattr(kvi, "KVCacheLayout"):
    pytest.skip("this vLLM has no KVCacheLayout", allow_module_level=True)

import vllm  # noqa: E402
from fake_layers import (  # noqa: E402
    DTYPES,
    LAYOUTS,
    FakeAttention,
    both,
    fake_backend,
    form,
    random_backend,
    random_groups,
    random_spec,
    vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector import utils as transfer  # noqa: E402
from vllm.model_executor.models.utils import extract_layer_index as theirs_extract  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups as theirs_place  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData  # noqa: E402
from vllm.v1.worker import utils as theirs  # noqa: E402
from vllm.v1.worker.gpu import attn_utils  # noqa: E402

from kvferry.connector import attention_group, block_sizes, kv_binding, kv_spec  # noqa: E402
from kvferry.connector.binding_table import HELD, UTILITIES  # noqa: E402
from kvferry.connector.block_zeroer import KVBlockZeroer  # noqa: E402
from kvferry.connector.errors import GeometryError  # noqa: E402
from kvferry.connector.host_copy import copy_kv_blocks  # noqa: E402
from kvferry.connector.request_data import yield_req_data  # noqa: E402

CPU = torch.device("cpu")
BLOCKS = 5


def place(groups: list[Any], layout: Any) -> Any:
    return theirs_place(vllm_config(layout, num_blocks=BLOCKS), groups, available_memory=1 << 30)


def placed(seeds: range) -> list[tuple[random.Random, Any, Any]]:
    """Random groups that vLLM can place, in every layout that it can place them in."""
    found = []
    for seed in seeds:
        groups = random_groups(random.Random(seed))
        for layout in LAYOUTS:
            try:
                found.append((random.Random(seed), layout, place(copy.deepcopy(groups), layout)))
            except (AssertionError, ValueError):
                continue
    return found


def test_the_version_is_the_one_in_the_table() -> None:
    assert vllm.__version__.startswith(HELD)
    compared = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for utility in UTILITIES:
        if utility.held == HELD:
            assert any(name.startswith(utility.name) or f"_and_{utility.name}" in name for name in compared), (
                utility.name
            )


def test_get_kv_cache_config_from_groups() -> None:
    agreed = refused = 0
    for seed in range(300):
        groups = random_groups(random.Random(seed))
        for layout in LAYOUTS:
            pair = both(
                lambda g=groups, a=layout: place(g, a),
                lambda g=groups, a=layout: kv_spec.get_kv_cache_config_from_groups(g, BLOCKS, a),
            )
            if pair is None:
                refused += 1
                continue
            agreed += 1
            names = ("size", "layers", "layer_stride", "block_stride", "offset")
            wanted, got = ([[getattr(t, n) for n in names] for t in config.kv_cache_tensors] for config in pair)
            assert got == wanted and pair[0].num_blocks == pair[1].num_blocks == BLOCKS
    assert agreed > 500 and refused > 200


def test_allocate_and_reshape() -> None:
    """Every layout, whole and split blocks; the layouts that a placement does not belong to are left to unit tests."""
    seen: set[tuple[str, bool]] = set()
    refused = 0
    for draw, layout, config in placed(range(250)):
        kernel = draw.choice(
            [None, None, [draw.choice([8, 16, g.kv_cache_spec.block_size]) for g in config.kv_cache_groups]]
        )

        def ours(config: Any = config, layout: Any = layout, kernel: Any = kernel) -> Any:
            return kv_binding.reshape(kv_binding.allocate(config, CPU), config, layout, kernel)

        pair = both(lambda c=config, a=layout, k=kernel: theirs.allocate_kv_cache(c, CPU, a, k), ours)
        if pair is None:
            refused += 1
            continue
        wanted, got = pair
        assert list(got) == list(wanted) and form(got) == form(wanted)
        assert form(kv_binding.reshape(kv_binding.allocate(config, CPU), config, layout.stride_order, kernel)) == form(
            got
        )
        split = any(cache.shape[0] > BLOCKS for cache in got.values())
        seen.add((layout.name, split))
    assert {name for name, _ in seen} == {layout.name for layout in LAYOUTS} and refused > 50
    assert {name for name, split in seen if split} >= {"LBHNC", "LBNHC"}


def test_init_kv_cache() -> None:
    """Layers that share, layers elsewhere, and a target that has no cache."""
    agreed = refused = 0
    for draw, layout, config in placed(range(60)):
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        shared = {
            f"model.layers.{90 + n}.self_attn.attn": draw.choice([*names, "model.layers.77.attn"]) for n in range(2)
        }
        here = draw.sample(names, draw.randint(1, len(names)))

        def layers(here: list[str] = here, shared: dict[str, str] = shared) -> dict[str, FakeAttention]:
            return {n: FakeAttention() for n in here} | {n: FakeAttention(target=t) for n, t in shared.items()}

        mine, other = layers(), layers()
        kernel = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        pair = both(
            lambda o=other, c=config, k=kernel, a=layout: attn_utils.init_kv_cache(o, c, CPU, k, vllm_config(a, o)),
            lambda m=mine, c=config, k=kernel, a=layout: kv_binding.init_kv_cache(m, c, CPU, k, a),
        )
        if pair is None:
            refused += 1
            continue
        agreed += 1
        assert list(pair[1]) == list(pair[0]) and form(pair[1]) == form(pair[0])
        bound = [{name: layer.kv_cache for name, layer in each.items()} for each in (other, mine)]
        assert form(bound[1]) == form(bound[0])
    assert agreed > 50 and refused > 20


NAMES = ["layers.{}.self_attn", "layers.{}.cross_attn", "layers.{}.attn.0", "layers.{}.attn.1", "layers.x", "{}.mlp.3"]


def test_extract_layer_index() -> None:
    for name in (*(name.format(n) for name in NAMES for n in (0, 7, 12)), "a.1.attn.2.3", "attn", ""):
        for modules in (1, 2, 3):
            pair = both(lambda: theirs_extract(name, modules), lambda: kv_binding.extract_layer_index(name, modules))  # noqa: B023
            assert pair is None or pair[0] == pair[1]


def test_bind_kv_cache() -> None:
    agreed = refused = 0
    for seed in range(400):
        draw = random.Random(seed)
        pool = NAMES[:2] if seed % 2 else NAMES
        names = list({draw.choice(pool).format(draw.randrange(4)): None for _ in range(draw.randint(1, 5))})
        caches = {name: torch.zeros(2, 1, 2, 2) for name in names}
        views = {name: cache.flatten() for name, cache in caches.items()} if draw.random() < 0.3 else None
        known = names if draw.random() < 0.9 else names[:-1]
        other, mine = ({name: FakeAttention() for name in known} for _ in range(2))
        filled = [torch.zeros(1)] if draw.random() < 0.05 else []
        runner, ours = [*filled], [*filled]
        modules = draw.choice([1, 2])
        pair = both(
            lambda: theirs.bind_kv_cache(caches, other, runner, modules, layer_kv_caches=views),  # noqa: B023
            lambda: kv_binding.bind_kv_cache(caches, mine, ours, modules, layer_kv_caches=views),  # noqa: B023
        )
        if pair is None:
            refused += 1
            assert len(ours) == len(filled) and all(layer.kv_cache is None for layer in mine.values())
            continue
        agreed += 1
        assert [cache.data_ptr() for cache in ours] == [cache.data_ptr() for cache in runner]
        for name, layer in mine.items():
            assert layer.kv_cache is other[name].kv_cache
    assert agreed > 150 and refused > 50


def test_add_kv_sharing_layers_to_kv_cache_groups() -> None:
    refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        groups = random_groups(draw)
        names = [name for group in groups for name in group.layer_names]
        shared = {f"s.{n}": draw.choice(names if draw.random() < 0.9 else ["none"]) for n in range(draw.randint(0, 3))}
        other, mine = copy.deepcopy(groups), copy.deepcopy(groups)
        alone: list[set[str] | None] = [None, None] if draw.random() < 0.5 else [{"x"}, {"x"}]
        pair = both(
            lambda: theirs.add_kv_sharing_layers_to_kv_cache_groups(shared, other, alone[0]),  # noqa: B023
            lambda: kv_binding.add_kv_sharing_layers_to_kv_cache_groups(shared, mine, alone[1]),  # noqa: B023
        )
        if pair is None:
            refused += 1
            assert mine == groups
        else:
            assert mine == other and alone[0] == alone[1]
    assert refused > 10


def test_select_common_block_size() -> None:
    agreed = refused = 0
    for seed in range(2000):
        draw = random.Random(seed)
        backends = [random_backend(draw) for _ in range(draw.randint(1, 3))]
        manager = draw.choice([8, 16, 32, 48, 64, 96])
        specs = [random_spec(draw, manager) for _ in backends] if draw.random() < 0.5 else None
        pair = both(
            lambda: theirs.select_common_block_size(manager, backends, specs),  # noqa: B023
            lambda: block_sizes.select_common_block_size(manager, backends, specs),  # noqa: B023
        )
        if pair is None:
            refused += 1
        else:
            agreed += 1
            assert pair[0] == pair[1]
    assert agreed > 500 and refused > 300


def test_prepare_kernel_block_sizes() -> None:
    agreed = refused = 0
    for draw, _, config in placed(range(150)):
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
        pair = both(
            lambda c=config, m=made: theirs.prepare_kernel_block_sizes(c, m[0]),
            lambda c=config, m=made: block_sizes.prepare_kernel_block_sizes(c, m[1]),
        )
        if pair is None:
            refused += 1
        else:
            agreed += 1
            assert pair[0] == pair[1]
    assert agreed > 200 and refused > 30


def test_get_kv_cache_spec() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        layers: dict[str, Any] = {"x": object()}
        for number in range(5):
            spec = random_spec(draw, draw.choice([16, 48])) if draw.random() < 0.8 else None
            layers[f"layers.{number}"] = FakeAttention(
                spec, random_backend(draw), draw.choice([None, None, "layers.0"])
            )
        config = vllm_config(layers=layers)
        wanted, got = attn_utils.get_kv_cache_spec(config), attention_group.get_kv_cache_spec(config)
        assert list(got) == list(wanted)
        for name, spec in got.items():
            assert spec.get_block_stride_alignment() == wanted[name].get_block_stride_alignment()
            same = {"block_stride_alignment": None}
            assert (
                copy.replace(spec, **same) == copy.replace(wanted[name], **same) if hasattr(copy, "replace") else True
            )
            assert {**vars(spec), **same} == {**vars(wanted[name]), **same} and type(spec) is type(wanted[name])


def test_get_current_attn_backend() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        layers: dict[str, Any] = {f"layers.{n}": FakeAttention(None, random_backend(draw)) for n in range(5)}
        config = vllm_config(layers=layers | {"x": object()})
        names = draw.choice([None, draw.sample(list(layers), 2)])
        assert attention_group.get_current_attn_backends(config, names) == transfer.get_current_attn_backends(
            config, names
        )
        assert attention_group.get_current_attn_backend(config, names) is transfer.get_current_attn_backend(
            config, names
        )
        assert attention_group.get_current_attn_backend(layers) is transfer.get_current_attn_backend(config)


def test_AttentionGroup() -> None:
    """Packed compressed caches as kernel blocks and back, and block tables."""
    agreed = refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        per_state, heads = draw.choice([1, 4, 4]), draw.choice([1, 1, 2])
        spec = kvi.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=4, dtype=draw.choice(DTYPES), tokens_per_state=per_state
        )
        states, content = spec.num_states, 8
        cache = torch.zeros(BLOCKS, draw.randint(1, 4), heads, states + draw.choice([0, 0, 1]), content)[
            :, 0, :, :states
        ]
        kernel = draw.choice([None, 16, 32, 64])
        other, mine = (
            kind(fake_backend(16), ["layers.0"], spec, 0, kernel)
            for kind in (theirs.AttentionGroup, attention_group.AttentionGroup)
        )
        pair = both(
            lambda: other.map_kv_cache_to_kernel_blocks(cache),  # noqa: B023
            lambda: mine.map_kv_cache_to_kernel_blocks(cache),  # noqa: B023
        ) if kernel else None  # fmt: skip
        refused += pair is None and kernel is not None
        if pair is not None:
            agreed += 1
            assert (
                form({"a": pair[0]}) == form({"a": pair[1]}) and other.kernel_block_stride == mine.kernel_block_stride
            )
            if mine.kernel_block_stride:
                back = [group.map_kv_cache_to_manager_blocks(pair[0], BLOCKS) for group in (other, mine)]
                assert form({"a": back[0]}) == form({"a": back[1]}) == form({"a": cache})
        table = torch.randint(0, BLOCKS, (3, 4), dtype=torch.int32)
        if kernel:
            other.kernel_block_table = torch.zeros(1, 3, 4 * (64 // kernel), dtype=torch.int32)
            other.kernel_block_offsets = torch.arange(64 // kernel, dtype=torch.int32)
        assert torch.equal(mine.map_to_kernel_block_table(table), other.map_to_kernel_block_table(table))
    assert agreed > 50 and refused > 30


def test_KVBlockZeroer() -> None:
    """The same segments. vLLM's asserts multiples of 4 bytes and one stride per address; ours takes any."""
    agreed = asserted = 0
    for draw, layout, config in placed(range(200)):
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
        try:
            other = theirs.KVBlockZeroer(CPU, made[0], kernel, layers, BLOCKS, alone)._meta
        except AssertionError:
            asserted += 1
            continue
        agreed += 1
        got = sorted(zip(mine.addresses.tolist(), mine.strides.tolist(), mine.sizes.tolist(), strict=True))
        wanted = [] if other is None else [each.tolist() for each in other[:3]]
        assert got == sorted((a, 4 * s, 4 * n) for a, s, n in zip(*wanted, strict=True))
    assert agreed > 150 and asserted > 20


def platform_copies() -> Any:
    """The block copies of the installed vLLM's GPU platforms, whose module cannot be imported without their driver."""
    path = Path(vllm.__file__).parent / "platforms" / "cuda.py"
    tree = ast.parse(path.read_text())
    wanted = ("insert_blocks_to_device", "swap_out_blocks_to_host")
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert sorted({node.name for node in found}) == sorted(wanted)
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: (lambda *a, f=scope[name]: f(None, *a)) for name in wanted})


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy_kv_blocks(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "current_platform", platform_copies())
    for seed in range(60):
        draw = random.Random(seed)
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


def test_copy_kv_blocks_of_unequal_lists_is_refused_where_vllm_ignores_it() -> None:
    source, target = {"a": torch.ones(3, 2)}, {"a": torch.zeros(3, 2)}
    transfer.copy_kv_blocks(source, target, [1, 2], [0], "h2d")
    assert target["a"].count_nonzero() == 0
    with pytest.raises(GeometryError):
        copy_kv_blocks(source, target, [1, 2], [0], "h2d")


def test_yield_req_data() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        ids = [f"r{n}" for n in range(draw.randint(0, 4))]
        blocks = [draw.choice([None, ([draw.randrange(9)], [])]) for _ in ids]
        new = [NewRequestData(f"n{n}", [1], [], None, None, ([n], [2]), 0, None) for n in range(draw.randint(0, 2))]
        cached = CachedRequestData(ids, set(ids[::2]), [], {}, blocks, [0] * len(ids), [0] * len(ids))
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        assert list(yield_req_data(output)) == list(transfer.yield_req_data(output))


@pytest.mark.parametrize("asked", [None, "LBHNC", "LBNHC"])
def test_get_kv_connector_cache_layout(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = type("Asks", (), {"get_required_kvcache_layout": classmethod(lambda cls, config: config.asked)})
    monkeypatch.setattr(transfer.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: connector))
    config = SimpleNamespace(kv_transfer_config=object(), asked=asked)
    assert attention_group.get_kv_connector_cache_layout(connector, config) == asked
    assert transfer.get_kv_connector_cache_layout(config) == asked
    none = SimpleNamespace(kv_transfer_config=None)
    assert (
        attention_group.get_kv_connector_cache_layout(None, none)
        is transfer.get_kv_connector_cache_layout(none)
        is None
    )


def test_a_multiple_of_is_what_vllm_means_by_it() -> None:
    ours, other = (fake_backend(kind(8), 12) for kind in (kv_spec.MultipleOf, MultipleOf))
    for manager in (8, 12, 16, 24, 48):
        assert block_sizes.select_common_block_size(manager, [ours]) == theirs.select_common_block_size(
            manager, [other]
        )
