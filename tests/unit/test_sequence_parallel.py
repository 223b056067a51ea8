"""Every combination of the settings, against the rule written out as a table."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.binding.sequence_parallel import is_residual_scattered_for_sp
from kvferry.transport.errors import ConfigError


def config(enable_sp: bool, ranks: int, splitting_ops: Any, partition: bool) -> SimpleNamespace:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(enable_sp=enable_sp),
            splitting_ops=splitting_ops,
            use_inductor_graph_partition=partition,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


SPLIT = ["attention"]
ON = [(n, ops, part) for n in (2, 3) for ops in (None, [], SPLIT) for part in (False, True) if part or ops != SPLIT]
"""What sequence parallelism may be on with: ranks, operators that split the graph, inductor's own partition."""


def combinations() -> Iterator[tuple[Any, int, bool | None]]:
    """Settings, tokens, and what is right; ``None`` where it cannot be."""
    for enable, ranks, ops, partition, tokens in itertools.product(
        (False, True), (1, 2, 3), (None, [], SPLIT), (False, True), range(13)
    ):
        wanted: bool | None = False
        if enable and ranks > 1:
            wanted = True if (ranks, ops, partition) in ON and tokens in range(0, 13, ranks) else None
        yield config(enable, ranks, ops, partition), tokens, wanted


def test_every_combination() -> None:
    seen: Counter[bool | None] = Counter()
    for settings, tokens, wanted in combinations():
        seen[wanted] += 1
        if wanted is None:
            with pytest.raises(ConfigError):
                is_residual_scattered_for_sp(settings, tokens)
        else:
            assert is_residual_scattered_for_sp(settings, tokens) is wanted
    assert min(seen.values()) > 30


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="splitting_ops has 1 operators; set use_inductor_graph_partition"):
        is_residual_scattered_for_sp(config(True, 2, SPLIT, False), 4)
    with pytest.raises(ConfigError, match="5 input tokens are no multiple of tensor_parallel_size 2"):
        is_residual_scattered_for_sp(config(True, 2, [], False), 5)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        is_residual_scattered_for_sp(config(False, 0, [], False), 5)
