"""The rule by which a load inside a step is cut in portions of layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.geometry.portions import (
    GPU_PORTION_BYTES,
    HOST_PORTION_BYTES,
    MAX_PORTIONS,
    layer_runs,
    num_layers_of,
    num_portions,
    portion_of,
)

LEAST = {False: HOST_PORTION_BYTES, True: GPU_PORTION_BYTES}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_small_load_is_not_cut(on_gpu: bool) -> None:
    least = LEAST[on_gpu]
    assert [num_portions(nbytes, 32, on_gpu=on_gpu) for nbytes in (0, 1, least, 2 * least - 1)] == [1, 1, 1, 1]
    assert num_portions(2 * least, 32, on_gpu=on_gpu) == 2
    assert num_portions(1 << 40, 32, on_gpu=on_gpu) == MAX_PORTIONS


def test_there_is_no_portion_without_a_layer() -> None:
    assert [num_portions(1 << 40, layers, on_gpu=False) for layers in (0, 1, 2, 3)] == [1, 1, 2, 3]


@given(st.integers(1, 130), st.integers(1, MAX_PORTIONS))
def test_portions_have_consecutive_layers_and_nearly_equally_many(layers: int, portions: int) -> None:
    portions = min(portions, layers)
    found = [portion_of(place, layers, portions) for place in range(layers)]
    assert found == sorted(found) and set(found) == set(range(portions))
    sizes = [found.count(portion) for portion in range(portions)]
    assert max(sizes) - min(sizes) <= 1
    for place, portion in enumerate(found):
        assert num_layers_of(portion, layers, portions) <= place < num_layers_of(portion + 1, layers, portions)


@given(st.permutations(range(12)), st.integers(0, 12), st.integers(1, MAX_PORTIONS))
def test_runs_have_every_layer_once_and_in_its_portion(order: list[int], named: int, portions: int) -> None:
    """In whatever order the forward comes to them, and where the order does not name all of them."""
    layers = [f"layers.{number}" for number in range(12)]
    places = {f"layers.{number}": place for place, number in enumerate(order[:named])}
    runs = list(layer_runs(layers, places, portions))
    assert [first for _, first, _ in runs] == [sum(count for *_, count in runs[:number]) for number in range(len(runs))]
    assert sum(count for *_, count in runs) == len(layers)
    for portion, first, count in runs:
        for layer in layers[first : first + count]:
            assert portion == (portion_of(places[layer], named, portions) if layer in places else 0)
    assert all(one[0] != other[0] for one, other in pairwise(runs)), "as few as can be"
