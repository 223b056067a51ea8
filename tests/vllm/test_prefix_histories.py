"""A short slice of ``prefix_histories.py``, and that it sees each guard that is switched off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.prefix_histories import SEEN_AS, play, switched_off

pytestmark = pytest.mark.vllm
SEED = 1
SEEN_SOON = ("no salt", "digests are not chained")
"""Whether few cases see the others depends on the order of threads: ``prefix_histories.py --fault``."""


def test_no_token_and_no_kv_is_wrong(tiny: Any) -> None:
    loaded = 0
    for number in range(4):
        events, failure = play(tiny, SEED, number)
        assert not failure, failure
        loaded += events["prefixes loaded"]
    assert loaded


@pytest.mark.parametrize("fault", SEEN_SOON)
def test_a_guard_that_is_off_is_seen(tiny: Any, fault: str) -> None:
    with switched_off(fault):
        for number in range(12):
            _, failure = play(tiny, SEED, number)
            if failure:
                assert any(text in failure for text in SEEN_AS), failure
                return
    pytest.fail("no history has seen it")
