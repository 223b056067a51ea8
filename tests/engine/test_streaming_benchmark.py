"""``streaming.py`` in small: every way that P offers is measured over the shaped link, at whatever rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines import shaped_link
from tests.engine.conftest import run_benchmark

pytestmark = [pytest.mark.engines, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture
def link() -> None:
    reason = shaped_link.why_not()
    if reason is not None:
        pytest.skip(f"benchmarks/engines/streaming.py {reason}")


@pytest.mark.usefixtures("link")
def test_every_way_has_its_samples(tmp_path: Path) -> None:
    result = run_benchmark(
        "benchmarks/engines/streaming.py", tmp_path, "--device", "cpu", "--small", "--start-seconds", "400"
    )
    rows = {row["way"]: row for row in result["rows"]}
    assert {"P alone", "serial"} <= rows.keys()
    prompt_mib = 400 * result["kv_kib_per_token"] / 1024
    for way, row in rows.items():
        assert row["samples"] == 2 and 0 < row["first_ms"] <= row["second_ms"] <= row["last_ms"]
        assert 0 <= row["before_end"] <= 1 and row["prefill_ms"] > 0
        if way == "P alone":
            assert row["mib"] < prompt_mib / 2, "KV went over the link"
        else:
            assert prompt_mib * 0.9 < row["mib"] < prompt_mib * 1.5, "the KV went another way than over the link"
    assert rows["serial"]["before_end"] < 0.1, "KV left before P had computed it"
    assert rows["at once"]["empty_steps"]["D"] > 0, "D is asked again while it waits for P"
    assert {one["target"] for one in result["targets"]} >= {"P's prefill slower than alone, %"}
