"""The transfer thread leaves the interpreter to the engine's threads in a step with loads; no peer waits for that."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import link
from kvferry.connector.step_loads import step_outcome
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.gates import PATIENT
from tests.handover.opening import OURS, THEIRS, TOKENS
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import install
from tests.support.inside import leases_of, thread_of, yields
from tests.support.ranks import Rank, grant, load_plan, peer, wait

OTHERS = [block + 12 for block in OURS]


def no_board(*place: object) -> None:
    """In place of ``link.BoardReader``: a D that reads P's pages by itself then asks for them."""
    raise OSError(24, "Too many open files")


def leased(p: Rank, name: str) -> bytes:
    token, thread = grant([p], f"{name}-p", THEIRS, TOKENS), thread_of(p)
    assert thread is not None and wait(lambda: token in leases_of(thread))
    return token


def hand_over(p: Rank, d: Rank, name: str, token: bytes) -> None:
    d.worker.post(load_plan(f"{name}-d", token, peer([p], engine_id=name), OTHERS, 0, TOKENS))
    assert wait(lambda: f"{name}-d" in d.received and f"{name}-p" in p.sent, [p, d]) and not d.failed
    assert torch.equal(d.read(OTHERS, TOKENS), d.wanted(TOKENS))
    p.sent.clear(), d.received.clear()


def test_a_control_message_ends_the_wait(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is P and D: another D asks it while it loads inside a step. Its thread would wait for ten minutes."""
    copies = install(monkeypatch)
    monkeypatch.setattr(step_outcome, "YIELD_SECONDS", 600.0)
    monkeypatch.setattr(CmaChannel, "read", lambda self, request: request.launch())  # on a stream, as cuda_ipc reads
    settings = Settings(plane="cma", **PATIENT)
    p, both, d = (group.rank(settings=settings, engine_id=name) for name in ("first", "second", "third"))
    for rank in (p, both):
        rank.fill(THEIRS, TOKENS)
    hand_over(p, both, "first", leased(p, "first"))
    monkeypatch.setattr(link, "BoardReader", no_board)  # so that D asks
    hand_over(both, d, "second", leased(both, "second"))

    step, asked = leased(p, "step"), leased(both, "second")
    copies[1].gate.clear()
    both.worker.post(load_plan("step-d", step, peer([p], engine_id="first"), OURS, 0, TOKENS, now=True))
    both.worker.begin_step()
    outcome = both.worker.take_outcome()
    assert outcome is not None and wait(lambda: yields(both))
    hand_over(both, d, "second", asked)
    assert copies[1].running, "the load is still under way"
    copies[1].gate.set()
    assert outcome.standing() == {"step-d"}
