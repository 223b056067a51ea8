"""The other ways to move blocks in ``gpu_planes.py``, and the ceilings: one class per end. Axes [L, B, H, N, C].

Those that cannot change the form (NIXL, a memcpy per block) move P's own pieces: to blocks of P's form on D.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_caches import Cache, Digest, digest, noise
from gpu_cases import Config, Form, Point, Side, cache_bytes, num_blocks
from gpu_endpoints import ArenaEndpoint, Endpoint
from gpu_methods import IN_A_ROW
from timing import timed

from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages

if TYPE_CHECKING:
    from kvferry.transport.planes.ucx_worker import UcxArray

LARGE_DESCRIPTOR = 64 << 20
RAW_MESSAGE, RAW_WINDOW = 32 << 20, 4
HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t."""
REPEATED = 4
"""Moves between two events; each launch hides behind the move before, that of the first behind the head start."""


def repeated(go: Callable[[], object]) -> Callable[[], None]:
    """``REPEATED`` times."""

    def several() -> None:
        for _ in range(REPEATED):
            go()

    return several


class NixlEndpoint(ArenaEndpoint):
    """READ from prepared lists: P's pieces, or few large descriptors where the bytes lie together."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"{config.role}-{os.getpid()}", nixl_agent_config())
        self.registered = self.agent.register_memory(self.arena)
        self.memory = "DRAM" if self.device.type == "cpu" else "VRAM"
        self.lists: dict[tuple[str, str], tuple[Any, Any, Any]] = {}

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is None:
            metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
            return json.dumps({"metadata": metadata, "base": self.arena.data_ptr()})
        description = json.loads(blob)
        name = self.agent.add_remote_agent(base64.b64decode(description["metadata"]))
        self.name = name.decode() if isinstance(name, bytes) else name
        self.base = int(description["base"])
        return None

    def _rows(self, point: Point, way: str, side: Side, base: int) -> Any:
        """Descriptors ``[n, 3]``: address, bytes, device."""
        if way == "nixl_best":
            starts = np.arange(0, point.nbytes, LARGE_DESCRIPTOR)
            addresses, sizes = base + starts, np.minimum(LARGE_DESCRIPTOR, point.nbytes - starts)
        else:
            addresses = self.pieces(point, side, base)
            sizes = np.full(len(addresses), point.p.block_bytes)
        return np.stack([addresses, sizes, np.zeros_like(addresses)], axis=1).astype(np.uint64)

    def _prepared(self, point: str, way: str) -> tuple[Any, Any, Any]:
        """Local list, remote list and indices; vLLM's connector makes them at its handshake."""
        if (point, way) not in self.lists:
            ours = self._rows(self.points[point], way, "d", self.arena.data_ptr())
            theirs = self._rows(self.points[point], way, "p", self.base)
            local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, self.memory)
            remote = self.agent.prep_xfer_dlist(self.name, theirs, self.memory)
            self.lists[point, way] = local, remote, np.arange(len(ours), dtype=np.int32)
        return self.lists[point, way]

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        local, remote, indices = self._prepared(point, way)
        found = []
        for _ in range(repeats):
            handle = self.agent.make_prepped_xfer("READ", local, indices, remote, indices)
            started = time.perf_counter()  # after the preparation, which vLLM's connector pays for each request
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            found.append(time.perf_counter() - started)
            self.agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL's transfer ended as {state}")
        return found


