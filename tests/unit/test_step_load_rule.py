"""Which loads go inside the step: what they hold up others for is bounded, whatever else is in the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads.step_load_rule import ALONE_SECONDS, StepLoadRule

HOLD = 0.01


@pytest.mark.parametrize(("copy", "left", "others", "fits"), [
    (0.0, 0.0, True, True), (HOLD, 0.0, True, True), (HOLD + 1e-6, 0.0, True, False),
    (0.030, 0.020, True, True), (0.030, 0.019, True, False), (0.001, 5.0, True, True), (math.inf, 5.0, True, False),
    (ALONE_SECONDS, 0.0, False, True), (ALONE_SECONDS + 1e-6, 0.0, False, False), (math.inf, 0.0, False, False),
])  # fmt: skip
def test_how_long_a_copy_may_take(copy: float, left: float, others: bool, fits: bool) -> None:
    """Beside others as long as the device is busy and the setting more; alone longer, and never less."""
    assert StepLoadRule(HOLD).fits(copy, left, others=others) is fits
    assert StepLoadRule(2 * ALONE_SECONDS).fits(2 * ALONE_SECONDS, 0.0, others=others)
    assert not StepLoadRule(0.0).fits(0.0, 1.0, others=others), "switched off"


def test_loads_of_one_step_follow_each_other() -> None:
    rule = StepLoadRule(HOLD)
    rule.planned(0.006)
    for others in (True, False):  # what is planned waits too, whoever says that there is nobody else
        assert rule.fits(0.004, 0.0, others=others) and not rule.fits(0.005, 0.0, others=others)
    assert rule.fits(0.005, 0.001, others=True)
    rule.planned(0.004)
    assert not rule.fits(0.001, 0.0, others=True)
    rule.next_step()
    assert rule.fits(HOLD, 0.0, others=True), "another step, another account"


seconds = st.floats(0, 0.1)


@given(st.floats(0, 0.05), seconds, st.lists(seconds, max_size=8))
def test_others_are_never_held_up_for_longer(hold: float, left: float, copies: list[float]) -> None:
    rule, planned = StepLoadRule(hold), 0.0
    for copy in copies:
        if rule.fits(copy, left, others=True):
            rule.planned(copy)
            planned += copy
    assert planned - left <= hold + 1e-9
