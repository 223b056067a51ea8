"""What ``streaming.py`` installs in the workers of P: when each step and each of its layers was computed.

    vllm serve ... --worker-extension-cls step_probe.StepProbe

Times are those of ``time.monotonic``, which all processes of a host share. Of an engine on the CPU, whose forward ends
with its call; on a GPU they are those of the launches.
"""

from __future__ import annotations

import time
from typing import Any


class StepProbe:
    """Mixed into vLLM's worker; its methods are called through ``collective_rpc``."""

    def steps_watch(self) -> None:
        """Start to note steps. Idempotent."""
        if "probed_steps" in self.__dict__:
            return
        steps: list[dict[str, Any]] = []
        self.probed_steps = steps
        runner = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = scheduler_output.total_num_scheduled_tokens
            step: dict[str, Any] = {"begin": time.monotonic(), "tokens": tokens, "layers": []}
            if tokens:
                steps.append(step)
            result = execute(scheduler_output, *args, **kwargs)
            step["end"] = time.monotonic()
            return result

        runner.execute_model = execute_model
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return
        connector = get_kv_transfer_group()
        save = connector.save_kv_layer

        def save_kv_layer(layer_name: str, *args: Any, **kwargs: Any) -> None:
            if steps:
                steps[-1]["layers"].append(time.monotonic())
            save(layer_name, *args, **kwargs)

        connector.save_kv_layer = save_kv_layer

    def steps_take(self) -> list[dict[str, Any]]:
        """The steps since the last call: ``begin``, ``end``, ``tokens``, and ``layers``, the ends of its layers."""
        taken = list(self.probed_steps)
        self.probed_steps.clear()
        return taken
