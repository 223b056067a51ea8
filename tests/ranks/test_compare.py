"""That the harness notices: damage done on purpose, and observations that were tampered with."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.ranks.compare import compare
from tests.ranks.pairing import Form, Model, Pairing
from tests.ranks.rank_processes import RankProcesses, Seen

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
