"""The comparison of ranks sees planted faults; a step's device waits; numbers stay the same where dtypes differ."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.ranks.compare import check, compare
from tests.ranks.matrix import PLANES
from tests.ranks.pairing import FLOATS, Form, Model, Pairing
from tests.ranks.rank_host import RankProcesses, Seen
from tests.transport.plane_pair import PUSH, host_planes

PAIRING = Pairing(Model(heads=2), Form(tp=4, layout="BLNHC", pad=8), Form(tp=2, pp=2, layout="LBNHC", pad=4))


@pytest.fixture(scope="module")
def seen(processes: RankProcesses) -> Seen:
    found = processes.run(PAIRING)
    assert compare(PAIRING, found) == []
    return found


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("wrong element on P", "D pp1 tp0: 1 of .* differ, the first in full layer 3 head 0, .* token 0 channel 15"),
        ("stray element on D", "D pp0 tp0: 1 of .* in full layer 0 head 0, .* token 0 channel 0"),
        ("stray element in D's padding", "D pp0 tp0: 1 of .* differ, the first in the padding"),
        ("asks twice", "D pp0 tp0: asked not once for .'full', 0, 0"),
    ],
)
def test_damage_is_noticed(processes: RankProcesses, fault: str, complaint: str) -> None:
    complaints = compare(PAIRING, processes.run(PAIRING, fault=fault))
    assert [line for line in complaints if re.match(complaint, line)], complaints


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda p, d: p.pop((0, 3)), "not every rank was there"),
        (lambda p, d: d[1, 1].update(failed=True), "D pp1 tp1: its load failed"),
        (lambda p, d: d[0, 1].update(bytes={"zmq": d[0, 1]["bytes_wanted"]}), "moved over ['zmq'], expected tcp"),
        (lambda p, d: d[0, 1]["bytes"].update(tcp=1), "are the least"),
        (lambda p, d: d[0, 1]["asks"][0][1][0].__setitem__(6, 5), "asked for other tokens"),
        (lambda p, d: d[0, 1]["asks"].extend(d[0, 0]["asks"]), "asked for [('full', 0, 0)"),
        (lambda p, d: p[0, 0].update(done=False), "P pp0 tp0: its blocks were not released (released)"),
        (lambda p, d: p[0, 0]["released_when_freed"].pop(), "P pp0 tp0: freed after"),
    ],
)
def test_tampering_is_noticed(seen: Seen, change: Callable[[Any, Any], object], complaint: str) -> None:
    other = copy.deepcopy(seen)
    change(other.p, other.d)
    complaints = compare(PAIRING, other)
    assert [line for line in complaints if complaint in line], complaints


def test_readers_on_one_replica_are_noticed(processes: RankProcesses) -> None:
    pairing = Pairing(Model("mla"), Form(tp=3), Form(tp=3), plane="shm")
    seen = processes.run(pairing)
    assert compare(pairing, seen) == []
    for found in seen.d.values():
        found["asks"] = [[(0, 0), spans] for _, spans in found["asks"]]
    assert [line for line in compare(pairing, seen) if "not spread" in line]


def test_a_rank_that_does_not_start_is_an_error(processes: RankProcesses) -> None:
    with pytest.raises(RuntimeError, match="ConfigError"):
        processes.run(replace(PAIRING, plane="pigeon"))
    assert compare(PAIRING, processes.run(PAIRING)) == [], "and the next pairing has new processes"


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


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("p", [Form(), Form(tp=2)], ids=str)
def test_what_a_step_computes_with(processes: RankProcesses, plane: str, p: Form) -> None:
    """Its device waits for copies that are late, while its thread goes on."""
    check(processes, Pairing(Model(), p, Form(layout="BLHNC"), tokens=200, plane=plane, seed=7), inside=True)


@pytest.mark.parametrize("plane", host_planes(PUSH))
def test_a_device_that_does_not_wait_is_noticed(processes: RankProcesses, plane: str) -> None:
    pairing = Pairing(Model(), Form(), Form(), tokens=200, plane=plane, seed=7)
    complaints = compare(pairing, processes.run(pairing, inside=True, fault="device does not wait"))
    assert any("elements differ" in line for line in complaints)
