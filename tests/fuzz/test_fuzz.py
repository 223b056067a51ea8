"""A slice of the fuzzing, what it found once, and that it sees what it must not pass over."""

from __future__ import annotations

import math
from pathlib import Path

from tests.fuzz import in_process, ports
from tests.fuzz.decoders import every_decoder
from tests.fuzz.honest import FOUND
from tests.fuzz.in_process import Outcome, judge

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


def test_ports() -> None:
    """P's; D's are the same in other processes, and in the whole run."""
    names = ["control port", "control port, with the key", "zmq data port", "shm socket"]
    chosen = [target for target in ports.targets() if target.name in [f"{name} of P" for name in names]]
    found = ports.fuzz(SEED, 250 * len(chosen), math.inf, chosen)
    assert {name: outcome.failures for name, outcome in found.items()} == {target.name: {} for target in chosen}
    assert all(outcome.inputs >= 250 for outcome in found.values())
