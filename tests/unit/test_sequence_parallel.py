"""What is wrong is named; every combination of the settings is compared with vLLM in ``tests/vllm``."""

from __future__ import annotations

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


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="splitting_ops has 1 operators; set use_inductor_graph_partition"):
        is_residual_scattered_for_sp(config(True, 2, SPLIT, False), 4)
    with pytest.raises(ConfigError, match="5 input tokens are no multiple of tensor_parallel_size 2"):
        is_residual_scattered_for_sp(config(True, 2, [], False), 5)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        is_residual_scattered_for_sp(config(False, 0, [], False), 5)
