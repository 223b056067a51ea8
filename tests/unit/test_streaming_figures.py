"""What the streaming benchmark makes of its samples: medians of pairs, shares of bytes, targets, tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import streaming
from benchmarks.engines import streaming_figures as figures
from benchmarks.engines import streaming_pair as pair
from benchmarks.harness import pages

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def sample(way: str, first: float, prefill: float = 1.0, curve: Any = (), decode: float = 0.01) -> Any:
    """P begins 0.1 s after the request, and computes in two steps; D's one step takes ``decode``."""
    middle = 0.1 + prefill / 2
    steps = [
        {"begin": begin, "end": end, "tokens": 500, "core": prefill / 2, "queued": 0.0}
        for begin, end in ((0.1, middle), (middle, 0.1 + prefill))
    ]
    arrived = [first + 0.1 * n for n in range(6)]
    decoding = [{"begin": 2.0, "end": 2.0 + decode, "tokens": 1, "core": decode, "queued": 0.0}]
    empty = {"P": 0, "D": 10}
    return pair.Sample(way, arrived, steps, decoding, list(curve), empty)


def turn(first: float = 1.12, prefill: float = 1.0, curve: Any = ((0.2, 0), (1.05, 96), (1.2, 100))) -> Any:
    mib = [(at, count << 20) for at, count in curve]
    return {
        pair.ALONE: sample(pair.ALONE, 1.11),
        pair.SERIAL: sample(pair.SERIAL, 1.4, curve=[(1.1, 0), (1.15, 50 << 20), (1.3, 100 << 20)]),
        pair.AT_ONCE: sample(pair.AT_ONCE, first, prefill, mib),
    }


def rows(turns: list[Any], tokens: int = 1000) -> list[Any]:
    cell = {"name": pair.OURS_NAME, "tokens": tokens, "gb_per_s": 1.25}
    found: list[Any] = figures.rows_of(turns, **cell)
    return found


def verdicts(found: list[Any]) -> dict[str, Any]:
    return {one["target"]: one for one in figures.targets(found)}


def test_bytes_count_that_had_come_when_the_last_step_ended() -> None:
    found = turn()
    assert found[pair.AT_ONCE].before_end == pytest.approx(0.96)
    assert found[pair.SERIAL].before_end == 0 and found[pair.ALONE].before_end == 0
    assert found[pair.SERIAL].moving == pytest.approx(0.15) and found[pair.ALONE].moving == 0


def test_ways_are_compared_within_a_turn() -> None:
    """Between the turns the machine got three times as slow, which no comparison shows."""
    turns = []
    for slow in (1, 3, 3):
        found = turn()
        for way, seconds in ((pair.ALONE, 1.0), (pair.AT_ONCE, 1.02)):
            found[way] = sample(way, slow * (seconds + 0.1), slow * seconds)
        turns.append(found)
    (row,) = [row for row in rows(turns) if row["way"] == pair.AT_ONCE]
    assert row["prefill_slower_percent"] == 2 == row["core_slower_percent"]
    assert row["prefill_ms"] == 3060 and row["first_ms"] == 3360
    assert row["empty_steps"] == {"P": 0, "D": 3}


def test_targets_of_a_prefill_that_outlasts_the_transfer() -> None:
    good = verdicts(rows([turn()]))
    assert len(good) == 3 and all(one["met"] for one in good.values())
    late = turn(first=1.13, prefill=1.02, curve=((0.2, 0), (1.2, 94), (1.3, 100)))
    assert not any(one["met"] for one in verdicts(rows([late])).values())


def test_targets_of_a_link_that_is_slower_than_the_prefill() -> None:
    found = turn(first=2.2)
    found[pair.SERIAL] = sample(pair.SERIAL, 3.2, curve=[(1.1, 0), (1.1, 1 << 20), (3.1, 100 << 20)])
    name = "first token: 1.1 times the transfer alone, and a step of D, ms"
    assert verdicts(rows([found]))[name]["met"]
    found[pair.AT_ONCE] = sample(pair.AT_ONCE, 2.3)
    assert not verdicts(rows([found]))[name]["met"]


def test_a_long_prompt_is_compared_with_nixl_and_a_short_one_with_serial() -> None:
    theirs = [row | {"name": pair.PULL_NAME} for row in rows([turn()], 8000)]
    found = verdicts([*rows([turn()], 8000), *theirs])
    name = "first token, share of NixlConnector's (pull)"
    assert found[name]["figure"] == 0.8 and not found[name]["met"]
    (short,) = verdicts(rows([turn()], 128)).values()
    assert short["figure"] == 1120 and short["limit"] == "<= 1400" and short["met"]


def test_tables_have_a_line_for_each_row() -> None:
    found = rows([turn()])
    targets = pages.table(figures.targets(found), pages.TARGETS)
    for text in (pages.table(found, pages.STREAMED), targets):
        assert text.count("\n") == 4
    (alone,) = [line for line in pages.table(found, pages.STREAMED).splitlines() if f"| {pair.ALONE} |" in line]
    assert alone.endswith("|  |  |  |"), "P alone hands nothing over"


@pytest.mark.parametrize("name", ["streaming", "gpu_streaming"])
def test_committed_targets_are_those_of_the_committed_rows(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    assert stored["targets"] == figures.targets(stored["rows"])


def test_cells_are_parsed() -> None:
    assert streaming.cell_of("2000@1.25") == (2000, 1.25) and streaming.cell_of("2000") == (2000, None)
    for text in ("2000@", "x@1", "0@1", "10@-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected TOKENS"):
            streaming.cell_of(text)


def test_which_pairs_are_measured() -> None:
    args = streaming.arguments().parse_args(["--device", "cpu", "--planes", "tcp", "zmq", "--no-nixl"])
    streaming.fill_in(args)
    assert [name for _, name, _ in streaming.pairs_of(args)] == ["KVFerry, tcp", "KVFerry, zmq"]
    assert args.chunk == 256 and (2000, 1.25) in args.cells
    args = streaming.arguments().parse_args(["--planes", "cuda_ipc"])
    streaming.fill_in(args)
    assert [connector for connector, _, _ in streaming.pairs_of(args)] == [
        "KVFerryConnector", "NixlPullConnector", "NixlPushConnector",
    ]  # fmt: skip
    assert streaming.model_spec(args).kv_bytes_per_token == 128 << 10
