"""What the front of an engine and its tensor-parallel ranks exchange in one step. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.connector.wire.step_plan import StepPlan, StepResults


@dataclass(frozen=True)
class CacheForm:
    """How one engine keeps its cache: tokens of a manager block, layout, tokens of a kernel block, manager blocks."""

    block_size: int
    layout: str
    kernel_blocks: int
    num_blocks: int = 64


class StepOrder(msgspec.Struct):
    """One step, the same for every rank of an engine. All blocks and tokens in it belong to one request.

    ``plan`` is KVFerry's. The rank zeroes ``new_blocks``. It computes ``tokens``, the first at position ``start``, with
    the manager blocks ``blocks``. It returns digests of the KV bytes of the first ``digest_tokens`` tokens in
    ``blocks``. It changes one number in the block ``corrupt``, to test the comparison.
    """

    plan: StepPlan
    new_blocks: list[int] = []
    tokens: list[int] = []
    start: int = 0
    blocks: list[int] = []
    digest_tokens: int = 0
    corrupt: int | None = None


class StepOutput(msgspec.Struct):
    """One rank's output of a step.

    ``kv_connector_output`` is the report of the rank's worker half. In the output that ``KVOutputAggregator`` returns
    it is the report of all ranks, a ``ConnectorOutput``. ``token`` is the next token, where the step computed some.
    ``digests`` are per layer, by global KV head. ``planes`` are the data planes of loads that ended.
    """

    kv_connector_output: Any
    token: int | None = None
    digests: list[dict[int, str]] = []
    planes: list[str] = []


def decode_output(frame: bytes) -> StepOutput:
    """A rank's output, with its worker half's report as ``StepResults``."""
    output = msgspec.msgpack.decode(frame, type=StepOutput)
    output.kv_connector_output = msgspec.convert(output.kv_connector_output, StepResults)
    return output
