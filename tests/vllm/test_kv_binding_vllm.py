"""Our KV-binding utilities and the installed vLLM's on the same random inputs: the same caches, the same refusals."""

from __future__ import annotations

import ast
import copy
import random
import re
import runpy
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
from vllm.distributed.kv_transfer.kv_connector import utils as transfer  # noqa: E402
from vllm.model_executor.models.utils import extract_layer_index as theirs_extract  # noqa: E402
from vllm.v1.worker import utils as theirs  # noqa: E402
from vllm.v1.worker.gpu import attn_utils  # noqa: E402

from kvferry.connector.binding import attention_group, kv_binding, kv_spec  # noqa: E402
from kvferry.connector.binding.block_ops import KVBlockZeroer, copy_kv_blocks  # noqa: E402
from kvferry.transport.errors import GeometryError  # noqa: E402
from tests.vllm.fake_layers import (  # noqa: E402
    BLOCKS,
    LAYOUTS,
    FakeAttention,
    both,
    form,
    place,
    placed,
    random_groups,
    vllm_config,
)

CPU = torch.device("cpu")
TABLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "binding_table.py"))
HELD, OWN, UTILITIES = TABLE["HELD"], TABLE["OWN"], TABLE["UTILITIES"]


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
            return kv_binding.reshape(config, kv_binding.allocate(config, CPU), layout, kernel)

        pair = both(lambda c=config, a=layout, k=kernel: theirs.allocate_kv_cache(c, CPU, a, k), ours)
        if pair is None:
            refused += 1
            continue
        wanted, got = pair
        assert list(got) == list(wanted) and form(got) == form(wanted)
        assert form(kv_binding.reshape(config, kv_binding.allocate(config, CPU), layout.stride_order, kernel)) == form(
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


def test_KVBlockZeroer() -> None:
    """The same segments; where vLLM's asserts multiples of 4 bytes, ours takes any number."""
    agreed = 0
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
        other = theirs.KVBlockZeroer(CPU, made[0], kernel, layers, BLOCKS, alone)._meta
        agreed += 1
        got = sorted(zip(mine.addresses.tolist(), mine.strides.tolist(), mine.sizes.tolist(), strict=True))
        wanted = [] if other is None else [each.tolist() for each in other[:3]]
        assert got == sorted((a, 4 * s, 4 * n) for a, s, n in zip(*wanted, strict=True))
    assert agreed > 150
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
