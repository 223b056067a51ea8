"""The self-test, for real between two processes, and with a fault of a rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.planes import PlaneOnDevice, self_test
from kvferry.cli.rank_pair import CacheForm
from tests.doctor.planted import is_bad

SMALL = CacheForm(tokens=128)
CPU = torch.device("cpu")
ODD = str(Path(__file__).with_name("odd_rank.py"))


def run(fault: str, *planes: str, seconds: float = 800.0):
    program, tested = (sys.executable, ODD, fault), [PlaneOnDevice(plane, CPU) for plane in planes]
    return list(self_test("127.0.0.1", tested, program=program, form=SMALL, seconds=seconds, rounds=1))


def test_each_plane_brings_every_byte_also_after_one_that_no_rank_can_have():
    none, *found = run("", "cuda_ipc", "cma", "shm", "tcp", "zmq")
    is_bad(none, Level.FAULT, "plane: 'cuda_ipc' cannot be used")
    assert [finding.what.partition(",")[0] for finding in found] == ["cma", "shm", "tcp", "zmq"]
    assert [finding.level for finding in found] == [Level.OK] * 4, found
    assert all("GB/s; each of 2 MiB is right" in finding.value for finding in found)


@pytest.mark.ucx
def test_ucx_brings_every_byte():
    pytest.importorskip("ucxx")
    (finding,) = run("", "ucx")
    assert finding.level is Level.OK, finding


def test_one_flipped_bit_is_seen_and_the_next_plane_is_tested():
    flipped, good = run("flip", "shm", "tcp")
    is_bad(flipped, Level.FAULT, "2 of 2097152 bytes are wrong")  # one in each of two hand-overs
    assert good.level is Level.OK


def test_a_rank_that_ends_and_the_next_plane_is_tested():
    died, good = run("die", "shm", "tcp")
    is_bad(died, Level.FAULT, "has ended with status -9")
    assert good.level is Level.OK


def test_a_rank_that_hangs():
    begin = time.monotonic()
    (finding,) = run("hang", "shm", seconds=20.0)
    is_bad(finding, Level.FAULT, "no answer in time")
    assert time.monotonic() - begin < 500, "it would sleep for longer"
