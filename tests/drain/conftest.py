"""Servers that stand in for engines, closed at the end of a test, and which may be slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvferry.cli import metrics_page
from tests.drain.pages import Pages


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page.fetch_samples, "__defaults__", (60.0,))


@pytest.fixture
def serve() -> Iterator[Callable[..., Pages]]:
    servers: list[Pages] = []

    def start(*pages: str | int) -> Pages:
        servers.append(Pages(*pages))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
