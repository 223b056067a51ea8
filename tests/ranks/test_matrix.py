"""Any form of P to any form of D: every element, every byte on the wire, every release. One pairing for each
sixth place of the tables of docs/compatibility.md, and a slice of ``sweep.py``; ``sweep.py --matrix`` runs all."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.ranks.compare import check
from tests.ranks.matrix import FORMS, PARALLEL, PLANES, TABLES, cells, load, one_for_each_place, render
from tests.ranks.pairing import Form, Model, Pairing, parse
from tests.ranks.rank_host import RankProcesses
from tests.ranks.sweep import drawn

CELLS = cells()


@pytest.mark.parametrize("cell", one_for_each_place(CELLS)[::6], ids=lambda cell: f"{cell.table}-{cell.pairing}")
def test_cell(processes: RankProcesses, cell) -> None:
    check(processes, cell.pairing)


@pytest.mark.parametrize("pairing", drawn(14, 8, PLANES), ids=str)
def test_drawn_pairing(processes: RankProcesses, pairing: Pairing) -> None:
    check(processes, pairing)


def test_a_name_says_all() -> None:
    for pairing in drawn(1, 300, PLANES):
        assert parse(str(pairing)) == pairing
    assert drawn(3, 5, PLANES) == drawn(3, 9, PLANES)[:5] != drawn(4, 5, PLANES)


def test_the_tables_are_of_this_matrix_and_show_what_did_not_pass() -> None:
    outcomes = load()
    assert set(outcomes) == {str(cell.pairing) for cell in CELLS}, "run tests/ranks/sweep.py --matrix again"
    assert len(outcomes) == len(CELLS)
    for table in TABLES:
        there = {(cell.row, cell.column) for cell in CELLS if cell.table == table}
        assert there == {(row, column) for row in FORMS[table] for column in FORMS[table]}
    assert all(first == last for first, last in counts(render(outcomes)))
    outcomes[str(CELLS[0].pairing)] = "failed"
    del outcomes[str(CELLS[-1].pairing)]  # of another pair of forms
    wrong = [last - first for first, last in counts(render(outcomes))]
    assert sorted(wrong) == [0, 0, 0, 0, 0, 0, 2, 2] and CELLS[0].table == CELLS[-1].table == "parallel"


def counts(shown: str) -> list[tuple[int, int]]:
    """Each *n of m* of the rows: pairs of forms, then hand-overs."""
    found = [(int(passed), int(every)) for passed, every in re.findall(r"(\d+) of (\d+) passed", shown)]
    assert len(found) == 2 * len(TABLES)
    return found


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
