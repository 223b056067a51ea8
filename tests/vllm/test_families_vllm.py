"""Model families with the caches that vLLM itself sizes, groups and places, under its scheduler; no forward.

vLLM builds each model in a process of its own, for two engines with other block sizes and layouts. Each is P in turn.
Families that it runs on a CPU are also served, in tests/engine/test_families.py.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import ALL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
KINDS = {
    "qwen3-moe": {"FullAttentionSpec"},
    "deepseek": {"MLAAttentionSpec"},
    "gemma3": {"SlidingWindowSpec", "FullAttentionSpec"},
    "gemma3n": {"SlidingWindowSpec", "FullAttentionSpec"},
    "qwen3-next": {"MambaSpec", "FullAttentionSpec"},
    "falcon-h1": {"MambaSpec", "FullAttentionSpec"},
    "llama-4": {"ChunkedLocalAttentionSpec", "FullAttentionSpec"},
    "gemma4": {"SlidingWindowSpec", "FullAttentionSpec"},  # whose heads differ
    "jamba": {"MambaSpec", "FullAttentionSpec"},
    "olmo-hybrid": {"UniformTypeKVCacheSpecs"},  # states that vLLM does not pad to one size
    "nemotron-h": {"MambaSpec", "FullAttentionSpec"},
    "lfm2": {"MambaSpec", "FullAttentionSpec"},
}


FAULT = "P computes the last token too"
FAULTY = ("qwen3-next", "gemma3")


def send_reports(to: Connection, folder: Path, tasks: list[str]) -> None:
    from tests.vllm import family_process  # imports much that no other test needs

    to.send([*family_process.reports(folder, tasks)])


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The report of each family, then of those with a fault. Of a fork, which has vLLM: this file is the first one that
    is run, so that there are no threads of engines."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    tasks = [*ALL, *(f"{family}:{FAULT}" for family in FAULTY)]
    process = context.Process(target=send_reports, args=(theirs, tmp_path_factory.mktemp("families"), tasks))
    process.start()
    theirs.close()
    found: list[dict[str, Any]] = ours.recv()
    process.join()
    assert [report["family"] for report in found] == [*ALL, *FAULTY]
    return found


@pytest.fixture(scope="module")
def sound(reports: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {report["family"]: report for report in reports if not report["fault"]}


@pytest.mark.parametrize("family", ALL)
def test_d_finds_all_that_it_reads_and_has_computed_none_of_it(sound: dict[str, dict[str, Any]], family: str) -> None:
    report = sound[family]
    assert "error" not in report, report["trace"]
    assert set(report["kinds"]) == KINDS[family] and report["failed"] == 0
    for tokens, load in [item for loads in report["loads"] for item in loads.items()]:
        if load["given back"]:  # P has no longer what would fill a larger block of D
            assert (load["external"], load["found"]) == (0, 0), f"{tokens} tokens"
        else:
            assert load["external"] in (int(tokens) - 1, int(tokens)), f"{tokens} tokens"
            assert load["found"] == load["wanted"] > 0, f"{tokens} tokens"


@pytest.mark.parametrize("family", ALL)
def test_both_legs_at_once(sound: dict[str, dict[str, Any]], family: str) -> None:
    """Also of windows and states, whose blocks D gets when P has computed the prompt."""
    loads = [load for load in sound[family]["at once"] if not load["given back"]]
    assert loads
    for load in loads:
        assert load["found"] == load["wanted"] > 0


@pytest.mark.parametrize("family", ALL)
def test_a_prompt_that_begins_alike_loads_only_the_rest(sound: dict[str, dict[str, Any]], family: str) -> None:
    """D takes from its prefix cache what it loaded before; a state only as it was where a block ends."""
    first, again = sound[family]["again"]
    assert not first["given back"] and not again["given back"]
    assert again["external"] in (149, 150) and first["external"] in (384, 385)
    assert (first["found"], again["found"]) == (first["wanted"], again["wanted"])


@pytest.mark.parametrize("family", ALL)
def test_plan_counts_the_bytes_that_vllm_keeps(sound: dict[str, dict[str, Any]], family: str) -> None:
    counted = sound[family]["counted"]
    assert counted["planned"] == (counted["kept"] if family in ("qwen3-moe", "deepseek", "gemma3") else None)


def test_blocks_that_are_given_back_are_met_and_not(sound: dict[str, dict[str, Any]]) -> None:
    """So that both branches above are taken."""
    for family in ("gemma3", "gemma3n"):
        to_larger, to_smaller = ({load["given back"] for load in x.values()} for x in sound[family]["loads"])
        assert to_larger == {True, False} and to_smaller == {False}


def test_a_state_that_has_seen_the_whole_prompt_is_noticed(reports: list[dict[str, Any]]) -> None:
    """P computes the last prompt token too, and D's scheduler half is not held back from taking that for less."""
    faulty = {report["family"]: report for report in reports if report["fault"] == FAULT}
    assert "wrong state after 1 tokens" in faulty["qwen3-next"]["error"]
    loads = faulty["gemma3"]["loads"][0].values()
    assert any(not load["external"] and not load["given back"] for load in loads), "a block that P has given back"
