"""The self-test, for real between two processes, and with faults of a rank."""

from __future__ import annotations

import pytest
import torch

from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.planes import PlaneOnDevice, self_test
from kvferry.cli.rank_pair import CacheForm, PairRank
from tests.doctor.odd_rank import OddRank
from tests.doctor.planted import is_bad


def run(*planes: str, kind: type[PairRank] = PairRank, seconds: float = 800.0):
    tested = [PlaneOnDevice(plane, torch.device("cpu")) for plane in planes]
    return list(self_test("127.0.0.1", tested, kind=kind, form=CacheForm(tokens=128), seconds=seconds, rounds=1))


def test_each_plane_brings_every_byte_also_after_one_that_no_rank_can_have():
    none, *found = run("cuda_ipc", "cma", "shm", "tcp", "zmq")
    is_bad(none, Level.FAULT, "plane: 'cuda_ipc' cannot be used")
    assert [finding.what.partition(",")[0] for finding in found] == ["cma", "shm", "tcp", "zmq"]
    assert [finding.level for finding in found] == [Level.OK] * 4, found
    assert all("GB/s; each of 2 MiB is right" in finding.value for finding in found)


@pytest.mark.ucx
def test_ucx_brings_every_byte():
    pytest.importorskip("ucxx")
    (finding,) = run("ucx")
    assert finding.level is Level.OK, finding


def test_one_flipped_bit_and_a_rank_that_ends_are_seen_and_the_next_plane_is_tested():
    flipped, died, good = run("shm", "tcp", "zmq", kind=OddRank)
    is_bad(flipped, Level.FAULT, "2 of 2097152 bytes arrived wrong")  # one in each of two hand-overs
    is_bad(died, Level.FAULT, "has ended with status -9")
    assert good.level is Level.OK


def test_a_rank_that_does_not_answer():
    (finding,) = run("shm", seconds=0.01)
    is_bad(finding, Level.FAULT, "no answer in time")
