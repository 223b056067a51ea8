"""Any form of P to any form of D: every element, every byte on the wire, every release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.ranks.compare import check
from tests.ranks.matrix import BLOCKS, CONTEXT, PARALLEL, TABLES, cells
from tests.ranks.pairing import LAYOUTS, Form, Model, Pairing
from tests.ranks.rank_processes import PROCESSES, RankProcesses
from tests.ranks.table import save

CELLS = cells()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    """Written for ``table.py`` where all of the matrix ran; the same bytes whenever all of it passes."""
    found: dict[str, str] = {}
    yield found
    if set(found) == {str(cell.pairing) for cell in CELLS}:
        save(found)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.table}-{cell.pairing}")
def test_cell(processes: RankProcesses, outcomes: dict[str, str], cell) -> None:
    outcomes[str(cell.pairing)] = "failed"
    check(processes, cell.pairing)
    outcomes[str(cell.pairing)] = "passed"


def test_the_matrix_has_every_form_on_both_sides() -> None:
    assert len({str(cell.pairing) for cell in CELLS}) == len(CELLS)
    for table, forms in zip(TABLES, (PARALLEL, LAYOUTS, BLOCKS, CONTEXT), strict=True):
        there = {(cell.row, cell.column) for cell in CELLS if cell.table == table}
        assert there == {(row, column) for row in forms for column in forms}


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 4), (4, 2), (3, 2)])
def test_a_process_for_every_rank(processes: RankProcesses, p_tp: int, d_tp: int) -> None:
    pairing = Pairing(Model(heads=12), Form(tp=p_tp), Form(tp=d_tp), seed=p_tp)
    assert p_tp + d_tp <= PROCESSES
    seen = check(processes, pairing)
    pids = [found["pid"] for found in (*seen.p.values(), *seen.d.values())]
    assert len(set(pids)) == p_tp + d_tp


@pytest.mark.parametrize(("p_pp", "d_pp"), [(3, 1), (1, 3), (3, 2), (2, 3)])
def test_stages_without_a_layer(processes: RankProcesses, p_pp: int, d_pp: int) -> None:
    """Two layers, one with heads and one MLA, on up to three stages: block tables, and stages, that hold nothing."""
    pairing = Pairing(Model("mixed", 2, 4), Form(tp=2, pp=p_pp), Form(pp=d_pp, layout="BLNHC"))
    held = [layers for _, layers, _ in pairing.groups("p" if p_pp > d_pp else "d", (2, 0))]
    assert held == [[], []]
    check(processes, pairing)


@pytest.mark.ucx
@pytest.mark.parametrize(("p", "d"), [("TP 2", "TP 1"), ("TP 3", "TP 2"), ("PP 2", "TP 2")])
def test_ucx_between_processes(processes: RankProcesses, p: str, d: str) -> None:
    check(processes, Pairing(Model(heads=6), PARALLEL[p], replace(PARALLEL[d], layout="BLNHC", block=48, kernel=48),
                         plane="ucx"))  # fmt: skip