def _checked(result: tuple[Any, ...]) -> Any:
    """What a CUDA call returns beside its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


class MappedEndpoint(ArenaEndpoint):
    """P's allocation mapped by D through CUDA IPC: the bare kernel, a memcpy per block, and one for all bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from cuda.bindings import driver, runtime

        self.driver, self.runtime = driver, runtime

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is None:
            base, _ = _checked(self.driver.cuMemGetAddressRange(self.arena.data_ptr()))
            handle = _checked(self.runtime.cudaIpcGetMemHandle(int(base)))
            handle_bytes = ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)
            offset = self.arena.data_ptr() - int(base)
            return json.dumps({"handle": base64.b64encode(handle_bytes).decode(), "offset": offset})
        found = json.loads(blob)
        handle = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(handle.getPtr()), base64.b64decode(found["handle"]), HANDLE_BYTES)
        mapped = _checked(self.runtime.cudaIpcOpenMemHandle(handle, self.runtime.cudaIpcMemLazyEnablePeerAccess))
        self.base = int(mapped) + int(found["offset"])
        return None

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        it, in_a_row = self.points[point], way.endswith(IN_A_ROW)
        way = way.removesuffix(IN_A_ROW)
        if way.startswith("kernel"):
            go = self._kernel(it, int(way[7:-2]) if way != "kernel" else None)
        else:
            go = self._memcpys(it) if way == "memcpy_async" else self._copy(it)
        if in_a_row:
            return [timed(repeated(go), self.device, head_start=True) / REPEATED for _ in range(repeats)]
        stream = torch.cuda.current_stream()

        def launch_to_end() -> None:
            go()
            stream.synchronize()

        return self._timed(launch_to_end, repeats)

    def _kernel(self, point: Point, sms: int | None) -> Callable[[], None]:
        ours, theirs = self.cache(point.d, "d"), self.cache(point.p, "p")
        bases = theirs.bases - self.arena.data_ptr() + self.base
        to = [ours.pages(ids) for ids in point.tables("d", point.d, ours.num_blocks)]
        of = [theirs.pages(ids, bases) for ids in point.tables("p", point.p, theirs.num_blocks)]

        def go() -> None:
            for dst, src in zip(to, of, strict=True):
                copy_pages(
                    dst,
                    src,
                    num_heads=point.p.heads,
                    num_tokens=point.tokens,
                    content_bytes=point.p.content,
                    device=self.device,
                    sms=sms,
                    over_link=True,
                )

        return go

    def _memcpys(self, point: Point) -> Callable[[], None]:
        to = self.pieces(point, "d", self.arena.data_ptr()).tolist()
        of = self.pieces(point, "p", self.base).tolist()
        memcpy, kind = self.runtime.cudaMemcpyAsync, self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        stream, size = torch.cuda.current_stream().cuda_stream, point.p.block_bytes

        def go() -> None:
            for dst, src in zip(to, of, strict=True):
                _checked(memcpy(dst, src, size, kind, stream))

        return go

    def _copy(self, point: Point) -> Callable[[], None]:
        memcpy, kind = self.runtime.cudaMemcpyAsync, self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        stream, to = torch.cuda.current_stream().cuda_stream, self.arena.data_ptr()
        return lambda: _checked(memcpy(to, self.base, point.nbytes, kind, stream))


class UcxxRawEndpoint(ArenaEndpoint):
    """Bulk: tagged messages of contiguous memory, a few in flight, with the settings of our plane."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from kvferry.transport.planes.ucx_worker import UcxWorker, load_array

        self.array = load_array()
        self.worker = UcxWorker("127.0.0.1", here=True)
        self.address_sent = False
        self.todo: list[UcxArray] = []

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is not None:
            self.link = self.worker.link(base64.b64decode(blob))
        if self.address_sent:
            return None
        self.address_sent = True
        return base64.b64encode(self.worker.address).decode()

    def serve(self, point: str, way: str, repeats: int) -> Any:
        self.todo = self._messages(point) * repeats

    def _messages(self, point: str) -> list[UcxArray]:
        """Made before the time is taken."""
        pieces = self.arena[: self.points[point].nbytes].split(RAW_MESSAGE)
        return [self.array(piece if piece.is_cuda else piece.numpy()) for piece in pieces]

    def synchronize(self) -> None:
        for _ in self._moved(iter(self.todo), self._send):
            pass

    def _send(self, message: UcxArray) -> Any:
        return self.link.send(message, 1)

    def _receive(self, message: UcxArray) -> Any:
        announced = self.worker.probe()
        return None if announced is None else announced.receive(message)

    def _moved(self, messages: Iterator[UcxArray], start: Callable[[UcxArray], Any]) -> Iterator[None]:
        """Moves all; stops after each turn of progress."""
        flying: list[Any] = []
        message = next(messages, None)
        while message is not None or flying:
            while message is not None and len(flying) < RAW_WINDOW and (request := start(message)) is not None:
                flying.append(request)
                message = next(messages, None)
            self.worker.progress()
            if not self.link.alive:
                raise RuntimeError(f"the link is down: {self.link.reason}")
            if any(request.completed and request.status for request in flying):
                raise RuntimeError("a message failed")
            flying = [request for request in flying if not request.completed]
            yield

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        messages = self._messages(point)

        def receive_all() -> None:
            for _ in self._moved(iter(messages), self._receive):
                pass

        found = self._timed(receive_all, repeats)
        for _ in range(100):  # the sender learns of the end
            self.worker.progress()
        return found

    def close(self) -> None:
        self.worker.close()


class TorchEndpoint(Endpoint):
    """Both caches in one process that sees both GPUs: gather on P's, copy, change the form and scatter on D's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        where = [self.device] * 2 if self.device.type == "cpu" else [torch.device("cuda", n) for n in (0, 1)]
        self.arenas: dict[Side, torch.Tensor] = {}
        self.blocks: dict[Side, dict[Form, int]] = {}
        self.generators = {}
        sides: tuple[Side, Side] = ("p", "d")
        for side, device in zip(sides, where, strict=True):
            self.blocks[side] = num_blocks(config.points, side)
            self.arenas[side] = torch.empty(cache_bytes(self.blocks[side]), dtype=torch.uint8, device=device)
            self.generators[side] = self._generator(device)
            noise(self.arenas[side], self.generators[side])

    def cache(self, form: Form, side: Side) -> Cache:
        return Cache.carved(form, self.blocks[side][form], self.arenas[side])

    def scrub(self, point: str, way: str) -> None:
        noise(self.arenas["d"], self.generators["d"])

    def digest(self, point: str, way: str, side: Side) -> str:
        it = self.points[point]
        form = it.p if side == "p" else it.d
        cache = self.cache(form, side)
        return cache.digest(it.tables(side, form, cache.num_blocks), it.tokens)

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        it = self.points[point]
        p, d = self.cache(it.p, "p"), self.cache(it.d, "d")
        devices = [self.arenas["p"].device, self.arenas["d"].device]
        of = torch.from_numpy(np.concatenate(it.tables("p", it.p, p.num_blocks))).to(devices[0])
        to = torch.from_numpy(np.concatenate(it.tables("d", it.d, d.num_blocks))).to(devices[1])
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            for layer in range(it.p.layers):
                moved = p.stored(layer).index_select(0, of).to(devices[1], non_blocking=True)
                tokens = moved if it.p.order == "NHD" else moved.transpose(1, 2)  # [B, N, H, C]
                blocks = tokens.reshape(len(to), it.d.block, it.p.heads, -1).transpose(1, 2)
                d.tensor(layer).index_copy_(0, to, blocks)
            if self.device.type == "cuda":
                torch.cuda.synchronize(devices[0])
                torch.cuda.synchronize(devices[1])
            found.append(time.perf_counter() - started)
        return found


