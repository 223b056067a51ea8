"""Where sequence parallelism leaves the residual between layers."""

from __future__ import annotations

from typing import Any

from kvferry.transport.errors import ConfigError


def is_residual_scattered_for_sp(config: Any, num_input_tokens: int) -> bool:
    """Whether each tensor-parallel rank holds only its tokens' part of the residual, as the compiler's pass scatters
    it: a pipeline stage then sends 1 / TP of it. ``num_input_tokens``: of the step, with padding. Raises ConfigError:
    sequence parallelism is on, and the graph is not compiled whole or TP does not divide the tokens."""
    compilation = config.compilation_config
    ranks = config.parallel_config.tensor_parallel_size
    if ranks < 1:
        raise ConfigError(f"tensor_parallel_size is {ranks}, expected at least 1")
    if not compilation.pass_config.enable_sp or ranks == 1:
        return False
    if compilation.splitting_ops and not compilation.use_inductor_graph_partition:
        raise ConfigError(
            f"enable_sp needs a graph that is compiled whole, splitting_ops has {len(compilation.splitting_ops)} "
            "operators; set use_inductor_graph_partition, or empty splitting_ops"
        )
    if num_input_tokens % ranks:
        raise ConfigError(
            f"{num_input_tokens} input tokens are no multiple of tensor_parallel_size {ranks}; "
            "with enable_sp, pad them to a multiple first"
        )
    return True
