"""A step that computes with its load, as in ``test_gpus.py``, on a host whose copies are late as a GPU's are."""

from __future__ import annotations

import pytest

from tests.ranks.compare import check, compare
from tests.ranks.matrix import PLANES
from tests.ranks.pairing import Form, Model, Pairing
from tests.ranks.rank_processes import RankProcesses
from tests.transport.plane_list import PUSH, host_planes


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
