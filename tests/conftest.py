"""How all tests run: property tests draw the same examples in every run, however slow the machine is at the moment, and
long files begin first.

The profile ``explore`` draws anew: ``make explore``. The engines of a test process, and no others, share a key file.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile("repeatable")

_runtime = tempfile.mkdtemp(prefix="kvferry-test-")
os.environ["XDG_RUNTIME_DIR"] = _runtime
atexit.register(shutil.rmtree, _runtime, ignore_errors=True)

LONGEST_FIRST = (
    "tests/vllm/test_families_vllm.py",
    "tests/ranks/test_matrix.py",
    "tests/transport/test_planes.py",
    "tests/vllm/test_walk.py",
    "tests/router/test_fleet.py",
    "tests/kernels/test_triton.py",
    "tests/handover/test_lost_peers.py",
    "tests/docs/test_commands.py",
    "tests/faults/test_faults.py",
    "tests/simulation/test_simulation.py",
    "tests/kernels/test_kv_postprocess.py",
    "tests/examples/test_engine_neutral.py",
    "tests/transport/test_nixl_hosts.py",
    "tests/doctor/test_self_test.py",
)
"""Files that take half a minute and more: begun last, one of them would run on alone."""
WITH_NIXL = ("tests/gpu/", "tests/handover/", "tests/ranks/", "tests/transport/")
"""Folders in which ``make test`` looks for tests of ``nixl``: to collect all tests takes as long as to run these."""
WITH_ENGINES = ("tests/engine/", "tests/examples/", "tests/transport/test_host.py")
"""Where ``make test-engines`` looks for tests of ``engines``."""

gc.disable()  # until all is imported: see below


def pytest_collection_finish() -> None:
    """A search for garbage looks at all objects, of which the imports make two million: at these, no more."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else libraries complain of what is left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    for item in items:
        for mark, places in (("nixl", WITH_NIXL), ("engines", WITH_ENGINES)):
            if item.get_closest_marker(mark) is not None and not item.nodeid.startswith(places):
                raise pytest.UsageError(f"{item.nodeid}: no make runs a test of {mark} there; add its folder above")