class LocalEndpoint(Endpoint):
    """On one GPU: a contiguous copy, and the same bytes packed out of P's form and unpacked into D's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        (self.point,) = config.points
        point = self.point
        self.p = Cache.own(point.p, num_blocks(config.points, "p")[point.p], self.device)
        self.d = Cache.own(point.d, num_blocks(config.points, "d")[point.d], self.device)
        self.wire, self.other = (torch.empty(point.nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.p.fill(self.generator)
        noise(self.wire, self.generator)

    def scrub(self, point: str, way: str) -> None:
        if way == "unpack":
            self.d.fill(self.generator)
        else:
            noise(self.wire if way == "pack" else self.other, self.generator)

    def _wire_digest(self) -> str:
        found = Digest()
        for layer in self.wire.chunk(self.point.p.layers):
            found.add(layer)
        return found.text

    def digest(self, point: str, way: str, side: Side) -> str:
        if way == "device_copy":
            return digest(self.wire if side == "p" else self.other)
        if (way, side) in (("pack", "d"), ("unpack", "p")):
            return self._wire_digest()
        cache = self.p if side == "p" else self.d
        return cache.digest(self.point.tables(side, cache.form, cache.num_blocks), self.point.tokens)

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        if way == "device_copy":
            several = repeated(lambda: self.other.copy_(self.wire))
        elif self.device.type == "cpu":
            several = repeated(self._on_host(way == "pack"))
        else:
            several = self._by_kernel(way == "pack")

        return [timed(several, self.device, head_start=True) / REPEATED for _ in range(repeats)]

    def _pages(self, packs: bool) -> Pages:
        cache, side = (self.p, "p") if packs else (self.d, "d")
        (ids,) = self.point.tables(side, cache.form, cache.num_blocks)  # type: ignore[arg-type]
        return cache.pages(ids)

    @property
    def _sizes(self) -> dict[str, Any]:
        form = self.point.p
        return {
            "num_heads": form.heads, "num_tokens": self.point.tokens, "content_bytes": form.content,
            "device": self.device,
        }  # fmt: skip

    def _on_host(self, packs: bool) -> Callable[[], object]:
        pages, form = self._pages(packs), self.point.p
        wire = wire_pages(self.wire.data_ptr(), form.layers, form.heads, self.point.tokens, form.content)
        sides = (wire, pages) if packs else (pages, wire)
        return lambda: copy_pages(*sides, **self._sizes)

    def _by_kernel(self, packs: bool) -> Callable[[], None]:
        """As a hand-over has it, whose messages share their tables on the GPU."""
        from kvferry.kernels.paged_copy_triton import DevicePages

        def several() -> None:
            there = DevicePages(self._pages(packs), **self._sizes)
            for _ in range(REPEATED):
                there.copy(
                    self.wire.data_ptr(), to_wire=packs, layer=0, num_layers=self.point.p.layers, token=0,
                    num_tokens=self.point.tokens, sms=None,
                )  # fmt: skip

        return several
