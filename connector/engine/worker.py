"""The worker half: one rank's caches, its mover, and the ledger of what the engine was told. No vLLM.

The engine's thread calls in here. Nothing blocks but ``register`` at start-up, ``close`` at the end, ``begin_now`` and
``finish_now`` for loads that the engine computes with in the same step, and a moment's wait in a step that computes
nothing.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from kvferry.connector.config import Settings
from kvferry.connector.geometry.compatibility import check_geometry
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.regions import ElementOrder, rank_geometry, regions
from kvferry.connector.protocol.messages import MAX_MESSAGE_BYTES
from kvferry.connector.protocol.step_plan import Load, RankAddress, StepPlan, StepResults, by_region
from kvferry.connector.protocol.transfer_estimate import UNKNOWN, EstimateKey, TransferEstimate
from kvferry.connector.transfer.caches import RankCaches
from kvferry.connector.transfer.consumer import FinishedLoad
from kvferry.connector.transfer.copies import Copies, DeviceEvent, copies_on
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.transfer_thread import TransferThread
from kvferry.transport.channels import CPU
from kvferry.transport.control.listener import Listener
from kvferry.transport.control.zap_auth import CurveKeys, configure_curve
from kvferry.transport.errors import GeometryError, PlaneUnavailableError
from kvferry.transport.plane import Plane, PlaneContext, PlaneMemory
from kvferry.transport.registry import best_slot_bytes, best_staging_bytes, make_plane, preferred_planes
from kvferry.transport.wake import RunningClock

logger = logging.getLogger("vllm.kvferry.worker")

MAX_EVENTS = 64
"""Steps that a lease may lag behind the one that computed it; there are as many in flight as there are pipeline stages,
and one more with asynchronous scheduling."""
IDLE_WAIT_SECONDS = 5e-3
"""How long a step that computes nothing waits for a load to end: 1 GiB comes in less. Without it the engine's thread
would go round in Python meanwhile, and take interpreter and core from the mover. A new request may wait as long."""
LOOK_SECONDS = 0.2
"""How often a step that waits for a load looks whether the transfer thread is still there."""
GIVE_UP_SECONDS = 1.0
"""How much longer than P holds an ask a step waits for a load that it computes with: as long as one beside the steps
would have had to be granted. It is far more than was expected."""


class WorkerHalf:
    """One rank. ``register`` starts it, ``close`` ends it."""

    def __init__(self, settings: Settings, info: RankInfo, groups: Sequence[LayerGroup]) -> None:
        self._settings = settings
        self._info = info
        self._groups = tuple(groups)
        self._tables: tuple[int, ...] = ()  # the block table of each region
        self._transfer_thread: TransferThread | None = None
        self._rank_context: RankContext | None = None
        self._address: RankAddress | None = None
        self._consumer = bytes(16)
        self._loading: set[str] = set()
        self._now: dict[str, Load] = {}  # of those, what the step under way computes with
        self._held: set[str] = set()  # of those, what its device waits for
        self._failed_now: set[str] = set()
        self._waiting = RunningClock()  # since the step's work was posted, of its forward a second
        self._ended: list[FinishedLoad] = []  # taken from the mover, not told yet
        self._estimates: dict[EstimateKey, TransferEstimate] = {}
        self._leased: set[str] = set()
        self._events: deque[tuple[int, DeviceEvent]] = deque(maxlen=MAX_EVENTS)
        self._idle = False

    # --- start and end ------------------------------------------------------------------------------------------

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None = None, places: ElementOrder | None = None
    ) -> None:
        """Take the caches that the engine allocated, and start to serve.

        Args:
            kv_caches: by layer name, ``[B, H, N, C]`` or ``[B, N, C]``.
            num_blocks: manager blocks, where known.
            places: the order inside packed blocks, as ``regions`` takes it.

        Raises:
            GeometryError: caches of a form that is not carried, or on a device on which kernels do not run.
            ConfigError: the control port cannot be bound.
            PlaneUnavailableError: the data plane that the settings name cannot be had.
        """
        caches = self._caches(kv_caches, num_blocks, places)
        settings, info = self._settings, self._info
        curve = None
        if settings.curve_public_key is not None and settings.curve_secret_key is not None:
            curve = CurveKeys(settings.curve_public_key, settings.curve_secret_key)
        port = settings.side_channel_port and settings.side_channel_port + info.port_offset
        listener = Listener(settings.side_channel_host, port, curve=curve, max_message_bytes=MAX_MESSAGE_BYTES)
        rank_context = RankContext(settings, info.engine_id, secrets.token_bytes(16), info.model, caches, curve)
        try:
            rank_context.planes, rank_context.missing_planes = _planes(settings, curve, caches)
            self._transfer_thread = TransferThread(rank_context, listener)
        except BaseException:
            listener.close()  # an open socket would keep the process from ending
            caches.copies.close()
            raise
        self._rank_context = rank_context
        self._address = RankAddress(
            info.pp_rank, info.tp_rank, settings.advertised_host, listener.port, rank_context.incarnation
        )
        self._transfer_thread.start()
        logger.info(
            "kvferry: rank pp%d tp%d serves %d cache region(s) at %s, data planes %s%s",
            info.pp_rank, info.tp_rank, len(caches.views), listener.endpoint,
            ", ".join(plane.name for plane in rank_context.planes),
            "".join(f"; no {name}: {why}" for name, why in rank_context.missing_planes.items())
            + "".join(f"; only as D over {p.name}: {p.cannot_serve}" for p in rank_context.planes if p.cannot_serve),
        )  # fmt: skip

    @property
    def address(self) -> RankAddress | None:
        """Where peers reach this rank; ``None`` before ``register``."""
        return self._address

    @property
    def rank_context(self) -> RankContext | None:
        return self._rank_context

    @property
    def _copies(self) -> Copies:
        assert self._rank_context is not None, "caches are registered before the first step"
        return self._rank_context.caches.copies

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._transfer_thread is not None:
            self._transfer_thread.close()

    # --- every step ---------------------------------------------------------------------------------------------

    def post(self, plan: StepPlan) -> None:
        """Start a step's work; must come before the engine runs the step. ``begin_now`` and ``finish_now`` follow."""
        assert self._transfer_thread is not None, "caches are registered before the first step"
        self._loading.update(load.request_id for load in plan.loads)
        self._leased.update(lease.request_id for lease in plan.leases)
        self._consumer, self._idle = plan.consumer, plan.idle
        ours = by_region(plan, self._tables)
        self._now |= {load.request_id: load for load in ours.loads if load.now}
        if self._now:
            self._waiting = RunningClock()
        self._copies.idle = plan.idle or bool(self._now)
        event = self._copies.record_event()
        if event is not None:
            self._events.append((plan.step, event))
        computed = [self._computed(lease.step) for lease in plan.leases]
        self._transfer_thread.post(ours, event, computed)

    def _computed(self, step: int) -> DeviceEvent | None:
        """What the device has done once it has done a step: the first mark that was made after it."""
        return next((event for number, event in self._events if number > step), None)

    def begin_now(self) -> None:
        """Block until the engine may give its device this step's forward: until the loads have ended that it computes
        with, or their copies are under way and the device waits for them. Must come before the forward."""
        if not self._now:
            return
        self._see_to_now(lambda: self._now.keys() <= self._held)
        self._copies.idle = self._idle

    def finish_now(self) -> set[str]:
        """Block until the loads have ended that this step computes with; which of them failed. ``take_results`` says
        nothing of them. Must come before the engine tells of what it has computed."""
        if self._now:
            self._see_to_now(lambda: not self._now)
        failed, self._failed_now = self._failed_now, set()
        return failed

    def _see_to_now(self, done: Callable[[], bool]) -> None:
        assert self._transfer_thread is not None
        give_up = self._settings.ask_hold_seconds + GIVE_UP_SECONDS
        while True:
            alive = self._transfer_thread.alive
            self._look_at_now()
            if done():
                return
            if not alive:
                break
            waited = self._waiting.turn()
            if waited >= give_up:  # then it ends as soon as nothing writes its blocks any more
                logger.error("kvferry: the engine has waited %.0f s for %s to be loaded", waited, ", ".join(self._now))
                self._transfer_thread.post(StepPlan(consumer=self._consumer, cancels=tuple(self._now)))
                give_up = 2 * waited
            self._waiting.sleeps(LOOK_SECONDS)
            self._transfer_thread.wait(LOOK_SECONDS, inside=True)
        logger.error("kvferry: the transfer thread has ended; %d loads fail", len(self._now))
        for request_id in list(self._now):
            self._end_now(request_id, ok=False)

    def _look_at_now(self) -> None:
        """What has become of them."""
        assert self._transfer_thread is not None
        self._collect()
        for finished in [finished for finished in self._ended if finished.request_id in self._now]:
            self._ended.remove(finished)
            self._end_now(finished.request_id, ok=finished.ok)
        for load in self._transfer_thread.take_begun():
            if self._now.get(load.request_id) is load:
                self._copies.make_engine_wait()
                self._held.add(load.request_id)

    def _end_now(self, request_id: str, *, ok: bool) -> None:
        del self._now[request_id]
        self._held.discard(request_id)
        self._loading.discard(request_id)
        if not ok:
            self._failed_now.add(request_id)

    def take_estimates(self) -> dict[EstimateKey, TransferEstimate]:
        """How long hand-overs took that ended since the last call, the last one from each engine."""
        self._collect()
        estimates, self._estimates = self._estimates, {}
        return estimates

    def _collect(self) -> None:
        if self._transfer_thread is None:
            return
        for finished in self._transfer_thread.take_finished():
            self._ended.append(finished)
            source = finished.engine_id, self._info.tp_rank
            if self._estimates.get(source) != UNKNOWN:  # what was fast once more says nothing of the one that was not
                self._estimates[source] = finished.estimate

    def take_results(self) -> StepResults:
        """What ended since the last call. An id that was not started here, or was told before, is left out: the
        engine's scheduler asserts on those and dies."""
        results = StepResults()
        if self._transfer_thread is None:
            return results
        if self._idle and self._loading and not self._ended:
            self._transfer_thread.wait(IDLE_WAIT_SECONDS)
        for request_id in self._transfer_thread.take_freed():
            if request_id in self._leased:
                self._leased.remove(request_id)
                results.sent.add(request_id)
        self._collect()
        ended, self._ended = self._ended, []
        for finished in ended:
            if finished.request_id in self._loading:
                self._loading.remove(finished.request_id)
                results.received.add(finished.request_id)
                if not finished.ok:
                    results.failed.add(finished.request_id)
        if not self._transfer_thread.alive and (self._loading or self._leased):
            logger.error("kvferry: the transfer thread has ended; %d loads fail", len(self._loading))
            results.received |= self._loading
            results.failed |= self._loading
            results.sent |= self._leased
            self._loading, self._leased = set(), set()
        return results

    # --- caches -------------------------------------------------------------------------------------------------

    def _caches(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None, places: ElementOrder | None
    ) -> RankCaches:
        found = regions(self._groups, kv_caches, self._info, num_blocks, places)
        device = torch.device(found[0].view.device) if found else _device()
        for region in found:
            if torch.device(region.view.device) != device:
                raise GeometryError(
                    f"layer {region.view.layers[0]!r}: its cache lies on {region.view.device}, others on {device}; "
                    "expected all on one device"
                )
        self._tables = tuple(region.table for region in found)
        geometry = rank_geometry(self._info, self._groups, found)
        check_geometry(geometry)  # what no peer would accept is said at start-up
        views = tuple(region.view for region in found)
        return RankCaches(geometry, views, copies_on(device, self._settings.copy_sms), keep=dict(kv_caches))


