"""Where the engines of the GPU tests run, on machines of several sizes; needs no GPU."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_forms import PLANES, Form, cases


@pytest.mark.parametrize(
    ("there", "p", "d"),
    [
        (2, (0,), (1,)), (2, (0, 1), (1, 0)), (2, (0,), (1, 0)), (2, (0, 1), (1,)),
        (4, (0,), (3,)), (4, (0, 1), (3, 2)), (4, (0,), (3, 2)), (4, (0, 1, 2), (3, 2)),
        (3, (0, 1, 2), (2, 1)),
    ],
)  # fmt: skip
def test_p_from_the_first_and_d_from_the_last(there: int, p: tuple[int, ...], d: tuple[int, ...]) -> None:
    assert Form("P", tensor=len(p)).gpus(there) == p
    assert Form("D", tensor=len(d)).gpus(there) == d


def test_a_d_beside_p_and_stages() -> None:
    assert Form("D", beside=True).gpus(4) == (0,)
    assert Form("P", pipeline=2).gpus(4) == (0, 1)


def test_more_ranks_than_gpus_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"P-tp3pp1.* has 3 ranks, one to a GPU, and there are 2"):
        Form("P", tensor=3, heads=6).gpus(2)


def test_every_form_with_every_plane_and_no_engine_twice() -> None:
    found = list(cases())
    assert {(case.name.rpartition("-")[0], case.d.plane) for case in found if case.d.policy == "recompute"} == {
        (form, plane)
        for form in (
            "tp1-tp1-flash",
            "tp1-tp1-triton",
            "same-gpu",
            "tp2-tp2",
            "tp1-tp2",
            "tp2-tp1",
            "pp2-tp2",
            "tp3-tp2",
        )
        for plane in PLANES
    }
    assert {case.name for case in found if case.d.policy == "fail"} == {
        "tp1-tp1-in-step", "tp1-tp1-by-layer", "tp2-tp2-in-step",
    }  # fmt: skip
    engines = {engine for case in found for engine in (case.p, case.d)}
    assert len({engine.name for engine in engines}) == len(engines)
    assert all(case.p.heads == case.d.heads for case in found)
    assert [case.name for case in found if case.needs > 2] == [f"tp3-tp2-{plane}" for plane in PLANES]
