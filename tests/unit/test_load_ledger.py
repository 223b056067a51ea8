"""The ledger of a rank: every posted id is reported exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads.load_ledger import LoadLedger
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, PeerEngine

P = PeerEngine("p", 1, 1, 30.0, ())


def load(request_id: str, *, now: bool = False) -> Load:
    return Load(request_id, b"t" * 16, P, (), (), now=now)


def test_a_log_line_has_the_names_of_some() -> None:
    ledger = LoadLedger()
    ledger.post([load("a")], ())
    assert ledger.names() == "a"
    ledger.post([load(str(n)) for n in range(10)], ())
    assert ledger.names().endswith("6 and 3 more")


def test_loads_of_which_the_pages_go_are_cancelled_whether_they_had_ended_or_not() -> None:
    ledger = LoadLedger()
    loads = [load("a"), load("b")]
    ledger.post(loads, ())
    ledger.load_ended(loads[0], LoadEnd())
    ledger.pages_gone()
    results = ledger.take_results()
    assert results.failed == {"a", "b"} and {end.failed for end in results.ends.values()} == {"cancelled"}


NAMES = "ab"
WHAT = ["post", "post", "lease", "freed", "ended", "earlier", "take", "take", "thread"]
act = st.tuples(st.sampled_from(WHAT), st.sampled_from(NAMES), st.booleans())


@given(st.lists(act, max_size=60))
def test_whatever_happens_every_id_is_reported_once(script: list[tuple[str, str, bool]]) -> None:
    ledger = LoadLedger()
    owed: dict[str, Load] = {}  # posted, and not taken
    ended: dict[str, bool] = {}  # whether it arrived
    leased: set[str] = set()

    def take() -> None:
        results = ledger.take_results()
        assert results.received == ended.keys() and results.failed == {name for name, ok in ended.items() if not ok}
        assert {name: not end.failed for name, end in results.ends.items()} == ended
        for name in results.received:
            del owed[name]
        ended.clear()
        assert results.sent <= leased
        leased.difference_update(results.sent)

    for what, name, flag in script:
        if what == "post" and name not in owed:
            owed[name] = load(name)
            ledger.post([owed[name]], ())
        elif what == "ended":
            ledger.load_ended(owed.get(name) or load(name), LoadEnd() if flag else LOST)
            if name in owed:
                ended.setdefault(name, flag)
        elif what == "earlier":
            ledger.load_ended(load(name, now=flag), LoadEnd() if flag else LOST)
        elif what == "lease" and name not in leased:
            leased.add(name)
            ledger.post((), [name])
        elif what == "freed":
            ledger.lease_freed(name)
        elif what == "thread":
            ledger.thread_ended()
            ended |= {each: ended.get(each, False) for each in owed}
        elif what == "take":
            take()
    ledger.thread_ended()
    ended |= {each: ended.get(each, False) for each in owed}
    take()
    assert not owed and not leased and not ledger.owes
