"""The portions of a load inside a step, so that a forward waits for the layers that it comes to, and not for all. Pure.

A portion has consecutive layers in the order in which the forward comes to them, the *layer order*, and the portions of
a copy come in this order too. Portion n of a copy with P portions has layers ``ceil(n * L / P)`` to
``ceil((n + 1) * L / P)`` of L. Layers that the order does not name belong to the first portion: nothing tells when the
forward comes to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

MAX_PORTIONS = 4
"""Bound on the portions of a copy. Of four, a forward waits for a quarter before its first layer. Each of them costs a
launch for each region, and two waits."""
HOST_PORTION_BYTES, GPU_PORTION_BYTES = 16 << 20, 64 << 20
"""A portion has so many bytes at least. ``HOST_PORTION_BYTES`` take about 2 ms, and ``cma`` copies as many in one turn
of its thread. ``GPU_PORTION_BYTES`` take 0.2 ms over NVLink; to launch another portion takes 0.05 ms."""


def num_portions(nbytes: int, num_layers: int, *, on_gpu: bool) -> int:
    """Into how many portions a copy of ``nbytes`` is cut; 1 is a copy that is not cut. ``num_layers``: of the order."""
    least = GPU_PORTION_BYTES if on_gpu else HOST_PORTION_BYTES
    return max(1, min(MAX_PORTIONS, num_layers, nbytes // least))


def portion_of(place: int, num_layers: int, portions: int) -> int:
    """The portion of the layer at ``place`` of the order."""
    return place * portions // num_layers


def num_layers_of(portions_ended: int, num_layers: int, portions: int) -> int:
    """How many layers of the order lie in the first ``portions_ended`` portions."""
    return -(-portions_ended * num_layers // portions)


def layer_runs(layers: Sequence[str], order: Mapping[str, int], portions: int) -> Iterator[tuple[int, int, int]]:
    """The runs of ``layers`` that lie in one portion, as (portion, first layer, number of layers). ``order``: the place
    of each layer in the order."""
    first = 0
    found = [portion_of(order[layer], len(order), portions) if layer in order else 0 for layer in layers]
    for place in range(1, len(found) + 1):
        if place == len(found) or found[place] != found[first]:
            yield found[first], first, place - first
            first = place
