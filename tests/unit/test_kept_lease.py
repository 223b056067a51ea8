"""D's machine of a lease that it keeps: renewed while needed, released exactly once, after its last request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import kept_lease as kl
from kvferry.connector.wire.states import Tick

PHASE = kl.KeptLeasePhase


def run(
    state: kl.KeptLease, *events: kl.KeptLeaseEvent, now: float = 1
) -> tuple[kl.KeptLease, list[kl.KeptLeaseEffect]]:
    effects: list[kl.KeptLeaseEffect] = []
    for event in events:
        state, new = kl.KEPT_LEASE.step(state, event, now)
        effects += new
    return state, effects


def kept(*requests: str, siblings: bool = False) -> kl.KeptLease:
    state = kl.keep_lease(0, interval=10, sibling_seconds=0.5)
    return run(state, *(kl.LeaseWanted(request, siblings) for request in requests))[0]


def test_the_last_request_releases() -> None:
    state, effects = run(kept("a", "b"), kl.LeaseUnwanted("a"), kl.LeaseUnwanted("a"))
    assert (state.phase, effects) == (PHASE.NEEDED, [])
    state, effects = run(state, kl.LeaseUnwanted("b"))
    assert (state.phase, effects) == (PHASE.RELEASED, [kl.SendRelease()])


def test_renewals_come_at_their_interval() -> None:
    state = kept("a")
    assert run(state, Tick(), now=9.9) == (state, [])
    state, effects = run(state, Tick(), Tick(), now=10)
    assert effects == [kl.SendRenewal()]
    assert run(state, Tick(), now=19.9)[1] == []
    assert run(state, Tick(), now=20)[1] == [kl.SendRenewal()]


@pytest.mark.parametrize("siblings", [False, True])
def test_after_a_stand_still_the_next_tick_renews(siblings: bool) -> None:
    state = kept("a", siblings=siblings)
    if siblings:
        state, _ = run(state, kl.LeaseUnwanted("a"), now=1)
    assert run(state, kl.RenewalOverdue(), Tick(), now=1.1)[1] == [kl.SendRenewal()]


def test_a_lease_waits_for_siblings_and_is_renewed_meanwhile() -> None:
    state, effects = run(kept("0_a", siblings=True), kl.LeaseUnwanted("0_a"), now=9.8)
    assert (state.phase, effects) == (PHASE.WAITING_FOR_SIBLINGS, [])
    state, effects = run(state, Tick(), now=10.1)
    assert (state.phase, effects) == (PHASE.WAITING_FOR_SIBLINGS, [kl.SendRenewal()])
    joined, effects = run(state, kl.LeaseWanted("1_a", False), Tick(), now=10.2)
    assert (joined.phase, effects) == (PHASE.NEEDED, [])
    assert run(joined, kl.LeaseUnwanted("1_a"))[0].phase is PHASE.WAITING_FOR_SIBLINGS, "a third may follow"
    state, effects = run(state, Tick(), now=10.3)
    assert (state.phase, effects) == (PHASE.RELEASED, [kl.SendRelease()])


@pytest.mark.parametrize("siblings", [False, True])
def test_the_end_of_the_engine_releases(siblings: bool) -> None:
    state = kept("a", "b", siblings=siblings)
    if siblings:
        state, _ = run(state, kl.LeaseUnwanted("a"), kl.LeaseUnwanted("b"))
    assert run(state, kl.KeepingEnded(), kl.KeepingEnded())[1] == [kl.SendRelease()]


def test_nothing_joins_a_released_lease() -> None:
    state, _ = run(kept("a"), kl.LeaseUnwanted("a"))
    with pytest.raises(AssertionError, match="released"):
        run(state, kl.LeaseWanted("b", False))


names = st.sampled_from("abc")
any_event = st.one_of(
    st.builds(kl.LeaseWanted, names, st.booleans()),
    st.builds(kl.LeaseUnwanted, names),
    st.just(kl.RenewalOverdue()),
    st.just(kl.KeepingEnded()),
    st.just(Tick()),
)


@given(st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=60))
def test_one_release_and_no_renewal_after_it(script: list[tuple[kl.KeptLeaseEvent, float]]) -> None:
    now, state, seen, wanted = 0.0, kept("a"), list[kl.KeptLeaseEffect](), {"a"}
    for event, seconds in script:
        now += seconds
        if isinstance(event, kl.LeaseWanted):
            if state.phase is PHASE.RELEASED:
                continue  # its owner keeps a new lease then
            wanted.add(event.request_id)
        elif isinstance(event, kl.LeaseUnwanted):
            wanted.discard(event.request_id)
        elif isinstance(event, kl.KeepingEnded):
            wanted.clear()
        state, effects = kl.KEPT_LEASE.step(state, event, now)
        assert not (kl.SendRelease() in effects and wanted), "somebody still needs it"
        assert not effects or kl.SendRelease() not in seen
        seen += effects
        if state.phase in kl.KEPT:
            assert state.requests == wanted and (state.phase is PHASE.NEEDED) == bool(wanted)
    assert seen.count(kl.SendRelease()) == (state.phase is PHASE.RELEASED)
