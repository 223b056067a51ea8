"""Reads in the order in which P computes: the same elements as before, window by window, within the bounds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry import read_plan
from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.read_plan import STREAM_PARTS, PlannedSpan, in_windows, part_bytes
from kvferry.connector.geometry.spans import MAX_RANGES, MAX_SPANS, check_spans, cut_span
from kvferry.connector.geometry.token_sharding import num_common_tokens
from tests.unit.labelled_model import CONTENT, Model
from tests.unit.test_read_plan import forms, models, rank
from tests.unit.whole_plan import plan_all

Element = tuple[int, int, int, int, int, int]


def elements(planned: Sequence[PlannedSpan]) -> list[Element]:
    """(P's region, D's region, P's layer, P's head, offset to D's layer, token) of all of them, sorted."""
    found = []
    for item in planned:
        span = item.span
        for layer in range(span.layer, span.layer + span.num_layers):
            for head in range(span.head, span.head + span.num_heads):
                for token in range(span.token, span.token + span.num_tokens):
                    if num_common_tokens(item.shard, span.shard, token, token + 1):
                        found.append((span.region, item.region, layer, head, item.layer - span.layer, token))
    return sorted(found)


def check(planned: Sequence[PlannedSpan], remote: RankGeometry, found: int, step: int, stop: int) -> None:
    ordered = in_windows(planned, remote, found, step)
    spans = [item.span for item in ordered]
    check_spans(spans, remote, stop)  # none without tokens of this rank, none through a tile, not too many ranges
    assert elements(ordered) == elements(planned)
    assert len(ordered) <= MAX_SPANS
    starts = [span.token for span in spans]
    assert starts == sorted(starts), "P has computed all of the earlier windows when it computes the next one"
    cuts = {token for token in starts if token > found} - {item.span.token for item in planned}
    assert all((cut - found) % step == 0 for cut in cuts)


@settings(max_examples=60, deadline=None)
@given(st.one_of(models(), st.sampled_from([1, 2, 3])), st.integers(0, 40), st.integers(1, 30), st.data())
def test_a_plan_keeps_its_elements(model: Model | int, found: int, step: int, data: st.DataObject) -> None:
    """Also where ranks share out the tokens: then ``model`` is the number of heads."""
    if isinstance(model, Model):
        d_tp, p_tp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        local = model.rank((data.draw(st.integers(0, d_tp - 1)), d_tp), (0, 1), 16)
        remotes = {(0, r): model.rank((r, p_tp), (0, 1), 32) for r in range(p_tp)}
    else:
        p, d = data.draw(forms(model)), data.draw(forms(model))
        local, remotes = rank(d, 0, model), {(0, r): rank(p, r, model) for r in range(p[0])}
    start = data.draw(st.integers(0, 30))
    stop = start + data.draw(st.integers(1, 60))
    for place, planned in plan_all(local, remotes, [(start, stop)] * len(local.regions)).items():
        check(planned, remotes[place], found, step, stop)


ONE = Model(("full",) * 4, 2, False)


def windows_of(tokens: int, found: int, step: int, remote: RankGeometry | None = None) -> list[tuple[int, int]]:
    remote = remote or ONE.rank((0, 1), (0, 1), 16)
    ((_, planned),) = plan_all(remote, {(0, 0): remote}, [(0, tokens)]).items()
    return [(item.span.token, item.span.num_tokens) for item in in_windows(planned, remote, found, step)]


def test_windows_end_where_the_steps_of_p_do() -> None:
    assert windows_of(100, 0, 32) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert windows_of(100, 48, 32) == [(0, 48), (48, 32), (80, 20)]
    assert windows_of(100, 100, 32) == windows_of(100, 200, 32) == windows_of(100, 0, 100) == [(0, 100)]


def test_a_region_is_cut_between_tiles() -> None:
    remote = ONE.rank((0, 1), (0, 1), 16)
    (region,) = remote.regions
    packed = msgspec.structs.replace(region, packing="amx", tile_tokens=8)
    remote = msgspec.structs.replace(remote, regions=(packed,))
    assert windows_of(40, 5, 14, remote) == [(0, 16), (16, 16), (32, 8)]


@pytest.mark.parametrize(("name", "bound"), [("MAX_SPANS", 12), ("MAX_RANGES", 12), ("MAX_WINDOWS", 12)])
def test_a_long_prompt_has_longer_windows(monkeypatch: pytest.MonkeyPatch, name: str, bound: int) -> None:
    monkeypatch.setattr(read_plan, name, bound)
    windows = windows_of(10_000, 100, 10)
    assert 2 < len(windows) <= bound and {length % 10 for _, length in windows} == {0}
    monkeypatch.setattr(read_plan, name, 1)
    assert windows_of(10_000, 100, 10) == [(0, 10_000)]


def test_the_bounds_hold_for_the_longest_prompts() -> None:
    assert len(windows_of(1 << 20, 0, 1)) <= min(MAX_RANGES, MAX_SPANS)


def test_the_layers_of_a_window_are_several_messages() -> None:
    model = Model(("full",) * 32, 2, False)
    remote = model.rank((0, 1), (0, 1), 16)
    ((_, planned),) = plan_all(remote, {(0, 0): remote}, [(0, 64)]).items()
    room = part_bytes(in_windows(planned, remote, 0, 32), remote)
    assert len(cut_span(in_windows(planned, remote, 0, 32)[0].span, CONTENT, room)) == STREAM_PARTS
