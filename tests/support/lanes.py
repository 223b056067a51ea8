"""The lanes of the plane ``nixl`` in tests: no RDMA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LANES = "cuda,tcp" if torch.cuda.is_available() else "tcp"
"""``UCX_TLS`` for NIXL: with a GPU it demands CUDA's copies, for host memory too; without one UCX warns of them on
stdout."""


@contextmanager
def lanes_of(plane: str) -> Iterator[None]:
    """The plane ``nixl`` goes over TCP here, unless ``UCX_TLS`` names other lanes."""
    before = os.environ.get("UCX_TLS")
    if plane == "nixl":
        os.environ["UCX_TLS"] = before or LANES
    try:
        yield
    finally:
        if plane == "nixl" and before is None:
            del os.environ["UCX_TLS"]
