"""The page at ``/``: engines, rates and latencies of the router, from ``/router/status``."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def page() -> str:
    return (Path(__file__).resolve().parent / "status.html").read_text(encoding="utf-8")
