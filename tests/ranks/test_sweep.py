"""A short slice of ``sweep.py``, and that names repeat what they name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.ranks.compare import check
from tests.ranks.matrix import PLANES
from tests.ranks.pairing import LAYOUTS, Form, Model, Pairing, draw, parse
from tests.ranks.rank_processes import RankProcesses
from tests.ranks.sweep import drawn

SEED, COUNT = 14, 25


@pytest.mark.parametrize("pairing", drawn(SEED, COUNT, PLANES), ids=str)
def test_pairing(processes: RankProcesses, pairing: Pairing) -> None:
    check(processes, pairing)


def test_a_name_says_all() -> None:
    for pairing in drawn(1, 300, PLANES):
        assert parse(str(pairing)) == pairing
    assert drawn(3, 5, PLANES) == drawn(3, 9, PLANES)[:5] != drawn(4, 5, PLANES)


def test_the_draw_reaches_every_corner() -> None:
    pairings = [draw(random.Random(n), PLANES) for n in range(500)]
    for side in ("p", "d"):
        forms = [pairing.form(side) for pairing in pairings]
        assert {form.layout for form in forms} == set(LAYOUTS)
        assert {form.tp for form in forms} >= {1, 2, 3, 4, 6, 8} and {form.pp for form in forms} == {1, 2, 3}
        assert {form.dcp for form in forms} >= {1, 2, 3, 4, 8} and len({form.interleave for form in forms}) > 3
        assert any(form.kernel < form.block for form in forms) and any(form.pad for form in forms)
        assert any(pairing.model.kind == "full" and pairing.form(side).tp > pairing.heads for pairing in pairings)
        assert any(
            not layers for x in pairings for rank in x.form(side).ranks() for _, layers, _ in x.groups(side, rank)
        )
    assert any(x.start % x.d.block for x in pairings) and any(x.start and x.start % x.d.block == 0 for x in pairings)
    assert {max(x.p.block, x.d.block) % min(x.p.block, x.d.block) > 0 for x in pairings} == {True, False}


def test_what_is_no_name_or_no_engines_form_is_refused() -> None:
    for name in ("", "full.l4.h4.c16", "x" + str(Pairing(Model(), Form(), Form()))):
        with pytest.raises(ValueError, match="no pairing"):
            parse(name)
    shares: list[dict[str, Any]] = [{"tp": 4, "dcp": 3}, {"tp": 4, "dcp": 2}, {"dcp": 2}, {"interleave": 2}]
    pages: list[dict[str, Any]] = [{"layout": "BLHNC", "kernel": 8}, {"pad": 3, "kernel": 8}, {"kernel": 5}]
    for form in (*shares, *pages, {"layout": "LBCHN"}, {"pp": 0}):
        with pytest.raises(ValueError, match=r"form|split"):
            Pairing(Model(), Form(), Form(**form))