def _device() -> torch.device:
    """Of a rank that holds no caches: a pipeline stage of other layers than those that are handed over."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if initialized else CPU


def _planes(settings: Settings, curve: CurveKeys | None, caches: RankCaches) -> tuple[list[Plane], dict[str, str]]:
    """The planes in order of preference, and why the others cannot be had."""
    memory = PlaneMemory(caches.device, caches.ranges(), caches.copies.synchronize)
    names = preferred_planes(caches.device) if settings.plane == "auto" else (settings.plane,)
    staging_bytes = settings.staging_bytes or max(best_staging_bytes(caches.device), 4 * (settings.slot_bytes or 0))
    planes: list[Plane] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            context = PlaneContext(
                host=settings.side_channel_host,
                slot_bytes=settings.slot_bytes or best_slot_bytes(name, caches.device, staging_bytes),
                staging_bytes=staging_bytes,
                configure_socket=lambda socket, server: configure_curve(socket, curve, server=server),
                memory=memory,
            )
            plane = make_plane(name, context)
            plane.offer()  # what it listens on must be had now, not at the first handshake
            if plane.cannot_serve and settings.plane != "auto":
                raise PlaneUnavailableError(plane.cannot_serve)
        except PlaneUnavailableError as error:
            if settings.plane != "auto":
                raise
            missing[name] = str(error)
        else:
            planes.append(plane)
    if not planes:
        raise PlaneUnavailableError("no data plane: " + "; ".join(f"{name}: {why}" for name, why in missing.items()))
    return planes, missing
