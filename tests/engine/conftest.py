"""The session's pair of real engines: started once, ended with all their processes."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.engines import ServerGroup
from tests.support.served import Pair, PatientServerGroup, eventually, no_block_held, started_pair
from tests.support.server import Server
from tests.support.tiny_model import ModelSpec, build_model

TELLING = re.compile(r"kvferry: |WARNING|ERROR|Traceback")
SHOWN_LINES = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Beside a failure what the engines wrote: why a load failed stands in their logs alone."""
    report = yield
    if report.failed:
        owners = [getattr(value, "group", value) for value in item.funcargs.values()]
        fleets = {id(owner): owner for owner in owners if isinstance(owner, ServerGroup)}
        for server in [server for group in fleets.values() for server in group.servers]:
            lines = [line for line in server.log_text().splitlines() if TELLING.search(line)]
            report.sections.append((f"log of {server.name}", "\n".join(lines[-SHOWN_LINES:])))
    return report


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("served") / "model", ModelSpec(layers=4))


@pytest.fixture(scope="module")
def running_pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    often = {"VLLM_LOG_STATS_INTERVAL": "1"}  # seconds
    with started_pair(tmp_path_factory.mktemp("logs"), model, environment=often) as pair:
        pair.check([7] * 40)  # the first hand-over pays for the handshake
        yield pair


class SharedEngines:
    """One engine for all tests of a module, and others beside it, which end after their test."""

    def __init__(self, group: ServerGroup, model: Path, one: Server, **options: Any) -> None:
        """``options``: of all engines."""
        self.group, self.model, self.one, self._options = group, model, one, options

    def beside(self, *names: str, **options: Any) -> list[Server]:
        """Engines that have started, all with these options."""
        engines = [self.group.engine(name, self.model, **(self._options | options)) for name in names]
        self.group.wait_ready(servers=engines)
        return engines

    @contextmanager
    def of_a_test(self) -> Iterator[Self]:
        """Afterwards all engines must be alive, and the others end."""
        yield self
        try:
            for server in self.group.servers:
                assert server.alive, server.log_tail()
                eventually(server.healthy, f"{server.name} answers on /health")
        finally:
            for server in self.group.servers[:]:
                if server is not self.one:
                    self.group.stop(server)


@pytest.fixture
def pair(running_pair: Pair) -> Iterator[Pair]:
    """The pair; a test that leaves blocks held, or an engine dead, fails."""
    running_pair.forget()
    yield running_pair
    for server in (running_pair.prefill, running_pair.decode):
        assert server.alive, server.log_tail()
        eventually(server.healthy, f"{server.name} answers on /health")
    no_block_held(running_pair.prefill, running_pair.decode)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ServerGroup]:
    """For engines of a test's own."""
    with PatientServerGroup(tmp_path / "logs") as group:
        yield group
