"""The fixed pairings: every parallel form, every layout and every block size to every other. Pure.

A cell of a table of docs/compatibility.md stands for one or more pairings here."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.ranks.pairing import LAYOUTS, Form, Model, Pairing

PLANES = ("tcp", "shm", "zmq", "cma")
GPU_PLANES = ("cuda_ipc", "shm", "tcp", "zmq")
PARALLEL = {f"TP {tp}": Form(tp=tp) for tp in (1, 2, 3, 4, 6, 8)} | {
    "PP 2": Form(pp=2),
    "PP 3": Form(pp=3),
    "TP 2, PP 2": Form(tp=2, pp=2),
}
MODELS = {
    "heads split": Model("full", 5, 12),
    "heads replicated": Model("full", 5, 2),
    "MLA": Model("mla", 5, 8, 9),
    "MLA beside heads": Model("mixed", 5, 4),
}
BLOCKS = {
    "16": Form(block=16, kernel=16),
    "32": Form(block=32, kernel=32),
    "48": Form(block=48, kernel=48),
    "64": Form(block=64, kernel=64),
    "48 in kernel blocks of 16": Form(block=48, kernel=16),
    "64 in kernel blocks of 32": Form(block=64, kernel=32),
    "16, padded pages": Form(block=16, kernel=16, pad=24),
}
CONTEXT = {
    "TP 1": Form(),
    "TP 4": Form(tp=4),
    "TP 2, DCP 2": Form(tp=2, dcp=2),
    "TP 4, DCP 2": Form(tp=4, dcp=2),
    "TP 4, DCP 4": Form(tp=4, dcp=4),
    "TP 6, DCP 3": Form(tp=6, dcp=3),
    "TP 2, PP 2, DCP 2": Form(tp=2, pp=2, dcp=2),
}
PREFILL_CONTEXT = {
    "PCP 2": Form(pcp=2),
    "PCP 2, DCP 2": Form(pcp=2, dcp=2),
    "TP 2, PCP 2, DCP 2": Form(tp=2, pcp=2, dcp=2),
    "TP 2, PCP 2, DCP 4": Form(tp=2, pcp=2, dcp=4),
}
TABLES = ("parallel", "layout", "block", "context")


@dataclass(frozen=True)
class Cell:
    """One pairing and the place in a table that it stands for."""

    table: str
    row: str
    column: str
    pairing: Pairing


def cells() -> list[Cell]:
    """All of them, always the same."""
    found = [*_parallel(), *_layouts(), *_blocks(), *_context(), *_prefill_context(), *_states()]
    return [replace(cell, pairing=replace(cell.pairing, plane=PLANES[n % 4])) for n, cell in enumerate(found)]


def one_for_each_place(found: list[Cell]) -> list[Cell]:
    """Of the cells of a place one, so that neighbours have other models."""
    places: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in found:
        places.setdefault((cell.table, cell.row, cell.column), []).append(cell)
    return [place[number * 4 // 3 % len(place)] for number, place in enumerate(places.values())]


def _parallel() -> Iterator[Cell]:
    """Layouts, block sizes, prompts and prefixes differ from cell to cell, too."""
    for row, p in PARALLEL.items():
        for column, d in PARALLEL.items():
            for name, model in MODELS.items():
                if name == "MLA beside heads" and row != column and "PP" not in row + column:
                    continue  # MLA as such stands beside it
                rng = random.Random(f"{row} {column} {name}")
                p_block, d_block = rng.choice([16, 32, 48]), rng.choice([16, 32, 48])
                yield Cell("parallel", row, column, Pairing(
                    model,
                    replace(p, layout=rng.choice(LAYOUTS), block=p_block, kernel=p_block),
                    replace(d, layout=rng.choice(LAYOUTS), block=d_block, kernel=d_block),
                    tokens=rng.choice([33, 77, 96]), start=rng.choice([0, 0, d_block // 2, 16]), seed=rng.randrange(99),
                ))  # fmt: skip


def _layouts() -> Iterator[Cell]:
    """With more heads on one side than on the other: tensor-parallel 2 to 1, 1 to 2, 1 to 1."""
    for row, p in enumerate(LAYOUTS):
        for column, d in enumerate(LAYOUTS):
            p_tp, d_tp = ((2, 1), (1, 2), (1, 1))[(row + column) % 3]
            content = (16, 128)[(row + column) % 2]  # short and long runs
            pairing = Pairing(
                Model("full", 3, 4, content), Form(tp=p_tp, layout=p), Form(tp=d_tp, layout=d), tokens=77,
                start=(0, 32)[row % 2], seed=6 * row + column,
            )  # fmt: skip
            yield Cell("layout", p, d, pairing)


def _blocks() -> Iterator[Cell]:
    """A prompt that ends inside a block of every size; D has none, some whole blocks, or part of one."""
    for row, p in enumerate(BLOCKS):
        for column, d in enumerate(BLOCKS):
            size = BLOCKS[d].block
            pairing = Pairing(
                Model("full", 3, 2, (16, 128)[column % 2]), BLOCKS[p],
                replace(BLOCKS[d], layout=("LBHNC", "LBNHC")[row % 2]),
                tokens=2 * size + 77, start=(0, size, size // 2 - 3)[(row + column) % 3], seed=7 * row + column,
            )  # fmt: skip
            yield Cell("block", p, d, pairing)


def _context() -> Iterator[Cell]:
    """Ranks that share tokens out: by blocks and by other numbers, the same on both sides and not, of MLA and heads."""
    for row, p in CONTEXT.items():
        for column, d in CONTEXT.items():
            for name in ("MLA", "heads", "mixed"):
                rng = random.Random(f"{row} {column} {name} context")
                model = Model({"MLA": "mla", "heads": "full", "mixed": "mixed"}[name], 3, _heads(p, d), 16)
                p_block, d_block = rng.choice([16, 32, 48]), rng.choice([16, 32, 48])
                turn = rng.choice([1, 8, 16])
                turns = {"MLA": (16, 16), "heads": (turn, turn), "mixed": (p_block, rng.choice([1, 4, 16]))}
                p_turn, d_turn = turns[name]
                yield Cell("context", row, column, Pairing(
                    model,
                    replace(p, layout=rng.choice(LAYOUTS), block=p_block, kernel=p_block,
                            interleave=p_turn if p.dcp > 1 else 1),
                    replace(d, layout=rng.choice(LAYOUTS), block=d_block, kernel=d_block,
                            interleave=d_turn if d.dcp > 1 else 1),
                    tokens=rng.choice([33, 77, 150, 210]), start=rng.choice([0, 0, d_block * d.dcp, 13]) % 33,
                    seed=rng.randrange(99),
                ))  # fmt: skip


def _prefill_context() -> Iterator[Cell]:
    """To and from all of these and those, of MLA, the only caches with which vLLM runs it."""
    forms = CONTEXT | PREFILL_CONTEXT
    for row, p in forms.items():
        for column, d in forms.items():
            if p.pcp == d.pcp == 1:
                continue
            rng = random.Random(f"{row} {column} prefill context")
            p_block, d_block = rng.choice([16, 32, 48]), rng.choice([16, 32, 48])
            yield Cell("context", row, column, Pairing(
                Model("mla", 3, 4, 16),
                replace(p, layout=rng.choice(LAYOUTS), block=p_block, kernel=p_block,
                        interleave=rng.choice([1, 8, p_block]) if p.dcp > 1 else 1),
                replace(d, layout=rng.choice(LAYOUTS), block=d_block, kernel=d_block,
                        interleave=rng.choice([1, 16, d_block]) if d.dcp > 1 else 1),
                tokens=rng.choice([33, 77, 210]), start=rng.choice([0, 0, 13, 32]), seed=rng.randrange(99),
            ))  # fmt: skip


def _heads(p: Form, d: Form) -> int:
    """As many as ranks that share tokens out leave room for."""
    return min((form.tp // form.dcp for form in (p, d) if form.dcp > 1), default=1)


def _states() -> Iterator[Cell]:
    """Of the same ranks: 24 heads, which vLLM splits evenly between all of them."""
    for row, p in PARALLEL.items():
        for column, d in PARALLEL.items():
            rng = random.Random(f"{row} {column} states")
            of_p, of_d = (replace(form, layout=rng.choice(LAYOUTS), pad=rng.choice([0, 24])) for form in (p, d))
            model = Model("state", 5, 24, rng.choice([4, 6, 16]))
            pairing = Pairing(model, of_p, of_d, tokens=rng.choice([1, 77]), seed=rng.randrange(99))
            yield Cell("parallel", row, column, pairing)


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "matrix.json"
FORMS = {
    "parallel": tuple(PARALLEL), "layout": LAYOUTS, "block": tuple(BLOCKS),
    "context": tuple(CONTEXT | PREFILL_CONTEXT),
}  # fmt: skip
TITLES = {
    "parallel": "tensor-parallel (TP) and pipeline-parallel (PP) sizes: heads divided between ranks, replicated heads, "
    "MLA, recurrent states; with stages also MLA layers beside others",
    "layout": "layout of vLLM 0.32, by the order of layers, blocks, heads, tokens (N) and content in memory",
    "block": "tokens in a block",
    "context": "decode context parallelism (DCP): MLA, heads, and both; equal and different interleaves of the tokens; "
    "prefill context parallelism (PCP): MLA",
}


def load() -> dict[str, str]:
    """Outcome by name of the pairing."""
    outcomes: dict[str, str] = json.loads(RESULTS.read_text())
    return outcomes


def save(outcomes: dict[str, str]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n")


def render(outcomes: dict[str, str]) -> str:
    """One row for each table of pairings. A pair of forms passed if all of its hand-overs did."""
    lines = ["| P and D may differ in | forms, each to each | pairs of forms | hand-overs |", "|---|---|---|---|"]
    every = cells()
    for table in TABLES:
        ended: dict[tuple[str, str], list[bool]] = {}
        for cell in (cell for cell in every if cell.table == table):
            ended.setdefault((cell.row, cell.column), []).append(outcomes.get(str(cell.pairing)) == "passed")
        passed = [one for place in ended.values() for one in place]
        pairs = f"{sum(map(all, ended.values()))} of {len(FORMS[table]) ** 2} passed"
        forms = "; ".join(FORMS[table])
        lines.append(f"| {TITLES[table]} | {forms} | {pairs} | {sum(passed)} of {len(passed)} passed |")
    return "\n".join(lines)
