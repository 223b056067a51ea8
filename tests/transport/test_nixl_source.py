"""When D closes NIXL's connection to a P."""

from __future__ import annotations

import pytest

from kvferry.transport.planes.nixl_messages import NixlSlots
from kvferry.transport.planes.nixl_source import TRANSITIONS, NixlSource, SourceEvent, SourcePhase


def source(channels: int) -> NixlSource:
    made = NixlSource("p", NixlSlots(4096, 4096, 1, 8, None), 0)
    for _ in range(channels):
        made.join()
    return made


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == {(phase, event) for phase in SourcePhase for event in SourceEvent}


def test_after_a_good_end_the_connection_stays() -> None:
    p = source(1)
    p.leave(lives_on=True)
    assert (p.phase, p.unused) == (SourcePhase.SERVING, True)
    p.discard()
    assert p.phase is SourcePhase.CLOSED


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_one_lost_channel_closes_the_connection_once_it_is_unused(order: tuple[bool, bool]) -> None:
    p = source(2)
    p.begin_read()
    for lives_on in order:
        p.leave(lives_on=lives_on)
        assert p.phase in (SourcePhase.SERVING, SourcePhase.DOUBTED), "a READ is under way"
    p.end_read()
    assert p.phase is SourcePhase.CLOSED


def test_an_answer_of_p_ends_the_doubt() -> None:
    p = source(2)
    p.leave(lives_on=False)
    p.join()
    for _ in range(2):
        p.leave(lives_on=True)
    assert p.phase is SourcePhase.SERVING


def test_a_failed_read_closes_the_connection_whatever_follows() -> None:
    p = source(2)
    p.begin_read()
    p.break_off()
    for _ in range(2):
        p.leave(lives_on=True)
    assert [p.phase] == [SourcePhase.BROKEN]
    p.end_read()
    assert p.phase is SourcePhase.CLOSED
