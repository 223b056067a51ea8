"""What KVFerry does beside other connectors below MultiConnector, such as vLLM's OffloadingConnector, a store in host
memory: its copies are kept apart from loads, and only reports of loads that were asked for reach the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvferry.transport.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

STORE = "OffloadingConnector"
_FENCE = "_current_batch_allocated_block_ids"


def check_store(children: Iterable[object]) -> None:
    """Refuse a store whose copies cannot be kept apart from loads, by the names of all children. Raises ConfigError."""
    if STORE not in children:
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

        known = _FENCE in OffloadingConnectorScheduler.update_state_after_alloc.__code__.co_names
    except (ImportError, AttributeError):
        known = False
    if not known:
        raise ConfigError(
            f"{STORE} beside KVFerryConnector: this vLLM keeps its copies in a way that is not known, so they could "
            "read blocks that KVFerry has begun to write; leave one of the two out"
        )


def fence(engine_connector: Any, block_ids: Iterable[Iterable[int]]) -> None:
    """Have stores end, before this step, their copies from blocks that a load is about to write. Before 0.33 a store
    sees blocks that are given out only where the step computes with them, or it loads into them itself (vllm#46951): it
    would keep the KV of one prompt as another's."""
    for child in getattr(engine_connector, "_connectors", ()):
        if type(child).__name__ == STORE:
            getattr(child.connector_scheduler, _FENCE).update(
                block_id for ids in block_ids for block_id in ids if block_id
            )


def wanted(scheduler: Scheduler, reports: Iterable[str]) -> set[str]:
    """Of reports of loads those that vLLM waits for. It dies of any other, as of one for a load that a connector was
    not asked for (vllm#50546)."""
    found = {name: scheduler.requests.get(name) for name in reports}
    return {
        name
        for name, request in found.items()
        if request is not None and (request.is_finished() or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    }
