"""The copy on host memory against a byte-by-byte oracle, guard bytes and unused blocks included."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import paged_copy
from kvferry.kernels.paged_copy import Pages, copy_pages
from tests.kernels.paged_copy_cases import CASES, Case, Layout, differing, expected

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_oracle(name: str) -> None:
    assert differing(CASES[name], CPU) == 0


layouts = st.builds(
    Layout, order=st.sampled_from(["HND", "NHD"]), block_size=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32]),
    pad=st.tuples(*[st.sampled_from([0, 0, 0, 1, 8, 16])] * 3), interleaved=st.booleans(),
    shift=st.sampled_from([0, 0, 1, 4, 8]), consecutive=st.booleans(),
    places=st.permutations(range(6)).map(tuple) | st.just(()),
)  # fmt: skip
cases = st.builds(
    Case, dst=layouts, src=layouts, layers=st.integers(1, 3), heads=st.integers(1, 3), tokens=st.integers(1, 40),
    content=st.sampled_from([1, 2, 3, 4, 8, 16, 24, 32]), dst_head=st.integers(0, 2), src_head=st.integers(0, 2),
    dst_token=st.integers(0, 20), src_token=st.integers(0, 20),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(case=cases, to_wire=st.booleans(), from_wire=st.booleans(), seed=st.integers(0, 1 << 30))
def test_any_pair_of_layouts(case: Case, to_wire: bool, from_wire: bool, seed: int) -> None:
    wire = Layout(block_size=case.tokens)
    if to_wire:
        case = replace(case, dst=wire, dst_head=0, dst_token=0)
    if from_wire:
        case = replace(case, src=wire, src_head=0, src_token=0)
    dst, src = case.arenas(seed)
    if not np.array_equal(dst.memory, expected(case, dst, src)):  # few bytes may be equal by chance
        assert differing(case, CPU, seed=seed) == 0


def test_a_copy_that_needs_more_than_one_scratch_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_copy, "BOUNCE_BYTES", 1000)
    assert differing(CASES["48-to-32"], CPU) == 0


def test_layers_too_far_apart_for_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_copy, "MAX_NUMEL", 1)
    assert [differing(CASES[name], CPU) for name in ("pack-hnd", "unpack-nhd", "hnd-to-nhd")] == [0, 0, 0]


@pytest.mark.parametrize("empty", ["num_heads", "num_tokens", "layers"])
def test_an_empty_box_touches_nothing(empty: str) -> None:
    nothing = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64), 16, 0, 0, 0)
    one = Pages(np.zeros(1, np.int64), np.zeros(1, np.int64), 16, 0, 0, 0)
    pages = nothing if empty == "layers" else one
    sizes: dict[str, Any] = {"num_heads": 1, "num_tokens": 1} | {empty: 0}
    sizes.pop("layers", None)
    copy_pages(pages, pages, content_bytes=8, device=CPU, **sizes)


def test_the_interpreter_runs_while_bytes_move() -> None:
    """A transfer thread that held the GIL would stop the engine: here nobody is made to give it up."""
    case = Case(Layout(block_size=2048), Layout("NHD"), layers=16, heads=8, tokens=2048, content=256)  # 64 MiB
    dst, src = case.arenas()
    turns = 0

    def copy() -> None:
        for _ in range(50):  # on a loaded machine this thread may not get the processor while another copies once
            if turns > 20:
                break
            copy_pages(dst.pages, src.pages, num_heads=8, num_tokens=2048, content_bytes=256, device=CPU)

    thread = threading.Thread(target=copy)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert turns > 20, f"the interpreter got {turns} turns while 64 MiB were copied 50 times"
