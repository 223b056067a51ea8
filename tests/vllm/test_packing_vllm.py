"""Keys and values that vLLM's own writer packs, carried to blocks of another size, against what it writes there.

Every dtype of model and cache, with the instruction set that vLLM takes on this machine, and with plain vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("packing inside blocks is vLLM's CPU attention's", allow_module_level=True)

from vllm._custom_ops import cpu_attn_reshape_and_cache  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa  # noqa: E402

from kvferry.connector.geometry.byte_ranges import byte_ranges  # noqa: E402
from kvferry.connector.geometry.packing import PackedPart, split_packed  # noqa: E402
from kvferry.connector.geometry.rank_geometry import RankGeometry  # noqa: E402
from kvferry.connector.geometry.token_sharding import TokenBlocks  # noqa: E402
from kvferry.connector.geometry.view import view_of  # noqa: E402
from kvferry.connector.pages.caches import PageBox, RankCaches  # noqa: E402
from kvferry.connector.pages.copies import Copies  # noqa: E402
from kvferry.connector.vllm import from_vllm  # noqa: E402
from tests.support.cases import each_once  # noqa: E402

LAYERS, BLOCKS, UNTOUCHED = ("a", "b"), 7, 0xAB
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = [*((dtype, "auto") for dtype in DTYPES), ("bf16", "fp8_e4m3"), ("bf16", "fp8_e5m2"), ("fp16", "fp8")]
SIZES = [(32, 64), (64, 32), (96, 128), (128, 32), (64, 96)]
HEADS = [(32, 1), (64, 70), (80, 150), (128, 64), (256, 33)]
"""Sizes of heads, and tokens."""
Box = tuple[RankCaches, PageBox]


class Side:
    """The caches of one rank, [B, H, N, 2 * D] per layer, with these of the model's heads, and the parts found in them.

    ``isa`` None: what vLLM takes on this machine.
    """

    def __init__(self, form: tuple[str, str], isa: str | None, head_size: int, block_size: int, heads: Sequence[int]):
        self.dtype, self.cache_dtype = DTYPES[form[0]], form[1]
        try:
            best = _get_attn_isa(self.dtype, block_size, head_size, self.cache_dtype)
        except NotImplementedError as reason:  # fp8 on a processor without AVX-512, whatever the instruction set
            pytest.skip(str(reason))
        self.isa = isa or best
        self.head_size, self.block_size, self.heads = head_size, block_size, list(heads)
        shape = (BLOCKS, len(self.heads), block_size, 2 * head_size)
        stored = self.dtype if self.cache_dtype == "auto" else torch.uint8
        self.caches = {name: torch.empty(shape, dtype=stored) for name in LAYERS}
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(UNTOUCHED)
        self.whole, *self.parts = split_packed(view_of(self.caches, block_size), self.places())

    def places(self) -> np.ndarray:
        """As the adapter asks for them, of an attention layer of this engine."""
        impl = object.__new__(CPUAttentionBackendImpl)
        impl.kv_cache_dtype = self.cache_dtype
        attention = SimpleNamespace(kv_cache=self.caches["a"], isa=self.isa, impl=impl)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=self.dtype),
            compilation_config=SimpleNamespace(static_forward_context={"a": attention}),
        )
        places = from_vllm.element_order(config, "a")
        assert places is not None
        return places

    def table(self, tokens: int) -> list[int]:
        return [5, 0, 3, 6, 1, 2, 4][: -(-tokens // self.block_size)]

    def write(self, start: int, stop: int) -> None:
        """Tokens [start, stop) by vLLM's writer; values depend on layer, head, token and channel alone."""
        token, table = torch.arange(start, stop), torch.tensor(self.table(stop))
        slots = table[token // self.block_size] * self.block_size + token % self.block_size
        for number, cache in enumerate(self.caches.values()):
            keys, values = labels(number, self.head_size)[:, start:stop, self.heads].to(self.dtype)
            blocks = cache.view(BLOCKS, len(self.heads), 2 * self.block_size, self.head_size).chunk(2, dim=2)
            cpu_attn_reshape_and_cache(keys, values, *blocks, slots, self.isa, 1.0, 1.0, self.cache_dtype)

    def box(self, part: PackedPart, heads: Sequence[int], tokens: int) -> Box:
        """Some of the heads of a part, in whole tiles."""
        count = -(-tokens // part.tile_tokens) * part.tile_tokens
        geometry = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(4,), regions=())
        ids = np.array(self.table(tokens), dtype=np.int64)
        table = TokenBlocks(ids, part.view.block_size, part.view.block_stride, 0)
        where = PageBox(0, 0, len(LAYERS), self.heads.index(heads[0]), len(heads), 0, count, table)
        return RankCaches(geometry, (part.view,), Copies()), where

    def bytes(self) -> torch.Tensor:
        return torch.stack(list(self.caches.values())).view(torch.uint8)


@lru_cache
def labels(layer: int, head_size: int) -> torch.Tensor:
    """[2, T, H, D] of keys and values."""
    values = np.random.default_rng(layer).standard_normal((2, 300, 4, head_size), dtype=np.float32)
    return torch.from_numpy(values)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of small writes: threads that wait for each other on a busy machine take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def over_the_wire(of: Box, to: Box) -> None:
    wire = np.empty(of[0].nbytes(of[1]), dtype=np.uint8)
    of[0].pack(wire.ctypes.data, of[1])
    to[0].unpack(wire.ctypes.data, to[1])


def page_to_page(of: Box, to: Box) -> None:
    """As D reads P's pages where it can map them."""
    found = byte_ranges(
        to[0].pages(to[1]), of[0].pages(of[1]), to[1].num_heads, to[1].num_tokens, to[0].views[0].row_bytes
    )
    for target, source, nbytes in zip(*(column.tolist() for column in found), strict=True):
        ctypes.memmove(target, source, nbytes)


def differ(p: Side, d: Side, tokens: int, move: Callable[[Box, Box], None] = over_the_wire) -> int:
    """Bytes of D's caches, all of them, that are not what vLLM's writer makes of the same tokens there."""
    p.write(0, tokens)
    for of, to in zip(p.parts, d.parts, strict=True):
        assert (of.packing, of.tile_tokens, of.view.rows) == (to.packing, to.tile_tokens, to.view.rows)
        move(p.box(of, d.heads, tokens), d.box(to, d.heads, tokens))
    form = next(name for name, dtype in DTYPES.items() if dtype is d.dtype), d.cache_dtype
    wanted = Side(form, d.isa, d.head_size, d.block_size, d.heads)
    wanted.write(0, tokens)
    end = len(d.table(tokens)) * d.block_size
    for side in (d, wanted) if tokens < end else ():  # what follows is D's to write, whatever came with the last tile
        side.write(tokens, end)
    return int((d.bytes() != wanted.bytes()).sum())


@each_once("form isa sizes head", FORMS * 3, (None, "vec"), SIZES, HEADS)
def test_another_block_size_has_what_the_writer_writes_there(form, isa, sizes, head) -> None:
    head_size, tokens = (96, 150) if head[0] % 32 and form[1] != "auto" else head  # vLLM refuses others of fp8
    for move in (over_the_wire, page_to_page):
        p, d = (Side(form, isa, head_size, size, heads) for size, heads in zip(sizes, [range(4), (1, 2)], strict=True))
        assert differ(p, d, tokens, move) == 0, (p.isa, move)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_parts_are_called_alike_whatever_the_block_size(form) -> None:
    """And no part is a whole block: the cases above would pass with nothing divided, for equal sizes."""
    for isa in (None, "vec"):
        found = [Side(form, isa, 64, size, (0,)).parts for size in (32, 64, 96, 128)]
        names = {
            tuple((part.part, part.packing, part.tile_tokens, part.view.rows) for part in parts) for parts in found
        }
        assert len(names) == 1
        assert [(part.part, part.tile_tokens < 32) for part in found[0]] == [("k", True), ("v", True)]


def test_instruction_sets_that_pack_otherwise_are_told_apart() -> None:
    best, plain = (Side(("bf16", "auto"), isa, 64, 32, (0,)) for isa in (None, "vec"))
    if best.isa != "amx":
        pytest.skip(f"vLLM takes {best.isa} here")
    assert best.whole.packing != plain.whole.packing
    for mine, other in zip(best.parts, plain.parts, strict=True):
        assert mine.packing != other.packing and mine.tile_tokens != other.tile_tokens


def test_another_backend_has_no_order_that_we_know() -> None:
    layer = SimpleNamespace(kv_cache=torch.zeros(1, 1, 32, 64), isa="vec", impl=object())
    for context in ({"a": layer}, {"a": SimpleNamespace()}, {}):
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        assert from_vllm.element_order(config, "a") is None


@pytest.mark.parametrize(("layer", "packing"), [("DeepseekV32IndexerCache", "indexer"), ("MLAAttention", "")])
def test_an_indexer_on_a_gpu_packs_its_blocks(layer: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    spec = SimpleNamespace(block_size=64, head_size=132)
    assert from_vllm.packing_name(SimpleNamespace(), spec, [type(layer, (), {})()]) == packing
