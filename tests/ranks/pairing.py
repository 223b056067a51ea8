"""Which ranks face which: a model, the forms of P and D, a prompt. Pure; imports nothing of what it is to judge.

A pairing has a name that says all of it, so that any can be repeated by one command::

    full.l6.h8.c16-tp2.pp1.LBHNC.b64k16.pad0-tp4.pp2.BLNHC.b16k16.pad24-t77.s16-tcp-seed3

model (kind, layers, KV heads, elements per head and token), P, D (tensor and pipeline ranks, layout of vLLM 0.32 over
``[L,B,H,N,C]``, tokens of a manager and of a kernel block, elements of padding, dtype where it is not int32), prompt
tokens and those that D has already, data plane, seed of the block tables. Where ranks share tokens out, ``.dcp2i16``
after ``pp1``: two ranks in turn, 16 tokens each. ``.pcp2`` before it: prefill context parallelism, of MLA.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
KINDS = ("full", "mla", "mixed", "state")
MAX_TOKENS = 4096
ITEM_SIZES = {"int32": 4, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
FLOATS = tuple(ITEM_SIZES)[1:]
INPUTS, STATE_SIZE = 3, 5
"""Of states: what a convolution keeps, and the elements of B, of C, and of each channel of the recurrent state."""

_FORM = r"tp(\d+)\.pp(\d+)(?:\.pcp(\d+))?(?:\.dcp(\d+)i(\d+))?\.([A-Z]{5})\.b(\d+)k(\d+)\.pad(\d+)(?:\.(\w+))?"
_NAME = re.compile(rf"([a-z]+)\.l(\d+)\.h(\d+)\.c(\d+)-{_FORM}-{_FORM}-t(\d+)\.s(\d+)-([a-z_]+)-seed(\d+)")

Rank = tuple[int, int]  # (pipeline rank, tensor-parallel rank)


@dataclass(frozen=True)
class Model:
    """``kind``: all layers with heads, all MLA, or by turns (two block tables), or with states (parts under one)."""

    kind: str = "full"
    layers: int = 4
    heads: int = 4
    content: int = 16

    def groups(self) -> list[tuple[str, list[int]]]:
        """(kind, layers) of each block table."""
        every = list(range(self.layers))
        if self.kind == "mixed":
            return [("full", every[::2]), ("mla", every[1::2])]
        if self.kind == "state":
            return [(part, every) for part in ("x", "B", "C", "recurrent")]
        return [(self.kind, every)]

    def __str__(self) -> str:
        return f"{self.kind}.l{self.layers}.h{self.heads}.c{self.content}"


@dataclass(frozen=True)
class Form:
    """One engine: its ranks and how their caches lie in memory."""

    tp: int = 1
    pp: int = 1
    layout: str = "LBHNC"
    block: int = 16
    kernel: int = 16
    pad: int = 0
    dcp: int = 1
    interleave: int = 1
    dtype: str = "int32"
    pcp: int = 1

    @property
    def size(self) -> int:
        """Ranks of a stage. Those of prefill context parallelism hold the same, and are neighbours."""
        return self.tp * self.pcp

    def ranks(self) -> list[Rank]:
        return [(pp, tp) for pp in range(self.pp) for tp in range(self.size)]

    def stage(self, pp_rank: int, layers: int) -> range:
        """Layers of a pipeline stage, as vLLM cuts them: the last stage is the last to get one of the rest. A stage may
        get none."""
        sizes = [layers // self.pp] * self.pp
        for extra in range(layers % self.pp):
            sizes[-2 - extra] += 1
        first = sum(sizes[:pp_rank])
        return range(first, first + sizes[pp_rank])

    def heads(self, tp_rank: int, heads: int) -> range:
        """Heads of a rank: an even split, and one head each where there are more ranks than heads."""
        first = tp_rank * heads // self.tp
        return range(first, max(first + 1, (tp_rank + 1) * heads // self.tp))

    def held(self, tp_rank: int, tokens: int) -> list[int]:
        """Those of the first ``tokens`` that a rank holds, under context parallelism: ranks that hold the same heads
        take turns. Their blocks have the same numbers, and each stands for ``dcp`` times its tokens."""
        return [t for t in range(tokens) if t // self.interleave % self.dcp == tp_rank % self.dcp]

    @property
    def span(self) -> int:
        """Tokens of the prompt that a manager block stands for."""
        return self.block * self.dcp

    def __str__(self) -> str:
        context = f".pcp{self.pcp}" if self.pcp > 1 else ""
        context += f".dcp{self.dcp}i{self.interleave}" if self.dcp > 1 else ""
        dtype = "" if self.dtype == "int32" else f".{self.dtype}"
        return f"tp{self.tp}.pp{self.pp}{context}.{self.layout}.b{self.block}k{self.kernel}.pad{self.pad}{dtype}"

    def scales(self, layer: int) -> tuple[float, float]:
        """Of K and V; engines of one fp8 dtype have the same."""
        rng = random.Random(f"{self.dtype} {layer}")
        return (rng.uniform(0.01, 0.1), rng.uniform(0.2, 2.0)) if self.dtype.startswith("float8") else (1.0, 1.0)


@dataclass(frozen=True)
class Pairing:
    """One hand-over of tokens ``[start, tokens)`` from P's ranks to D's."""

    model: Model
    p: Form
    d: Form
    tokens: int = 77
    start: int = 0
    plane: str = "tcp"
    seed: int = 0

    def __post_init__(self) -> None:
        for form in (self.p, self.d):
            check_form(form, self.model)
        numbered = (self.p.dtype == "int32") == (self.d.dtype == "int32")
        if not 0 <= self.start < self.tokens <= MAX_TOKENS or self.model.kind not in KINDS or not numbered:
            raise ValueError(f"{self} is no pairing")
        if self.model.kind == "state" and self.p.dtype != "int32":
            raise ValueError(f"{self}: the elements of states are numbers here")
        if self.model.kind == "state" and (self.start or self.heads % self.p.tp or self.heads % self.d.tp):
            raise ValueError(f"{self}: vLLM splits the heads of states evenly, and D has none of a state already")

    def form(self, side: str) -> Form:
        return {"p": self.p, "d": self.d}[side]

    def groups(self, side: str, rank: Rank) -> list[tuple[str, list[int], range]]:
        """(kind, layers, heads) that a rank holds, by block table; a stage may hold no layer of one."""
        form, stage = self.form(side), self.form(side).stage(rank[0], self.model.layers)
        heads = {kind: range(1) for kind in ("mla", "B", "C")}
        return [
            (kind, [n for n in layers if n in stage], heads.get(kind, form.heads(rank[1], self.heads)))
            for kind, layers in self.block_tables(side)
        ]

    def block_tables(self, side: str) -> list[tuple[str, list[int]]]:
        """(kind, layers) in the engine's order; some engines have another one than their peer."""
        found, rng = self.model.groups(), random.Random(f"{self.seed} order {side}")
        if self.model.kind != "state" and rng.random() < 0.25:
            for _, layers in found:
                rng.shuffle(layers)
            rng.shuffle(found)
        return found

    @property
    def heads(self) -> int:
        return self.model.heads

    @property
    def converts(self) -> bool:
        return self.p.dtype != self.d.dtype

    def keys(self, kind: str) -> int:
        """Elements that belong to K; the others to V."""
        return self.model.content if kind == "mla" else self.model.content * 2 // 3

    def asked(self, kind: str, rank: Rank) -> list[int]:
        """Tokens that a rank of D needs; of a state, rows."""
        if self.model.kind != "state":
            return [token for token in self.d.held(rank[1], self.tokens) if token >= self.start]
        content = self.model.content if kind in ("x", "recurrent") else STATE_SIZE
        return list(range(content if kind == "recurrent" or self.dim_first else INPUTS))

    @property
    def dim_first(self) -> bool:
        """Whether the rows of a convolution's channel lie together, or the channels of a row."""
        return bool(self.seed % 2)

    def pages(self, side: str) -> int:
        """Manager blocks of a cache: some more than the prompt takes."""
        return -(-self.tokens // self.form(side).span) + 3

    def tables(self, side: str) -> list[list[int]]:
        """The prompt's manager blocks, scattered, by block table."""
        chosen = random.Random(f"{self.seed} {side}")
        pages = self.pages(side)
        if self.model.kind == "state":  # one block, and not the null block
            return [[chosen.randrange(1, pages)]] * len(self.model.groups())
        return [chosen.sample(range(pages), -(-self.tokens // self.form(side).span)) for _ in self.model.groups()]

    def __str__(self) -> str:
        return f"{self.model}-{self.p}-{self.d}-t{self.tokens}.s{self.start}-{self.plane}-seed{self.seed}"


def shardings(form: Form, model: Model) -> bool:
    """Whether vLLM could split a page of this form into kernel blocks: only dense pages, one after the other."""
    one_head = model.kind == "mla" or (model.kind == "full" and form.tp >= model.heads)
    return form.pad == 0 and (form.layout in ("LBHNC", "LBNHC") or (form.layout == "LHBNC" and one_head))


def check_form(form: Form, model: Model) -> None:
    """Raises ValueError for a form that no engine has."""
    known = form.layout in LAYOUTS and form.dtype in ITEM_SIZES
    if not known or form.block % form.kernel or min(form.tp, form.pp, form.kernel) < 1:
        raise ValueError(f"{form} is no form")
    if form.pcp > 1 and (model.kind != "mla" or form.dcp not in (1, form.pcp, form.size)):
        raise ValueError(f"{form} is no form of prefill context parallelism that vLLM runs")
    if form.kernel != form.block and not shardings(form, model):
        raise ValueError(f"{form}: pages of this layout do not split into kernel blocks")
    if form.dcp not in shards(form, model) or form.block % form.interleave or form.dcp == 1 < form.interleave:
        raise ValueError(f"{form}: its ranks do not share tokens out so, no such form")


def shards(form: Form, model: Model) -> list[int]:
    """The ranks that vLLM could have sharing tokens out: neighbours, no more than hold the same heads."""
    if model.kind == "state":
        return [1]
    replicas = form.size if model.kind == "mla" else form.tp // model.heads
    return [size for size in range(1, form.size + 1) if form.size % size == 0 and size <= max(1, replicas)]


def parse(name: str) -> Pairing:
    """The pairing of a name. Raises ValueError for anything else."""
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise ValueError(f"{name!r} is no pairing's name, expected e.g. {Pairing(Model(), Form(), Form())}")
    kind, *rest = found.groups()
    layers, heads, content = map(int, rest[:3])
    forms = []
    for tp, pp, pcp, dcp, turn, layout, block, kernel, pad, dtype in (rest[3:13], rest[13:23]):
        form = Form(int(tp), int(pp), layout, int(block), int(kernel), int(pad), int(dcp or 1), int(turn or 1))
        forms.append(replace(form, dtype=dtype or "int32", pcp=int(pcp or 1)))
    tokens, start, plane, seed = rest[23:]
    p, d = forms
    return Pairing(Model(kind, layers, heads, content), p, d, int(tokens), int(start), plane, int(seed))


def draw(rng: random.Random, planes: tuple[str, ...]) -> Pairing:
    """A pairing at random, any form to any form."""
    kind = rng.choices(KINDS, (6, 2, 2, 2))[0]
    heads = rng.choice([1, 2, 3, 4, 6, 8, 12])
    model = Model(kind, rng.randint(1, 7), heads, rng.choice([3, 4, 10, 16, 32, 128]))
    p, d = _draw_form(rng, model), _draw_form(rng, model)
    if kind == "state":
        model = replace(model, heads=math.lcm(heads, p.tp, d.tp))
    tokens = rng.choice([rng.randint(1, 40), rng.randint(41, 260), rng.choice([16, 48, 64, 96, 192])])
    whole = rng.randrange(0, tokens, d.block)  # vLLM counts whole blocks as already there, and a fork any token
    start = rng.choice([0, 0, whole, rng.randrange(tokens)]) * (kind != "state")
    plane, seed = rng.choice(planes), rng.randrange(1 << 16)
    p, d = _draw_shares(rng, p, model), _draw_shares(rng, d, model)
    if kind != "state" and rng.random() < 0.2:
        p, d = (replace(form, dtype=rng.choice(FLOATS)) for form in (p, d))
        if p.dtype != d.dtype and plane in ("cma", "cuda_ipc"):  # they copy bytes
            plane = "shm"
    return Pairing(model, p, d, tokens, start, plane, seed)


def _draw_shares(rng: random.Random, form: Form, model: Model) -> Form:
    dcp = rng.choice(shards(form, model))
    turns = [size for size in (1, 8, 16, 32, form.block) if form.block % size == 0]
    return replace(form, dcp=dcp, interleave=rng.choice(turns)) if dcp > 1 else form


def _draw_form(rng: random.Random, model: Model) -> Form:
    tp, pp = rng.choice([1, 1, 2, 2, 3, 4, 4, 6, 8]), rng.choice([1, 1, 1, 2, 3])
    block = rng.choice([1, 8, 16, 16, 32, 48, 64, 128])
    form = Form(tp, pp, rng.choice(LAYOUTS), block, block, rng.choice([0, 0, 1, 24]))
    if not shardings(form, model) or rng.random() < 0.3:
        return form
    kernel = rng.choice([size for size in (1, 8, 16, 32, 48, 64, 128) if block % size == 0])
    return Form(tp, pp, form.layout, block, kernel)
