"""How all tests run: property tests draw the same examples in every run, however slow the machine is at the moment, and
tests that share expensive fixtures run in one of pytest-xdist's processes.

``pytest --hypothesis-profile default`` draws anew.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

LONGEST_FIRST = (
    "tests/vllm/test_families_vllm.py",
    "tests/kernels/test_convert_triton.py",
    "tests/kernels/test_kv_postprocess_triton.py",
    "tests/transport/test_planes.py",
    "tests/vllm/test_random_walk.py",
    "tests/ranks/test_matrix.py",
    "tests/examples/test_engine_neutral.py",
)
"""Files that take half a minute and more: begun last, one of them would run on alone."""
SPLIT = {"tests/transport/test_planes.py": r"\[(?:.*-)?(shm|tcp|zmq|ucx)\b"}
"""Files whose tests make several groups, and the part of a test's name by which they do."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, and the tests of a file, or of one of its groups, in one process of pytest-xdist."""

    def file_of(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(file_of(item), len(rank)))
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        name = file_of(item)
        part = re.search(SPLIT.get(name, "$^"), item.nodeid)
        item.add_marker(pytest.mark.xdist_group(f"{name} {part[1]}" if part else name))
