"""Any dtype of P's to any of D's: converted on the way, element by element, or copied where it is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks.compare import check
from tests.ranks.pairing import FLOATS, Form, Model, Pairing
from tests.ranks.rank_processes import RankProcesses

PAIRS = [(p, d) for p in FLOATS for d in FLOATS]
STAGED = ("tcp", "shm", "zmq")


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_dtype_to_dtype(processes: RankProcesses, p: str, d: str) -> None:
    """Ranks, stages, layouts and block sizes differ, too, and layers have scales of their own."""
    number = PAIRS.index((p, d))
    model = (Model("full", 5, 4, 128), Model("mla", 3, 2, 18), Model("mixed", 4, 2, 16))[number % 3]
    forms = Form(tp=2, layout="LBNHC", block=32, kernel=32), Form(pp=2, layout="BLHNC", pad=8)
    one, other = forms[:: 1 if number % 2 else -1]
    check(processes, Pairing(model, replace(one, dtype=p), replace(other, dtype=d), start=(0, 16)[number % 2],
                         plane=STAGED[number % 3], seed=number))  # fmt: skip


@pytest.mark.parametrize("plane", STAGED)
@pytest.mark.parametrize(("p", "d"), [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")])
def test_every_staged_plane(processes: RankProcesses, plane: str, p: str, d: str) -> None:
    """Long runs too, which planes would move in place if they were not converted."""
    model = Model("full", 4, 2, 512)
    check(processes, Pairing(model, Form(dtype=p), Form(dtype=d), plane=plane, seed=8))


@pytest.mark.parametrize("plane", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("nixl", "ucx")])
def test_planes_of_their_own_library(processes: RankProcesses, plane: str) -> None:
    check(processes, Pairing(Model(), Form(dtype="float32"), Form(dtype="float16"), plane=plane))


def test_the_planes_that_ranks_choose_by_themselves(processes: RankProcesses) -> None:
    """On one host D would copy P's pages; not these."""
    seen = check(processes, Pairing(Model(), Form(dtype="float16"), Form(dtype="bfloat16"), plane="auto"))
    assert [set(found["bytes"]) for found in seen.d.values()] == [{"shm"}]
    seen = check(processes, Pairing(Model(), Form(dtype="float16"), Form(dtype="float16"), plane="auto"))
    assert [set(found["bytes"]) for found in seen.d.values()] == [{"cma"}]
    fp8 = "float8_e4m3fn"
    check(processes, Pairing(Model("mixed"), Form(dtype=fp8, tp=2), Form(dtype=fp8), plane="cma"))
