"""Engines for the tests of the adapter: built on demand, closed at the end, log lines kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, CONTENT, HEADS, LAYERS
from tests.vllm.stepped import Engine
from tests.vllm.stepped_config import model_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration of a model of a few kilobytes."""
    spec = ModelSpec(
        layers=LAYERS, hidden=32, heads=HEADS, kv_heads=HEADS, head_dim=CONTENT // 2, intermediate=32,
        vocabulary=300, max_tokens=1024,
    )  # fmt: skip
    return model_config(build_model(tmp_path_factory.mktemp("model") / "tiny", spec))


@pytest.fixture
def group(tiny: Any) -> Iterator[EngineGroup]:
    group = EngineGroup(tiny)
    yield group
    for engine in group.engines:
        engine.close()


@pytest.fixture(params=[(0, "shm"), (1, "auto")], ids=["in-step-staged", "a-step-ahead-auto"])
def pair(group: EngineGroup, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
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


assert BLOCK == 16, "lengths in these tests are chosen around blocks of 16"
