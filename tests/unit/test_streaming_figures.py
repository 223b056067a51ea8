"""What the streaming benchmarks make of their samples: medians of pairs, shares of bytes, targets, timelines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("streaming_pair", "streaming_figures", "streaming_tables", "shaped_link"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import streaming_figures
    import streaming_pair

    return streaming_pair, streaming_figures


def sample(pair: Any, way: str, first: float, prefill: float = 1.0, curve: Any = (), decode: float = 0.01) -> Any:
    """P begins 0.1 s after the request, and computes in two steps; D's one step takes ``decode``."""
    middle = 0.1 + prefill / 2
    steps = [
        {"begin": begin, "end": end, "tokens": 500, "layers": [end], "core": prefill / 2, "queued": 0.0}
        for begin, end in ((0.1, middle), (middle, 0.1 + prefill))
    ]
    arrived = [first + 0.1 * n for n in range(6)]
    decoding = [{"begin": 2.0, "end": 2.0 + decode, "tokens": 1, "layers": [], "core": decode, "queued": 0.0}]
    threads = {engine: {"MainThread": (arrived[-1] / 2, 0.0), "idle": (0.0, 0.0)} for engine in ("P", "D")}
    empty = {"P": 0, "D": 10}
    return pair.Sample(way, arrived, steps, decoding, [], [], list(curve), empty, threads)


def turn(pair: Any, first: float = 1.12, prefill: float = 1.0, curve: Any = ((0.2, 0), (1.05, 96), (1.2, 100))) -> Any:
    mib = [(at, count << 20) for at, count in curve]
    return {
        pair.ALONE: sample(pair, pair.ALONE, 1.11),
        pair.SERIAL: sample(pair, pair.SERIAL, 1.4, curve=[(1.1, 0), (1.15, 50 << 20), (1.3, 100 << 20)]),
        pair.AT_ONCE: sample(pair, pair.AT_ONCE, first, prefill, mib),
    }


def rows(modules: tuple[Any, Any], turns: list[Any], tokens: int = 1000) -> list[Any]:
    pair, figures = modules
    cell = {"name": pair.OURS_NAME, "tokens": tokens, "gb_per_s": 1.25}
    found: list[Any] = figures.rows_of(turns, **cell)
    return found


def verdicts(modules: tuple[Any, Any], found: list[Any]) -> dict[str, Any]:
    return {one["target"]: one for one in modules[1].targets(found)}


def test_bytes_count_that_had_come_when_the_last_step_ended(modules: tuple[Any, Any]) -> None:
    pair, _ = modules
    found = turn(pair)
    assert found[pair.AT_ONCE].before_end == pytest.approx(0.96)
    assert found[pair.SERIAL].before_end == 0 and found[pair.ALONE].before_end == 0
    assert found[pair.SERIAL].moving == pytest.approx(0.15) and found[pair.ALONE].moving == 0


def test_ways_are_compared_within_a_turn(modules: tuple[Any, Any]) -> None:
    """Between the turns the machine got three times as slow, which no comparison shows."""
    pair, _ = modules
    turns = []
    for slow in (1, 3, 3):
        found = turn(pair)
        for way, seconds in ((pair.ALONE, 1.0), (pair.AT_ONCE, 1.02)):
            found[way] = sample(pair, way, slow * (seconds + 0.1), slow * seconds)
        turns.append(found)
    (row,) = [row for row in rows(modules, turns) if row["way"] == pair.AT_ONCE]
    assert row["prefill_slower_percent"] == 2 == row["core_slower_percent"]
    assert row["prefill_ms"] == 3060 and row["first_ms"] == 3360
    assert row["cores_percent"]["P"] == {"MainThread": 50} and row["empty_steps"] == {"P": 0, "D": 3}


def test_targets_of_a_prefill_that_outlasts_the_transfer(modules: tuple[Any, Any]) -> None:
    pair, _ = modules
    good = verdicts(modules, rows(modules, [turn(pair)]))
    assert len(good) == 3 and all(one["met"] for one in good.values())
    late = turn(pair, first=1.13, prefill=1.02, curve=((0.2, 0), (1.2, 94), (1.3, 100)))
    assert not any(one["met"] for one in verdicts(modules, rows(modules, [late])).values())


def test_targets_of_a_link_that_is_slower_than_the_prefill(modules: tuple[Any, Any]) -> None:
    pair, _ = modules
    found = turn(pair, first=2.2)
    found[pair.SERIAL] = sample(pair, pair.SERIAL, 3.2, curve=[(1.1, 0), (1.1, 1 << 20), (3.1, 100 << 20)])
    name = "first token: 1.1 times the transfer alone, and a step of D, ms"
    assert verdicts(modules, rows(modules, [found]))[name]["met"]
    found[pair.AT_ONCE] = sample(pair, pair.AT_ONCE, 2.3)
    assert not verdicts(modules, rows(modules, [found]))[name]["met"]


def test_a_long_prompt_is_compared_with_nixl_and_a_short_one_with_serial(modules: tuple[Any, Any]) -> None:
    pair, _ = modules
    theirs = [row | {"name": pair.PULL_NAME} for row in rows(modules, [turn(pair)], 8000)]
    found = verdicts(modules, [*rows(modules, [turn(pair)], 8000), *theirs])
    name = "first token, share of NixlConnector's (pull)"
    assert found[name]["figure"] == 0.8 and not found[name]["met"]
    (short,) = verdicts(modules, rows(modules, [turn(pair)], 128)).values()
    assert short["figure"] == 1120 and short["limit"] == "<= 1400" and short["met"]


def test_a_timeline_has_few_points_and_the_last_one(modules: tuple[Any, Any]) -> None:
    pair, figures = modules
    curve = [(n / 1000, n // 2) for n in range(1000)]
    line = figures.timeline(sample(pair, pair.AT_ONCE, 1.2, curve=curve), name="KVFerry")
    assert len(line["link"]) < 2 * figures.CURVE_POINTS and line["link"][-1] == (0.998, 499)
    assert line["steps"][1]["layers"] == [1.1] and line["placed"] == []


def test_tables_have_a_line_for_each_row(modules: tuple[Any, Any]) -> None:
    pair, figures = modules
    found = rows(modules, [turn(pair)])
    import streaming_tables as tables

    for text in (tables.table(found), tables.core_table(found), tables.target_table(figures.targets(found))):
        assert text.count("\n") == 4
    (alone,) = [line for line in tables.table(found).splitlines() if f"| {pair.ALONE} |" in line]
    assert alone.endswith("|  |  |  |"), "P alone hands nothing over"


def test_cells_are_parsed(modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import streaming

    assert streaming.cell_of("2000@1.25") == (2000, 1.25)
    for text in ("2000", "2000@", "x@1", "0@1", "10@-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected TOKENS@RATE"):
            streaming.cell_of(text)


def test_the_benchmark_on_gpus_has_a_form_without_them(modules: tuple[Any, Any]) -> None:
    import gpu_streaming

    args = gpu_streaming.arguments().parse_args(["--cpu", "--planes", "tcp", "zmq", "--no-nixl"])
    assert [name for _, name, _ in gpu_streaming.pairs_of(args)] == ["KVFerry, tcp", "KVFerry, zmq"]
    args = gpu_streaming.arguments().parse_args(["--planes", "cuda_ipc"])
    assert [connector for connector, _, _ in gpu_streaming.pairs_of(args)] == [
        "KVFerryConnector", "NixlPullConnector", "NixlPushConnector",
    ]  # fmt: skip
    assert gpu_streaming.GPU.spec.kv_bytes_per_token == 128 << 10
