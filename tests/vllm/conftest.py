"""Engines for the tests of the adapter: built on demand, closed at the end, log lines kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.step_loads import step_hold
from tests.vllm.releases import why_not
from tests.vllm.stepped import RUNNERS, EngineGroup, Lines, Pair, tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with its reason, what the vLLM that is imported cannot run."""
    for item in items:
        if why := why_not(getattr(item, "originalname", "")):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def models_are_looked_at_here() -> Iterator[None]:
    """vLLM starts a process to look at a model's class, lest this one touches a GPU: 8 s of a core for each model."""
    with mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()):
        yield


@pytest.fixture(autouse=True)
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its loads however slow the host is; a test of the end of its patience sets its own. Nor does the
    time of this host's steps say which loads go inside them, or end early."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(StepsInFlight, "step_seconds", math.inf)
    monkeypatch.setattr(StepsInFlight, "seconds_until_seen", lambda *_: 0.0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration of a model of a few kilobytes."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def group(tiny: Any) -> Iterator[EngineGroup]:
    group = EngineGroup(tiny)
    yield group
    group.close()


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(0, "shm"), (1, "auto")], ids=["in-step-staged", "a-step-ahead-auto"])
def pair(group: EngineGroup, request: pytest.FixtureRequest) -> Pair:
    """P and D: the scheduler waits for every step and P pushes, or it runs ahead over whatever plane is chosen."""
    ahead, plane = request.param
    return group.pair(ahead=ahead, extra={"plane": plane})


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("vllm.kvferry")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # as vLLM's own set-up of logging does for all below "vllm"
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)
