"""Caches on GPUs: any form of P to any form of D, over every plane, between two GPUs and on one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ranks.compare import check, compare
from tests.ranks.matrix import GPU_PLANES
from tests.ranks.pairing import Form, Model, Pairing
from tests.ranks.rank_host import RankProcesses
from tests.ranks.sweep import drawn
from tests.support.apart import need_namespaces
from tests.support.remote import RemoteApart

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SEED, COUNT = 21, 40

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses(GPUS)
    yield processes
    processes.close()


@pytest.mark.parametrize(
    "plane", [*GPU_PLANES, *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("nixl", "ucx"))]
)
@pytest.mark.parametrize(
    ("p", "d"),
    [
        (Form(), Form(layout="LHBNC", block=64, kernel=64)),
        (Form(tp=2), Form(tp=2, layout="BLHNC")),
        (Form(tp=1), Form(tp=2, block=64, kernel=64)),
        (Form(tp=2, block=64, kernel=64), Form(tp=1)),
        (Form(pp=2), Form(tp=2)),
        (Form(tp=3), Form(tp=2)),
    ],
    ids=str,
)
def test_forms(processes: RankProcesses, plane: str, p: Form, d: Form) -> None:
    """Ranks share GPUs where there are fewer of these; 12 attention heads have 6 KV heads, so that 3 to 2 comes out."""
    check(processes, Pairing(Model(heads=6), p, d, tokens=200, start=0, plane=plane, seed=7))


@pytest.mark.parametrize("pairing", drawn(SEED, COUNT, GPU_PLANES), ids=str)
def test_pairing(processes: RankProcesses, pairing: Pairing) -> None:
    check(processes, pairing)


@pytest.mark.parametrize("plane", GPU_PLANES)
def test_one_gpu_for_both(plane: str) -> None:
    processes = RankProcesses(1)
    try:
        check(processes, replace(drawn(SEED, 1, GPU_PLANES)[0], plane=plane))
    finally:
        processes.close()


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "in-step"])
def test_process_namespaces_of_their_own(inside: bool) -> None:
    """As between containers that share the network namespace and see both GPUs. ``Pairing.plane`` lets D take no other
    plane."""
    need_namespaces()
    processes = RankProcesses(GPUS, RemoteApart)
    try:
        check(
            processes, Pairing(Model(heads=4), Form(), Form(tp=2), tokens=200, plane="cuda_ipc", seed=7), inside=inside
        )
    finally:
        processes.close()


@pytest.mark.parametrize("fault", ["wrong element on P", "stray element on D"])
def test_planted_damage_is_noticed(processes: RankProcesses, fault: str) -> None:
    pairing = Pairing(Model(heads=4), Form(), Form(tp=2), plane="cuda_ipc")
    assert any("1 of" in line and "differ" in line for line in compare(pairing, processes.run(pairing, fault=fault)))


@pytest.mark.parametrize("plane", GPU_PLANES)
@pytest.mark.parametrize("p", [Form(), Form(tp=2)], ids=str)
def test_what_a_step_computes_with(processes: RankProcesses, plane: str, p: Form) -> None:
    """Its device waits for copies that are late, while its thread goes on."""
    check(processes, Pairing(Model(), p, Form(layout="BLHNC"), tokens=200, plane=plane, seed=7), inside=True)


def test_a_device_that_does_not_wait_is_noticed(processes: RankProcesses) -> None:
    pairing = Pairing(Model(), Form(), Form(), tokens=200, plane="cuda_ipc", seed=7)
    complaints = compare(pairing, processes.run(pairing, inside=True, fault="device does not wait"))
    assert any("elements differ" in line for line in complaints)
