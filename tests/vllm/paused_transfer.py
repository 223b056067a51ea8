"""Holds transfer threads at a chosen point, so that a test can act while a hand-over is exactly there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

from kvferry.connector.decode_side.fetch import FetchState, ReadPhase
from kvferry.connector.prefill_side import serve
from kvferry.transport.errors import ProtocolError
from kvferry.transport.planes import cma
from tests.support.inside import consumer_of, producer_of
from tests.vllm.stepped import Engine, eventually


def no_board(*place: object) -> None:
    """In the place of ``link.BoardReader``: who reads P's pages by itself then asks for them, and has it committed."""
    raise OSError(24, "Too many open files")


class PausedTransfer:
    """P parks messages of these ``kinds`` and sends no more than ``chunks`` chunks, until ``open``.

    Where D reads P's pages by itself, it is D that is held, after ``chunks`` turns of 16 KiB.
    """

    def __init__(self, engine: Engine, *kinds: type, chunks: int | None = None, reader: Engine | None = None) -> None:
        self._transfer_thread = engine.thread
        self._producer: Any = producer_of(self._transfer_thread)
        self._kinds, self._left = kinds, chunks
        self._parked: list[tuple[bytes, Any, str]] = []
        self._request, self._pump = self._producer.handle, self._producer.pump
        self._producer.handle, self._producer.pump = self._hold_request, self._hold_pump
        self._open = False
        if reader is not None:
            self._plane: Any = reader.thread.rank_context.plane("cma")
            if self._plane is not None:
                self._progress, self._plane.progress = self._plane.progress, self._hold_progress

    def _hold_progress(self) -> bool:
        if self._open or self._left is None or not self._plane.copies:
            return bool(self._progress())
        if self._left == 0:
            return False
        self._left -= 1
        with mock.patch.object(cma, "TURN_BYTES", 16 << 10):
            return bool(self._progress())

    def _hold_request(self, identity: bytes, request: Any, now: float, address: str) -> None:
        if self._parked if self._open else isinstance(request, self._kinds):  # none goes before those that are parked
            self._parked.append((identity, request, address))
        else:
            self._request(identity, request, now, address)

    def _hold_pump(self, now: float) -> bool:
        if self._open:
            parked, self._parked = self._parked, []
            for identity, request, address in parked:
                with suppress(ProtocolError):  # its sender has gone meanwhile; ``serve`` counts that
                    self._request(identity, request, now, address)
            return bool(self._pump(now)) or bool(parked)
        if self._left is None:
            return bool(self._pump(now))
        if self._left == 0:
            return False
        with mock.patch.object(serve, "PACKS_PER_TURN", 1):
            sent = bool(self._pump(now))
        self._left -= sent
        return sent

    def open(self) -> None:
        """Go on, with what was parked first."""
        self._open = True
        self._transfer_thread.wake()


def job_of(engine: Engine, request_id: str) -> Any:
    """D's hand-over of a request, or None."""
    loads = consumer_of(engine).loads.running
    return next((each for each in list(loads) if each.load.request_id == request_id), None)


def in_phase(
    engine: Engine, request_id: str, phase: FetchState | ReadPhase, also: Callable[[Any], bool] = lambda job: True
) -> None:
    """Wait, without stepping, until D's hand-over is in this state, or a read of it in this phase."""

    def reached() -> bool:
        job = job_of(engine, request_id)
        return job is not None and phase in (job.state, *[read.phase for read in job.reads]) and also(job)

    eventually(reached)


def in_mid_transfer(p: Engine, d: Engine, ids: list[int], params: object) -> tuple[str, PausedTransfer]:
    """A request of D, some of whose bytes have come."""
    p.step()
    paused = PausedTransfer(p, reader=d, chunks=1)
    request_id = d.add(ids, params)
    d.step()
    in_phase(d, request_id, ReadPhase.MOVING, lambda job: job.nbytes > 0)
    return request_id, paused
