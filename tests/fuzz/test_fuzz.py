"""A slice of the fuzzing, what it found once, and that it sees what it must not pass over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.transport.errors import ProtocolError
from tests.fuzz import in_process, ports
from tests.fuzz.decoders import every_decoder
from tests.fuzz.honest import FOUND, Decoder
from tests.fuzz.in_process import Outcome, judge
from tests.support.turns import MOST_TURN_SECONDS

SEED = 20261123


def test_decoders() -> None:
    found = in_process.fuzz(SEED, 20_000, math.inf)
    assert not {name: outcome.failures for name, outcome in found.items() if outcome.failures}
    assert sum(outcome.inputs for outcome in found.values()) >= 20_000
    quiet = {name for name, outcome in found.items() if not outcome.accepted}
    assert quiet <= {"shm attach at P"}, f"{quiet}: no input passed, so little was tried"


def test_what_was_found_once(tmp_path: Path) -> None:
    with every_decoder(tmp_path) as decoders:
        assert set(FOUND) <= {decoder.name for decoder in decoders}
        for decoder in decoders:
            outcome = Outcome()
            for data in (*FOUND.get(decoder.name, ()), *decoder.corpus):
                judge(decoder, data, outcome)
            assert not outcome.failures, decoder.name


def slow(data: bytes) -> None:
    begun = time.thread_time()
    while time.thread_time() < begun + 1.2 * MOST_TURN_SECONDS:
        pass


def large(data: bytes) -> None:
    bytearray(1 << 30)  # so much that no memory which this process has freed before is enough


def wrong(data: bytes) -> None:
    raise KeyError(data)


def refuses(data: bytes) -> None:
    raise ProtocolError("documented")


@pytest.mark.parametrize(
    ("run", "seen"),
    [
        (slow, "slow"),
        (large, "memory"),
        (wrong, "KeyError in test_fuzz.py"),
        (refuses, ""),
    ],
)
def test_faults_are_seen(run: Callable[[bytes], None], seen: str) -> None:
    _, outcome = next(in_process.rounds([Decoder("planted", [b"corpus"], run)], SEED, 2))
    found = {kind.partition(":")[0] for kind in outcome.failures}
    assert found == ({seen} if seen else set()) and outcome.inputs == 2


def test_ports() -> None:
    """P's; D's are the same in other processes, and in the whole run."""
    names = ["control port", "control port, with the key", "zmq data port", "shm socket"]
    chosen = [target for target in ports.targets() if target.name in [f"{name} of P" for name in names]]
    found = ports.fuzz(SEED, 250 * len(chosen), math.inf, chosen)
    assert {name: outcome.failures for name, outcome in found.items()} == {target.name: {} for target in chosen}
    assert all(outcome.inputs >= 250 for outcome in found.values())
