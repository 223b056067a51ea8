"""What ``gpu_planes.py`` moves: points, from which form of cache into which. Axes [L, B, H, N, C].

Plain data: the processes of a contender are told of it as JSON and come to the same block tables by themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Side = Literal["p", "d"]

SPARE = 2
"""A cache holds so many times the blocks that are moved."""


@dataclass(frozen=True)
class Form:
    """One side's cache; ``content`` in bytes, K and V together, ``order`` that of tokens and heads in a block."""

    layers: int = 32
    heads: int = 8
    content: int = 512
    block: int = 16
    order: Literal["NHD", "HND"] = "NHD"
    kind: Literal["full", "mla"] = "full"

    @property
    def block_bytes(self) -> int:
        """Of one layer, which lie together: the piece that moves without a change of form."""
        return self.heads * self.block * self.content

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.heads * self.content


@dataclass(frozen=True)
class Point:
    """``handovers`` prompts of ``tokens`` each, at once, from P's form into D's."""

    name: str
    p: Form
    d: Form
    tokens: int
    scattered: bool = True
    handovers: int = 1

    @property
    def nbytes(self) -> int:
        return self.handovers * self.tokens * self.p.token_bytes

    @property
    def pieces(self) -> int:
        """Blocks of P, layer by layer."""
        return self.handovers * self.p.layers * -(-self.tokens // self.p.block)

    @property
    def changes(self) -> bool:
        """Whether D's form is another than P's."""
        return self.p != self.d

    def tables(self, side: Side, form: Form, num_blocks: int) -> list[Ids]:
        """Block ids of each hand-over in a cache of this form, int64, no block twice."""
        each = -(-self.tokens // form.block)
        if self.scattered:
            seed = zlib.crc32(f"{self.name} {side} {form}".encode())
            ids = np.random.default_rng(seed).permutation(num_blocks)
        else:
            ids = np.arange(each * self.handovers) + each * self.handovers // 2  # not at the start
        return [ids[n * each : (n + 1) * each].astype(np.int64) for n in range(self.handovers)]


class Config(msgspec.Struct, frozen=True):
    """What a process is started with. ``settings``: of our planes, as ``connector.config.Settings`` takes them."""

    kind: str
    role: Literal["source", "target"]
    device: Literal["cpu", "cuda"]
    points: tuple[Point, ...]
    settings: dict[str, Any] = {}


def num_blocks(points: Iterable[Point], side: Side) -> dict[Form, int]:
    """The forms that one side needs caches of, and their blocks."""
    found: dict[Form, int] = {}
    for point in points:
        form = point.p if side == "p" else point.d
        needed = SPARE * point.handovers * -(-point.tokens // form.block)
        found[form] = max(found.get(form, 0), needed)
    return found


def cache_bytes(forms: dict[Form, int]) -> int:
    """Of the largest of these caches."""
    return max(form.layers * form.block_bytes * blocks for form, blocks in forms.items())


LLAMA = Form()
LLAMA_D = replace(LLAMA, block=64, order="HND")
MAIN, LONG = "tokens_8192", "tokens_32768"
ONE_BLOCK, SMALL, FIRST = "tokens_16", "tokens_512", "first"


def _both(name: str, form: Form, tokens: int = 8192) -> Point:
    return Point(name, form, form, tokens)


def _changed(name: str, form: Form, tokens: int = 8192) -> Point:
    """As Llama's: block 16 to 64 and NHD to HND."""
    return Point(name, form, replace(form, block=64, order="HND"), tokens)


CORE = (
    *(Point(f"tokens_{tokens}", LLAMA, LLAMA_D, tokens) for tokens in (16, 128, 512, 1024, 8192, 32768)),
    Point("contiguous", LLAMA, LLAMA_D, 8192, scattered=False),
    _changed("llama_70b_tp4", replace(LLAMA, layers=80, heads=2)),
    _changed("mla", Form(layers=61, heads=1, content=1152, kind="mla")),
    _both("identity_16", LLAMA),
    _both("identity_32", replace(LLAMA, block=32)),
    _both("identity_64", replace(LLAMA, block=64)),
    _both("pieces_8k", replace(LLAMA, layers=80, heads=1)),
    _both("pieces_32k", replace(LLAMA, heads=4)),
    Point("at_once_4", LLAMA, LLAMA_D, 1024, handovers=4),
    Point("at_once_16", LLAMA, LLAMA_D, 1024, handovers=16),
)
"""Llama-8B at several lengths (16 tokens are one block), then every other factor alone. Pieces of 8 KiB are the blocks
of a 70B model at TP8, those of 32 KiB of Llama-8B at TP2."""

MORE = (
    *(Point(f"tokens_{tokens}", LLAMA, LLAMA_D, tokens) for tokens in (256, 2048, 4096, 16384)),
    Point("layout_alone", LLAMA, replace(LLAMA, order="HND"), 8192),
    Point("block_alone", LLAMA, replace(LLAMA, block=64), 8192),
    Point("block_64_to_16", LLAMA_D, LLAMA, 8192),
    Point("block_48_to_32", replace(LLAMA, block=48), replace(LLAMA, block=32), 8160),
    Point("contiguous_1024", LLAMA, LLAMA_D, 1024, scattered=False),
    _changed("llama_70b_tp4_1024", replace(LLAMA, layers=80, heads=2), 1024),
    _changed("mla_1024", Form(layers=61, heads=1, content=1152, kind="mla"), 1024),
    _both("identity_16_1024", LLAMA, 1024),
    Point("at_once_2", LLAMA, LLAMA_D, 1024, handovers=2),
    Point("at_once_8", LLAMA, LLAMA_D, 1024, handovers=8),
)
"""Behind ``--full``."""

FIRST_POINT = Point(FIRST, LLAMA, LLAMA_D, 4096)
"""What the first hand-over to a new peer moves: its caches are 32 allocations of 32 MiB."""


def small(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same with few layers and tokens, to try the flow on a CPU."""

    def fewer(form: Form) -> Form:
        return replace(form, layers=min(form.layers, 2))

    return tuple(replace(point, p=fewer(point.p), d=fewer(point.d), tokens=_fewer_tokens(point)) for point in points)


def _fewer_tokens(point: Point) -> int:
    if point.tokens <= 64:
        return point.tokens
    return max(64, point.tokens // 32) if point.tokens % 64 == 0 else 96
