"""D's link: the handshake, the next data plane where one is refused, one failure that stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import link as k
from kvferry.connector.decode_side.link import Reason
from kvferry.connector.wire.states import Tick

GONE, AGAIN = Reason("peer_lost", "gone"), Reason("peer_lost", "again")
CHOSEN = (k.HandshakeWanted(), k.PeerWelcomed(), k.PlaneChosen("shm"))


def run(*events: k.LinkEvent, state: k.LinkState | None = None, now: float = 1) -> tuple[k.LinkState, list[object]]:
    state = state or k.LinkState(timeout=10)
    effects: list[object] = []
    for event in events:
        state, new = k.LINK.step(state, event, now)
        effects += new
    return state, effects


def test_the_good_way() -> None:
    state, effects = run(*CHOSEN, k.PlaneAttached("shm", ready=True))
    assert state.phase is k.LinkPhase.ATTACHED and state.plane == "shm"
    assert effects == [k.SendHello(), k.ChoosePlane()]
    assert run(Tick(), state=state, now=1e9)[0] == state, "an attached link has no deadline"


def test_a_release_needs_a_session_and_no_plane() -> None:
    state, effects = run(k.GreetingWanted(), k.GreetingWanted(), k.PeerWelcomed(), k.GreetingWanted())
    assert state.phase is k.LinkPhase.GREETED and effects == [k.SendHello()]
    assert run(Tick(), state=state, now=1e9)[0] == state
    state, effects = run(k.HandshakeWanted(), k.PlaneChosen("shm"), state=state, now=50)
    assert state.phase is k.LinkPhase.ATTACHING and state.deadline == 60 and effects == [k.ChoosePlane()]


def test_a_read_that_comes_while_d_greets_gets_its_plane() -> None:
    state, effects = run(k.GreetingWanted(), k.HandshakeWanted(), k.PeerWelcomed())
    assert state.phase is k.LinkPhase.ATTACHING and effects == [k.SendHello(), k.ChoosePlane()]


def test_memory_that_is_mapped_later() -> None:
    state, _ = run(*CHOSEN, k.PlaneAttached("shm", ready=False))
    assert state.phase is k.LinkPhase.MAPPING
    assert run(k.MemoryMapped(), state=state)[0].phase is k.LinkPhase.ATTACHED


def test_a_refused_plane_is_followed_by_the_next() -> None:
    for event in (k.PlaneRejected("shm", "full"), k.PlaneLost("full")):
        state, effects = run(*CHOSEN, event)
        assert state.phase is k.LinkPhase.ATTACHING and effects[-2:] == [k.DropPlane("shm", "full"), k.ChoosePlane()]
        state, effects = run(k.PlaneRejected("shm", "late"), k.PlaneAttached("shm", ready=True), state=state)
        assert state.phase is k.LinkPhase.ATTACHING and not effects, "the answers concern a plane that was rejected"
        state, _ = run(k.PlaneChosen("tcp"), k.PlaneAttached("tcp", ready=True), state=state)
        assert state.phase is k.LinkPhase.ATTACHED and state.plane == "tcp"


def test_a_plane_that_breaks_later_is_the_end() -> None:
    state, effects = run(*CHOSEN, k.PlaneAttached("shm", ready=True), k.PlaneLost("gone"))
    blamed = Reason("peer_lost", "gone", blames="plane")
    assert state.phase is k.LinkPhase.FAILED and effects[-1] == k.ReportBroken(blamed)


def test_a_handshake_that_takes_too_long() -> None:
    state, _ = run(k.HandshakeWanted())
    assert run(Tick(), state=state, now=10.9)[0] == state
    failed, _ = run(Tick(), state=state, now=11)
    assert failed.reason == Reason(
        "timeout", "no answer to the handshake in 10 s (waiting for the answer to the handshake)", blames="peer"
    )


def test_an_answer_out_of_place() -> None:
    state, _ = run(k.PeerWelcomed())
    assert state.reason == Reason("data", "PeerWelcomed came while connected")


every_event = st.sampled_from([
    k.GreetingWanted(),
    k.HandshakeWanted(), k.PeerWelcomed(), k.PlaneChosen("a"), k.PlaneChosen("b"), k.PlaneAttached("a", ready=True),
    k.PlaneAttached("b", ready=False), k.MemoryMapped(), k.PlaneRejected("a", "no"), k.PlaneLost("gone"),
    k.LinkBroken(GONE), k.LinkBroken(AGAIN), Tick(),
])  # fmt: skip


@given(st.lists(st.tuples(every_event, st.floats(0, 20)), max_size=30))
def test_one_failure_and_it_stays(happenings: list[tuple[k.LinkEvent, float]]) -> None:
    state, broken = k.LinkState(timeout=10), []
    for event, now in happenings:
        before = state
        state, effects = k.LINK.step(state, event, now)
        broken += [effect for effect in effects if isinstance(effect, k.ReportBroken)]
        if before.phase is k.LinkPhase.FAILED:
            assert state == before and not effects
    assert len(broken) == (state.phase is k.LinkPhase.FAILED)
