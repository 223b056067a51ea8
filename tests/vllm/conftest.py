"""Engines for the tests of the adapter: built on demand, closed at the end, log lines kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.step_loads import step_hold
from kvferry.transport.bootstrap import BootstrapServer
from tests.vllm.releases import RELEASE
from tests.vllm.stepped import RUNNERS, EngineGroup, Lines, Pair, as_release_of, tiny_model

MODULES_026 = {
    "test_copies_behind": "loads inside the step as 0.32 schedules them; tests/gpu runs them with 0.26",
    "test_digest_vllm": "the configuration of 0.32's models",
    "test_families_vllm": "the caches of 0.32's models",
    "test_kv_postprocess_vllm": "0.26's functions take another layout",
    "test_prefix_histories": "0.26's statistics have another form",
    "test_walk": "preempts as 0.32 does, which drops the outputs in flight",
    "test_step_loads": "loads inside the step as 0.32 schedules them; tests/gpu runs them with 0.26",
    "test_prometheus": "0.26's statistics have another form",
}
"""What does not fit 0.26, by module."""
TESTS_026 = {
    "test_026_with_a_window_is_refused": "needs a release that takes it",
    "test_026_with_several_groups_is_refused": "needs a release that takes it",
    "test_preempted_on_p": "preempts as 0.32 does",
    "test_figures_pass_through_multiconnector": "MultiConnector of 0.32",
    "test_figures_reach_vllms_log_line_and_prometheus": "0.26's statistics have another form",
    "test_of_an_edited_history_only_what_is_common": "0.26's statistics have another form",
    "test_a_source_that_answers_late": "0.26's statistics have another form",
    "test_what_cannot_be_read_is_refused": "0.26 refuses some of these engines itself",
}
"""What does not fit 0.26, by test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with its reason, what was written for later releases than the vLLM that is imported."""
    if RELEASE >= (0, 32):
        return
    for item in items:
        name = getattr(item, "originalname", item.name)
        why = MODULES_026.get(item.path.stem) or TESTS_026.get(name)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"not for vLLM 0.26: {why}"))


@pytest.fixture(autouse=True)
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its loads however slow the host is; a test of the end of its patience sets its own."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 60.0)


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
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    with as_release_of(request.param):
        yield request.param


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


@pytest.fixture
def page() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()
