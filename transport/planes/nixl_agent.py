"""NIXL from one thread: an agent, the memory that peers may READ, and READs. This module alone imports NIXL.

The binding is used without NIXL's Python layer: that layer gives its progress thread no time to sleep, and serialises
with pickle. NIXL takes the settings of its UCX from the environment only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.planes.ucx_settings import Lanes, failing_as, nixl_release

_PROGRESS_MICROSECONDS = 100_000
"""NIXL's progress thread sleeps until UCX has an event, and this long at most. With NIXL's default of 0 it does not
sleep: it then takes 15 to 20 % of a core while nothing moves, with this value 0.05 %."""


class NixlRead:
    """A READ under way."""

    __slots__ = ("_agent", "_handle")

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent, self._handle = agent, handle

    def ended(self) -> bool | None:
        """``None``: under way. Else UCX uses our memory no more; ``True``: the bytes are there."""
        binding, native = self._agent.binding, self._agent.native
        try:
            status = native.getXferStatus(self._handle)
        except Exception:  # NIXL raises one of its dozen exception types where UCX has ended the READ with an error
            status = None
        if status == binding.NIXL_IN_PROG:
            return None
        with contextlib.suppress(Exception):
            native.releaseXferReq(self._handle)
        return bool(status == binding.NIXL_SUCCESS)


class NixlAgent:
    """One agent, and from ``start`` on NIXL's UCX with one thread of NIXL, which sleeps while nothing moves. Raises
    PlaneUnavailableError: NIXL does not load on this machine."""

    def __init__(self, lanes: Lanes) -> None:
        package, _ = nixl_release()
        self._lanes = lanes
        self._backend: int | None = None
        self.name = secrets.token_hex(8)
        try:
            self.binding: Any = import_module(f"{package}._bindings")
        except (ImportError, OSError) as error:
            raise PlaneUnavailableError(f"nixl: NIXL does not load: {str(error).splitlines()[0]}") from None
        config = self.binding.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = _PROGRESS_MICROSECONDS
        with failing_as(PlaneUnavailableError, "nixl: NIXL does not start"):
            self.native: Any = self.binding.nixlAgent(self.name, config)
            self.native.getPluginParams("UCX")  # loads UCX, 0.4 s, which no hand-over should wait for

    def start(self) -> None:
        """Start UCX, if it has not started. Over TCP it listens from then on. Raises PlaneUnavailableError: it does not
        start on this machine."""
        if self._backend is not None:
            return
        refused = failing_as(PlaneUnavailableError, f"nixl: UCX does not start with {self._lanes.shown}")
        with refused, _environment(self._lanes.settings):
            self._backend = self.native.createBackend("UCX", {"ucx_error_handling_mode": "peer"})

    def register(self, memory: torch.Tensor) -> bytes:
        """Register ``memory``, uint8 [n]. Returns our address, and what a peer needs to READ the memory. Raises
        TransportError: NIXL refused."""
        rows = self.binding.nixlRegDList(_segment(self.binding, memory.device.type), [(*_row(memory), "")])
        with failing_as(TransportError, "nixl: memory cannot be registered"):
            self.native.registerMem(rows, [self._backend])
            return bytes(self.native.getLocalPartialMD(rows, True, [self._backend]))

    def load(self, name: str, metadata: bytes) -> None:
        """Take what ``register`` returned to agent ``name``. Native code parses it: it must come from an authenticated
        peer. Raises TransportError: NIXL refused, or it is another agent's."""
        with failing_as(TransportError, "nixl: the peer's metadata is refused"):
            loaded = self.native.loadRemoteMD(metadata)
        if (loaded.decode() if isinstance(loaded, bytes) else loaded) != name:
            raise TransportError(f"nixl: the peer's metadata is not that of agent {name!r}")

    def connect(self, name: str) -> None:
        """Begin to connect to a peer, so that its first READ does not wait for it."""
        with contextlib.suppress(Exception):  # the first READ tells
            self.native.makeConnection(name, [self._backend])

    def forget(self, name: str) -> None:
        """Close the connection to a peer. No READ from it may be under way: NIXL then says that it has ended, while UCX
        goes on with it."""
        with contextlib.suppress(Exception):
            self.native.invalidateRemoteMD(name)

    def read(self, memory: torch.Tensor, name: str, address: int, device: int | None) -> NixlRead:
        """READ a peer's memory from ``address`` on into ``memory``, uint8 [n]. ``device``: the index of the peer's GPU,
        ``None`` for host memory there. Raises TransportError: the peer is gone."""
        binding = self.binding
        row = _row(memory)
        ours = binding.nixlXferDList(_segment(binding, memory.device.type), [row])
        theirs = binding.nixlXferDList(
            _segment(binding, "cpu" if device is None else "cuda"), [(address, row[1], device or 0)]
        )
        with failing_as(TransportError, "nixl: a READ is refused"), contextlib.ExitStack() as on_error:
            handle = self.native.createXferReq(binding.NIXL_READ, ours, theirs, name, "", [self._backend])
            on_error.callback(self.native.releaseXferReq, handle)
            self.native.postXferReq(handle, "")
            on_error.pop_all()
            return NixlRead(self, handle)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self.native = None


def _segment(binding: Any, device_type: str) -> Any:
    return binding.DRAM_SEG if device_type == "cpu" else binding.VRAM_SEG


def _row(memory: torch.Tensor) -> tuple[int, int, int]:
    return memory.data_ptr(), memory.numel(), memory.device.index or 0


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables while UCX reads its settings; other users of UCX in this process have their own."""
    before = {name: os.environ.get(name, "") for name in settings}
    new = [name for name in settings if name not in os.environ]
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.update(before)
        for name in new:
            del os.environ[name]
