"""How tests and benchmarks look into the product. Nothing else in them reaches a private name of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.connector.prefill_side.prompts import PromptState
from kvferry.connector.scheduler.load_planner import RequestPhase
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire import messages
from kvferry.connector.worker.loop import PostedPlans, TransferThread
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.kernels import launch
from kvferry.transport import cuda
from kvferry.transport.wake import RunningClock

# --- prefill side -------------------------------------------------------------------------------------------------


def producer_of(of: Any) -> Any:
    """The prefill side of a rank, or of its transfer thread; or itself."""
    of = getattr(of, "thread", of)
    return getattr(of, "_producer", of)


def listener_of(of: Any) -> Any:
    """P's end of the control plane."""
    return producer_of(of)._listener


def leases_of(of: Any) -> dict[bytes, Any]:
    """The leases that P holds, by token."""
    prompts = list(producer_of(of).prompts.table.items())
    return {token: prompt for token, prompt in prompts if prompt.state is not PromptState.OPEN}


def expire_lease(of: Any, lease: Any) -> None:
    """End a lease as its expiry does. On P's transfer thread."""
    producer_of(of)._end(lease, "expired", lease.deadline)


def prompts_of(of: Any) -> dict[bytes, Any]:
    """The prompts that have no lease yet, and the prefixes that are lent, by token."""
    prompts = list(producer_of(of).prompts.table.items())
    return {token: prompt for token, prompt in prompts if prompt.state is PromptState.OPEN}


def board_of(of: Any) -> Any:
    """Where P posts its grants."""
    return producer_of(of).prompts.board


def early_asks(of: Any) -> list[Any]:
    """The asks that wait for their prompt."""
    return [each.request for each in producer_of(of).waiting.values() if isinstance(each.request, messages.Ask)]


def early_questions(of: Any) -> list[Any]:
    """What waits for a prompt by its name."""
    return [each for each in producer_of(of).waiting.values() if isinstance(each.request, messages.Resolve)]


def early_releases(of: Any) -> set[bytes]:
    """The tokens that D has released before their lease."""
    waiting = [each.request for each in producer_of(of).waiting.values()]
    known = {token for token, prompt in prompts_of(of).items() if 0 in prompt.votes.values()}
    return known | {request.token for request in waiting if isinstance(request, messages.Release)}


def on_early_release(of: Any, act: Callable[[], None]) -> None:
    """Call this at each release that comes before its lease."""
    producer = producer_of(of)
    release = producer._release

    def seen(request: messages.Release, now: float) -> Any:
        if request.token not in leases_of(of) and not producer.prompts.is_over(request.token):
            act()
        return release(request, now)

    producer._release = seen


def sessions_of(of: Any) -> Any:
    """P's sessions by identity: the table itself."""
    return producer_of(of)._sessions.table


def sends_of(of: Any) -> Any:
    """The reads that P sends."""
    return producer_of(of)._sends


# --- decode side --------------------------------------------------------------------------------------------------


def consumer_of(of: Any) -> Any:
    """The decode side of a rank, or of its transfer thread; or itself."""
    of = getattr(of, "thread", of)
    return getattr(of, "_consumer", of)


# --- engine halves and the transfer thread ------------------------------------------------------------------------


def thread_of(owner: Any) -> TransferThread:
    """Of a worker half, of what has one as ``worker``, of what has it as ``thread``, or the transfer thread itself."""
    if isinstance(owner, TransferThread):
        return owner
    half = getattr(owner, "worker", owner)
    thread = half._transfer_thread if isinstance(half, WorkerHalf) else half.thread
    assert isinstance(thread, TransferThread), "caches are registered"
    return thread


def plans_of(owner: Any) -> PostedPlans:
    """What the engine has posted to the thread of ``thread_of``."""
    return thread_of(owner)._plans


def clock_of(owner: Any) -> RunningClock:
    """The time of the deadlines of the thread of ``thread_of``."""
    return thread_of(owner)._time


def set_clock(owner: Any, clock: Any) -> None:
    """Give the thread of ``thread_of`` another time, and have it look."""
    thread_of(owner)._time = clock
    thread_of(owner).wake()


def sleeps(owner: Any) -> bool:
    """Whether the thread of ``thread_of`` sleeps, with nothing to do."""
    thread = thread_of(owner)
    return bool(thread._time.asleep) and not thread._work_posted


def relaxed(owner: Any) -> bool:
    """Whether the thread of ``thread_of`` has no work, and has given the engine its switch interval back."""
    thread = thread_of(owner)
    return not thread._work_posted and not thread._switch.short


def ident_of(owner: Any) -> int:
    """The number by which Python knows the thread of ``thread_of``."""
    ident = thread_of(owner)._thread.ident
    assert ident is not None
    return ident


def request_phase(half: SchedulerHalf, request_id: str) -> RequestPhase | None:
    """The phase of a request of D's engine; ``None`` for one that has ended."""
    entry = half._requests.get(request_id)
    return None if entry is None else entry.life.phase


# --- vLLM ---------------------------------------------------------------------------------------------------------


def _ours(connector: Any) -> Any:
    """This connector, or of those below MultiConnector ours."""
    return next((child for child in getattr(connector, "_connectors", ()) if hasattr(child, "before_step")), connector)


def scheduler_half(connector: Any) -> SchedulerHalf:
    """Of a connector in the scheduler's process, or of what has one as ``connector``."""
    half = _ours(getattr(connector, "connector", connector))._scheduler
    assert isinstance(half, SchedulerHalf)
    return half


def steps_of(engine: Any) -> Any:
    """The steps in flight, of a connector in the scheduler's process as ``connector``."""
    return engine.connector._steps


def recovery_of(engine: Any) -> Any:
    """What takes back failed loads inside steps, of a connector in the scheduler's process as ``connector``."""
    return engine.connector._recovery


def worker_half(connector: Any) -> WorkerHalf:
    """Of a connector in a worker's process, or of what has one as ``connector``."""
    half = _ours(getattr(connector, "connector", connector))._worker
    assert isinstance(half, WorkerHalf)
    return half


def report_no_load_early(half: WorkerHalf) -> Callable[[], object]:
    """Have a rank report each load at its end, until what is returned is called."""
    half._loads.report_early = lambda lead, foresees: None  # type: ignore[method-assign, misc]
    return lambda: vars(half._loads).pop("report_early")


# --- planes -------------------------------------------------------------------------------------------------------


def receives(channel: Any) -> bool:
    """Whether a message of a channel of ``tcp`` has begun to arrive."""
    return any(flow.arriving is not None for flow in getattr(channel, "flows", ()))


def copy_stream_of(copies: Any) -> Any:
    """The CUDA stream of a rank's copies."""
    return copies._stream


def use_triton_launcher_only(enabled: bool) -> bool:
    """Make every launch go through Triton's own launcher, or allow direct launches again. Returns what held before."""
    before, launch._triton_launcher_only = launch._triton_launcher_only, enabled
    return before


def forget_driver() -> None:
    """Let CUDA's driver library be opened anew by the next call."""
    for kept in (cuda._driver, cuda._primary_context):
        kept.cache_clear()
