"""What KVFerry does beside vLLM's OffloadingConnector, a store in host memory, below MultiConnector.

Of a prompt whose beginning the store has, and whose P is on another host, each loads a part, where KVFerryConnector is
listed first. MultiConnector gives a request to one connector, so KVFerry asks the store for the beginning itself, and
reports the load when both parts have ended. On one host P is the faster source, and sends all. Other stores load all
or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvferry.connector.wire.step_plan import LoadEnd, StepResults
from kvferry.transport.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvferry.connector.engine.worker import WorkerHalf

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


def store_of(engine_connector: Any, ours: object) -> Any:
    """The store beside ``ours``, below an engine's connector; ``None`` without one, or where it comes first."""
    children = getattr(engine_connector, "_connectors", ())
    after = children[children.index(ours) + 1 :] if ours in children else ()
    return next((child for child in after if type(child).__name__ == STORE), None)


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


class SharedLoads:
    """On a worker: the loads whose beginning the store loads. Their reports wait for both parts."""

    def __init__(self, store: Any, working: WorkerHalf) -> None:
        self._working = working
        self._ended: dict[str, bool] = {}
        """By request, whether the store's part has ended."""
        self._parked: dict[str, tuple[bool, LoadEnd]] = {}
        """By request whose own part has ended: whether that failed, and how it ended."""
        told = store.get_transfer_results

        def get_transfer_results(finished_req_ids: set[str]) -> Any:
            results = told(finished_req_ids)
            self._ended |= dict.fromkeys(self._ended.keys() & results.finished_recving, True)
            return results

        store.get_transfer_results = get_transfer_results

    def begin(self, request_ids: Iterable[str]) -> None:
        self._ended |= dict.fromkeys(request_ids, False)

    def take_results(self) -> StepResults:
        """What the worker half reports, without the loads whose other part runs, and with those where it has ended."""
        results = self._working.take_results()
        for name in results.received & self._ended.keys():
            results.received.remove(name)
            self._parked[name] = name in results.failed, results.ends.pop(name, LoadEnd())
            results.failed.discard(name)
        for name in [name for name in self._parked if self._ended[name]]:
            failed, results.ends[name] = self._parked.pop(name)
            del self._ended[name]
            results.received.add(name)
            if failed:
                results.failed.add(name)
        return results
