"""Prometheus' text, and the figures of two pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.top.figures import EngineFigures, Histogram, Sample, row, samples
from kvferry.transport.errors import ProtocolError
from tests.top.pages import recorded

LABEL = st.text(st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8)


def escaped(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), LABEL, max_size=3), st.floats(allow_nan=False))
def test_a_sample_is_read_as_it_was_written(labels, value):
    inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    text = f"# HELP x y\n\nvllm:x_total{{{inside}}} {value!r} 1700000000\n"
    assert list(samples(text)) == [Sample("vllm:x_total", labels, value)]


def test_numbers_of_prometheus():
    values = [sample.value for sample in samples("a 1\nb 1.5e+06\nc +Inf\nd NaN")]
    assert values[:3] == [1, 1.5e6, math.inf] and math.isnan(values[3])


@pytest.mark.parametrize("line", ["<html>", "a", 'a{b="c" 1', "a{b=c} 1", "a one", 'a{b="c"x="d"} 1'])
def test_a_page_of_something_else(line):
    with pytest.raises(ProtocolError, match="line 2 is no sample"):
        list(samples(f"x 1\n{line}\n"))


def histogram(**counts):
    buckets = {float(bound.removeprefix("b").replace("_", ".")): count for bound, count in counts.items()}
    return Histogram(type(Histogram().buckets)(buckets), max(buckets.values()))


def test_quantiles_are_linear_inside_a_bucket():
    found = histogram(b1=0, b2=10, binf=10)
    assert found.quantile(0.5) == 1.5 and found.quantile(0.95) == pytest.approx(1.95)
    assert histogram(b1=4, b2=4, b4=8, binf=8).quantile(0.75) == 3.0
    assert histogram(b1=0, binf=5).quantile(0.5) == 1.0, "the last bucket has no upper bound"
    assert Histogram().quantile(0.5) is None


def test_a_counter_that_became_smaller_begins_anew():
    before, after = histogram(b1=9, binf=9), histogram(b1=2, binf=3)
    assert after.since(before).count == 3 and before.since(after).count == 6


def figures(name):
    return EngineFigures.of(samples(recorded(name)))


def test_hand_overs_of_a_decode_engine_and_leases_of_a_prefill_engine():
    before, now = figures("decode_1"), figures("decode_2")
    found = row("d", before, before, now, seconds=6.0)
    (plane,) = found.planes
    assert plane.plane == "cma" and plane.handovers_per_second == 2.0, "12 hand-overs in 6 s"
    assert plane.bytes_per_second > 1e5 and plane.p50_ms is not None and plane.p95_ms is not None
    assert 0 < plane.p50_ms <= plane.p95_ms < 30_000
    assert found.failed == found.retried == {} and found.leases_released == 0 and found.model
    before, now = figures("prefill_1"), figures("prefill_2")
    found = row("p", before, before, now, seconds=6.0)
    assert found.planes == () and found.leases_released_per_second == 2.0
    assert found.leases_released >= 12 and found.leases_expired == 0


def test_failures_and_retries_by_reason_and_two_engines_of_a_page():
    text = "".join(
        f'vllm:kvferry_num_failed_handovers_total{{engine="{engine}",reason="timeout"}} 2\n'
        f'vllm:kvferry_num_failed_handovers_total{{engine="{engine}",reason="data"}} 0\n'
        f'vllm:kvferry_num_retries_total{{engine="{engine}",reason="plane"}} 1\n'
        f'vllm:kvferry_num_expired_leases_total{{engine="{engine}",reason="cap"}} 3\n'
        f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} 4\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="deferred"}} 1\n'
        for engine in (0, 1)
    )
    now = EngineFigures.of(samples(text))
    found = row("e", EngineFigures(), now, now, 1.0)
    assert found.failed == {"timeout": 4} and found.retried == {"plane": 2} and found.leases_expired == 6
    assert (found.running, found.deferred, found.model) == (8, 2, "m")
