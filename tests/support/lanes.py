"""The lanes of the plane ``nixl`` on a machine without RDMA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lanes_of(plane: str) -> Iterator[None]:
    """The machine of a test has no RDMA: the plane ``nixl`` goes over TCP there, which ``UCX_TLS`` must name."""
    before = os.environ.get("UCX_TLS")
    if plane == "nixl":
        os.environ["UCX_TLS"] = before or ("cuda,tcp" if torch.cuda.is_available() else "tcp")
    try:
        yield
    finally:
        if plane == "nixl" and before is None:
            del os.environ["UCX_TLS"]
