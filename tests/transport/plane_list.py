"""The registered planes as parameters of tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.transport.plane import Plane, PlaneContext
from kvferry.transport.planes.tcp import MOST_FLOWS, TcpPlane
from kvferry.transport.registry import PlaneSpec, make_plane, plane_specs
from tests.support.lanes import lanes_of

PUSH, PULL = False, True


ENCRYPTED = "-encrypted"
"""Behind the name of a plane: with the setting ``encrypt``."""
FLOWS = "-flows"
"""Behind the name ``tcp``: with several flows for each channel, as between GPUs, but in slots of host memory."""


def plane_of(name: str, context: PlaneContext) -> Plane:
    """The plane of a name that may end with ``FLOWS``, ``ENCRYPTED`` or both; ``nixl`` over TCP."""
    registered = name.removesuffix(ENCRYPTED).removesuffix(FLOWS)
    with lanes_of(name):
        plane = make_plane(registered, replace(context, encrypt=context.encrypt or name.endswith(ENCRYPTED)))
    if registered + FLOWS == name.removesuffix(ENCRYPTED):
        assert isinstance(plane, TcpPlane)
        plane.flows = MOST_FLOWS
    return plane


def pattern(tag: int, nbytes: int) -> np.ndarray:
    """What message ``tag`` holds: uint8 [nbytes], different for each tag and place."""
    start = np.uint64(tag * 2654435761 % 2**64)
    words = np.arange((nbytes + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    return words.view(np.uint8)[:nbytes]


def parameter(spec: PlaneSpec, device: str = "") -> Any:
    """A plane's name and a device type, marked where the plane needs an extra that a machine may lack."""
    marks = {"ucx": pytest.mark.ucx, "nixl": pytest.mark.nixl}
    return pytest.param(f"{spec.name} {device}".rstrip(), marks=marks.get(spec.name, ()))


def host_planes(*kinds: bool) -> list[Any]:
    """The names of all planes of these kinds that carry caches in host memory."""
    return [parameter(spec) for spec in plane_specs() if spec.host is not None and spec.load().pulls in kinds]


def planes_by_memory(kind: bool) -> list[Any]:
    """``name device`` of all planes of a kind, once for each type of device that they carry."""
    found = [spec for spec in plane_specs() if spec.load().pulls is kind]
    return [
        parameter(spec, device) for spec in found for device, use in (("cpu", spec.host), ("cuda", spec.gpu)) if use
    ]
