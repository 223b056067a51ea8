"""The benchmarks with engines, in small on the CPU: every cell is measured; they check every hand-over themselves."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.engines import shaped_link
from benchmarks.engines.engine_pair import OURS, THEIRS
from tests.engine.conftest import run_benchmark
from tests.support.served import PATIENT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
HOW = ("--device", "cpu", "--start-seconds", "400")


def test_every_cell_of_busy_has_its_samples(tmp_path: Path) -> None:
    """Loads go inside the step under vLLM's default policy too, also beside sequences that D decodes: some, for a load
    that took long on a host that stood still is followed by one beside the steps."""
    options = ["--samples", "2", "--policy", "fail", "--orders", "scattered"]
    options += ["--kv-config", json.dumps(PATIENT), "--vary", "hold=0", "hold=1"]
    result = run_benchmark("benchmarks/engines/busy.py", tmp_path, *HOW, *options)
    rows = {(row["variant"], row["sequences"], row["tokens"]): row for row in result["rows"]}
    assert rows.keys() == set(product(("hold=0", "hold=1"), (0, 4), (97, 385))) and result["left_out"] == {}
    for (_, sequences, _), row in rows.items():
        assert row["samples"] == 2 and row["copy_ms"] > 0
        assert row["in_sequence"] < 0.5, "the blocks of a scattered table have few neighbours"
        assert (row["quiet_gaps"] > 0) == (row["gaps"] > 0) == (sequences > 0)
        assert row["ttft_ms"] > 0 and row["local_ttft_ms"] > 0
    for sequences in (0, 4):
        assert any("in the step" in rows["hold=1", sequences, tokens]["ways"] for tokens in (97, 385)), rows
        assert all(rows["hold=0", sequences, tokens]["ways"] == {"beside the steps": 2} for tokens in (97, 385)), rows


def test_every_turn_of_prefix_reads_has_its_samples(tmp_path: Path) -> None:
    """The engine that computes a turn computes what is new and less than a block more, where the source is named."""
    patient = ["--kv-config", json.dumps(PATIENT | {"prefix_wait_seconds": 10})]
    result = run_benchmark("benchmarks/engines/prefix_reads.py", tmp_path, *HOW, "--small", *patient)
    rows = {(row["sequences"], row["tokens"]): row for row in result["rows"]}
    assert rows.keys() == {(sequences, tokens) for sequences in (0, 2) for tokens in (96, 192)}
    for (sequences, _), row in rows.items():
        assert row["samples"] == 1 and row["missed"] == 0 and row["read_ms"] > 0 and row["own_ms"] > 0
        assert (row["computed_ms"] is None) == (row["gaps"] > 0) == (row["quiet_gaps"] > 0) == (sequences > 0)
    replays = {(row["form"], row["named"]): row for row in result["replays"]}  # of an agent only
    assert len(replays) == 4
    for (form, named), row in replays.items():
        assert row["turns"] == 2
        if named:
            assert 0 <= row["most_over_new"] < 16 <= replays[form, False]["most_over_new"]
    assert result["prefix_reads"]["reader"]["loaded"] > 0 and result["prefix_reads"]["source"]["lent read"] > 0


@pytest.mark.root
def test_every_way_of_streaming_has_its_samples(tmp_path: Path) -> None:
    if reason := shaped_link.why_not():
        pytest.skip(f"benchmarks/engines/streaming.py {reason}")
    result = run_benchmark("benchmarks/engines/streaming.py", tmp_path, *HOW, "--small")
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
    for curve in result["curves"]:
        assert curve["points"] == sorted(curve["points"])
        assert prompt_mib * 0.9 < curve["points"][-1][1] < prompt_mib * 1.5
    assert [curve["way"] for curve in result["curves"]] == ["serial", "at once"]
    assert {one["target"] for one in result["targets"]} >= {"P's prefill slower than alone, %"}


def test_wrong_answers_are_seen_and_none_is_of_kvferry(tmp_path: Path) -> None:
    """vLLM 0.32's NixlConnector reads the blocks that a reference names, whatever is in them by now: its wrong answers
    show that the comparison sees some."""
    none, reused, weights = "none", "used reference, blocks used again", "other weights on P, under D's path"
    options = ["--count", "8", "--faults", none, reused, weights]
    result = run_benchmark("benchmarks/engines/wrong_answers.py", tmp_path, *options)
    rows = {(row["connector"], row["fault"]): row for row in result["rows"]}
    right = {key: row["right"] for key, row in rows.items() if key[0] == OURS or key[1] == none}
    assert right == {(OURS, none): 8, (OURS, reused): 8, (OURS, weights): 8, (THEIRS, none): 8}
    assert rows[THEIRS, reused]["wrong"] > 0 < rows[THEIRS, weights]["wrong"]
