"""A prompt and its lease: on P ended once, after its own reads; on D renewed while needed."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.renew import LeaseRenewal, LeaseRenewals
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.prefill_side.prompts import PREEMPTED_SECONDS, Prompt, PromptPart, PromptState, rank_set
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, pack_ids
from tests.support.ranks import Timed

S = Timed(lease_seconds=30, lease_cap_seconds=100)
D1, D2 = b"d1", b"d2"
Begin = Callable[[], Prompt]


def new() -> Prompt:
    return Prompt(b"t" * 16, "r", [np.zeros(0, np.int64)], (b"",), num_tokens=100)


def granted(now: float = 0.0) -> Prompt:
    prompt = new()
    prompt.hold(S, now)
    return prompt


def lent() -> Prompt:
    prompt = new()
    prompt.blocks, prompt.lent, prompt.computed = PromptBlocks(), True, 100
    prompt.hold(S, 0.0)
    return prompt


def release(prompt: Prompt, rank: int, *expected: int, of: bytes = D1) -> bool:
    return prompt.released(of, rank, rank_set(expected))


def computes(prompt: Prompt, blocks: PromptBlocks, stop: int = 100) -> PromptPart:
    """A step begins that computes tokens of the prompt."""
    prompt.place(blocks, [np.arange(1)], (pack_ids([0]),))
    prompt.parts.append(PromptPart(0, stop, blocks))
    return prompt.parts[-1]


BOTH = pytest.mark.parametrize("begin", [granted, lent])


# --- the lease --------------------------------------------------------------------------------------------------------
@BOTH
def test_a_lease_ends_when_one_consumers_full_set_has_released(begin: Begin) -> None:
    prompt = begin()
    prompt.asked(D1, rank_set([0, 1]))
    assert not release(prompt, 0, 0, 1) and not release(prompt, 0, 0, 1)
    assert release(prompt, 1, 0, 1)
    prompt = begin()  # the first ask fixes the set, and decode engines do not mix
    prompt.asked(D1, rank_set([0, 1]))
    prompt.asked(D1, rank_set([0]))
    assert not release(prompt, 0, 0) and not release(prompt, 0, 0, 1, of=D2)
    assert release(prompt, 1, 0, 1, of=D2)
    assert release(begin(), 0, 0), "of a rank that never asked"


@BOTH
def test_renewal_extends_up_to_the_cap(begin: Begin) -> None:
    prompt = begin()
    prompt.renew(S, 20)
    assert (prompt.deadline, prompt.cap) == (50, 100)
    for now in range(0, 100, 10):
        prompt.renew(S, now)
    assert prompt.deadline == 100


@BOTH
def test_what_ends_does_so_after_its_reads(begin: Begin) -> None:
    prompt = begin()
    prompt.reads = 2
    prompt.end("reset")
    assert prompt.state is PromptState.DRAINING and not (prompt.leased or prompt.whole)
    prompt.renew(S, 20)
    assert math.isinf(prompt.deadline)
    assert [prompt.read_ended(), prompt.read_ended()] == [False, True]
    prompt = begin()
    prompt.end("reset")
    assert prompt.state is PromptState.ENDED


# --- before the lease -------------------------------------------------------------------------------------------------
class Call(enum.Enum):
    STEP = "a step computes into the present blocks"
    RESTART = "a step computes into new blocks"
    LOSE = "the engine's thread takes the blocks back"
    PREEMPT = "the transfer thread hears so"
    ADVANCE = "a step ends"


@given(st.lists(st.tuples(st.sampled_from(Call), st.integers(0, 100)), max_size=40))
def test_tokens_count_in_the_present_blocks_only(script: list[tuple[Call, int]]) -> None:
    """Whatever the order, and the step that ends."""
    prompt, parts, written = new(), [], dict[PromptBlocks | None, int]()
    for call, number in script:
        match call:
            case Call.STEP if prompt.blocks is not None and not prompt.preempted:
                parts.append(computes(prompt, prompt.blocks, number))
            case Call.RESTART:
                parts.append(computes(prompt, PromptBlocks(), number))
            case Call.LOSE if prompt.blocks is not None:
                prompt.blocks.lose()
            case Call.PREEMPT:
                prompt.preempt(1.0)
                assert prompt.deadline == 1.0 + PREEMPTED_SECONDS
            case Call.ADVANCE if parts:
                part = parts[number % len(parts)]
                counts = prompt.advance(part, part.stop)
                assert counts == (part.blocks is prompt.blocks and not part.blocks.lost)
                if counts:
                    written[part.blocks] = max(written.get(part.blocks, 0), part.stop)
        assert prompt.computed in (0, written.get(prompt.blocks, 0))
        assert not prompt.whole or (prompt.computed == 100 and prompt.intact)
    prompt.hold(S, 2.0)
    assert prompt.deadline == 32.0 and prompt.granted and not prompt.preempted
    assert not parts or not prompt.advance(parts[-1], 100), "the blocks are P's now"


TOKEN = b"t" * 16
PEER = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "host", 1, b""),))
"""Renewals are due every 10 s."""


class Keeper:
    """``LeaseRenewals`` whose messages are noted, in the place of a transfer thread."""

    def __init__(self) -> None:
        topology = SimpleNamespace(release_ranks=lambda: [0], expected_consumers=lambda rank: (0,))
        geometry = SimpleNamespace(pp_rank=0, tp_rank=0, tp_size=1)
        context: Any = SimpleNamespace(caches=SimpleNamespace(geometry=geometry), topology=lambda peer: topology)
        self.sent: list[str] = []
        link = SimpleNamespace(send=lambda m: self.sent.append(type(m).__name__))
        links: Any = SimpleNamespace(get=lambda address, now: link)
        self._deadlines = Deadlines[LeaseRenewal](lambda renewal: renewal.due)
        self.leases = LeaseRenewals(context, links, self._deadlines)

    def keep(self, *requests: str, siblings: bool = False, now: float = 0.0) -> None:
        for request in requests:
            self.leases.keep(TOKEN, PEER, request, now, siblings=siblings)

    def tick(self, now: float) -> list[str]:
        """What is sent."""
        for renewal in self._deadlines.due(now):
            self.leases.on_due(renewal, now)
        self.leases.send_renewals(now)
        return self.taken()

    def taken(self) -> list[str]:
        sent, self.sent[:] = self.sent[:], []
        return sent


@pytest.mark.parametrize("siblings", [False, True])
def test_renewals_come_at_their_interval(siblings: bool) -> None:
    keeper = Keeper()
    keeper.keep("a", siblings=siblings)
    sent = [keeper.tick(now) for now in (9.9, 10.0, 10.1, 19.9, 20.0)]
    assert sent == [[], ["Renew"], [], [], ["Renew"]]
    if siblings:
        keeper.leases.release(TOKEN, "a", 20.1)
    keeper.leases.renew_now()
    assert keeper.tick(20.2) == ["Renew"], "after a stand-still"


def test_a_lease_of_another_prompt_is_left_alone() -> None:
    keeper = Keeper()
    keeper.keep("a")
    keeper.leases.disown(TOKEN, "b")
    assert keeper.leases.kept
    keeper.leases.disown(TOKEN, "a")
    assert not keeper.leases.kept and keeper.tick(100.0) == []


CALLS = st.tuples(st.sampled_from(["keep", "keep", "release", "release", "late", "tick"]), st.sampled_from("abc"))


@given(st.lists(st.tuples(CALLS, st.booleans(), st.floats(0, 20)), max_size=60))
def test_one_release_and_no_renewal_after_it(script: list[tuple[tuple[str, str], bool, float]]) -> None:
    keeper, now, wanted, kept = Keeper(), 0.0, set[str](), False
    for (call, name), siblings, seconds in script:
        now += seconds
        match call:
            case "keep":
                keeper.keep(name, siblings=siblings, now=now)
                wanted, kept = wanted | {name}, True
            case "release":
                keeper.leases.release(TOKEN, name, now)
                wanted.discard(name)
            case "late":
                keeper.leases.renew_now()
        sent = keeper.taken() + (keeper.tick(now) if call == "tick" else [])
        assert kept or not sent
        assert not ("Release" in sent and wanted), "somebody still needs it"
        kept = kept and messages.Release.__name__ not in sent
        assert kept == (TOKEN in keeper.leases.kept) and sent.count("Release") <= 1
        if kept:
            assert keeper.leases.kept[TOKEN].requests == wanted
