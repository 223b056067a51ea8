"""Where sequence parallelism leaves the residual: ours and vLLM 0.26's. Later releases have no such function."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm
theirs = pytest.importorskip("vllm.v1.worker.utils")
if not hasattr(theirs, "is_residual_scattered_for_sp"):
    pytest.skip("this vLLM has no is_residual_scattered_for_sp", allow_module_level=True)

from kvferry.connector.binding.sequence_parallel import is_residual_scattered_for_sp  # noqa: E402
from kvferry.transport.errors import ConfigError  # noqa: E402


def test_is_residual_scattered_for_sp() -> None:
    answers = {True: 0, False: 0, None: 0}
    for enable, ranks, ops, partition, tokens in itertools.product(
        (False, True), (1, 2, 3), (None, [], ["attention"]), (False, True), range(13)
    ):
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(enable_sp=enable), splitting_ops=ops, use_inductor_graph_partition=partition
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        )
        try:
            wanted = theirs.is_residual_scattered_for_sp(config, tokens)
        except AssertionError:
            wanted = None
            with pytest.raises(ConfigError):
                is_residual_scattered_for_sp(config, tokens)
        else:
            assert is_residual_scattered_for_sp(config, tokens) is wanted
        answers[wanted] += 1
    assert min(answers.values()) > 30
