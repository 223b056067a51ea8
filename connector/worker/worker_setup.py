"""What a rank sets up once, when the engine has allocated its caches: their description, and the data planes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvferry.connector.config import AUTO, Settings, load_keys
from kvferry.connector.geometry.compatibility import check_geometry
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.regions import NO_DRAFTS, ElementOrder, rank_geometry, regions
from kvferry.connector.pages.caches import RankCaches
from kvferry.connector.pages.copies import copies_on
from kvferry.transport.channels import CPU
from kvferry.transport.control.listener import listening_socket
from kvferry.transport.errors import ConfigError, GeometryError, PlaneUnavailableError
from kvferry.transport.plane import Plane, PlaneContext, PlaneMemory
from kvferry.transport.registry import (
    MemoryKind,
    best_slot_bytes,
    best_staging_bytes,
    make_plane,
    plane_class,
    preferred_planes,
)


def bind_caches(
    settings: Settings,
    info: RankInfo,
    groups: Sequence[LayerGroup],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int | None,
    places: ElementOrder | None,
    drafts: Mapping[str, str] = NO_DRAFTS,
) -> tuple[RankCaches, tuple[int, ...]]:
    """Describe a rank's caches for hand-overs; the arguments are those of ``WorkerHalf`` and ``WorkerHalf.register``.
    Returns the caches, and the block table of each region. Raises GeometryError: caches of a form that is not carried,
    or on a device on which kernels do not run."""
    found = regions(groups, kv_caches, info, num_blocks, places, drafts)
    device = torch.device(found[0].view.device) if found else _device()
    for region in found:
        if torch.device(region.view.device) != device:
            raise GeometryError(
                f"layer {region.view.layers[0]!r}: its cache lies on {region.view.device}, others on {device}; "
                "expected all on one device"
            )
    geometry = rank_geometry(info, groups, found)
    check_geometry(geometry)  # no peer would accept it, so the engine fails at start-up
    views = tuple(region.view for region in found)
    caches = RankCaches(geometry, views, copies_on(device), keep=dict(kv_caches))
    return caches, tuple(region.table for region in found)


def _device() -> torch.device:
    """The device of a rank without caches: a pipeline stage with none of the layers that are handed over."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if initialized else CPU


def check_before_caches(settings: Settings, device: MemoryKind, ports: Iterable[int]) -> None:
    """Refuse at once what would keep a rank from its start, long before there are caches, on ``device``. ``ports``:
    those on which ranks will listen. Loads no library of a plane, and starts no thread.

    Raises:
        ConfigError: the key file, the named data plane, ``side_channel_host`` or a port cannot be used; one line.
    """
    load_keys(settings)
    for port in ports:
        listening_socket(settings.side_channel_host, port).close()
    if settings.plane != AUTO:
        try:
            plane_class(settings.plane, device, encrypt=settings.encrypt).check_host(settings.side_channel_host)
        except PlaneUnavailableError as error:
            raise _unusable(settings, device, error) from None


def _unusable(settings: Settings, device: torch.device | MemoryKind, why: PlaneUnavailableError) -> ConfigError:
    choices = ", ".join((AUTO, *preferred_planes(device)))
    return ConfigError(f"plane: {settings.plane!r} cannot be used: {why}; expected one of {choices}")


def make_planes(settings: Settings, caches: RankCaches) -> tuple[list[Plane], dict[str, str]]:
    """Make the data planes of a rank. Returns the planes in order of preference; by the name of each other plane, why
    this rank cannot have it.

    Raises:
        ConfigError: the rank cannot have the data plane that the settings name.
        PlaneUnavailableError: the rank can have no data plane.
    """
    memory = PlaneMemory(caches.device, caches.ranges(), caches.copies.synchronize)
    names = preferred_planes(caches.device) if settings.plane == "auto" else (settings.plane,)
    staging_bytes = settings.staging_bytes or max(best_staging_bytes(caches.device), 4 * (settings.slot_bytes or 0))
    planes: list[Plane] = []
    missing: dict[str, str] = {}
    for place, name in enumerate(names):
        try:
            context = PlaneContext(
                host=settings.side_channel_host,
                slot_bytes=settings.slot_bytes or best_slot_bytes(name, caches.device, staging_bytes),
                staging_bytes=staging_bytes,
                encrypt=settings.encrypt,
                memory=memory,
                others=frozenset({*(plane.name for plane in planes), *names[place + 1 :]}),
            )
            plane = make_plane(name, context)
            plane.offer()  # it must get its listener now, not at the first handshake
            if plane.cannot_serve and settings.plane != "auto":
                raise PlaneUnavailableError(plane.cannot_serve)
        except PlaneUnavailableError as error:
            if settings.plane != "auto":
                raise _unusable(settings, caches.device, error) from None
            missing[name] = str(error).removeprefix(f"{name}: ")
        else:
            planes.append(plane)
    if not planes:
        why = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise PlaneUnavailableError(f"no data plane: {why}")
    return planes, missing
