"""The leases that D keeps: renewed while needed, released exactly once, after the last request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.renew import LeaseRenewal, LeaseRenewals
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress

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
        link = SimpleNamespace(start_greeting=lambda now: None, send=lambda m: self.sent.append(type(m).__name__))
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
