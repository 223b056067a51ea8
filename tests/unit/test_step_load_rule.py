"""Which loads go inside the step: what they hold up others for is bounded, whatever else is in the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads.step_load_rule import ALONE_SECONDS, StepLoadRule

HOLD = 0.01
STEP = 0.05


@pytest.mark.parametrize(("copy", "left", "others", "fits"), [
    (0.0, 0.0, True, True), (HOLD, 0.0, True, True), (HOLD + 1e-6, 0.0, True, False),
    (0.030, 0.020, True, True), (0.030, 0.019, True, False), (0.001, 5.0, True, True), (math.inf, 5.0, True, False),
    (ALONE_SECONDS, 0.0, False, True), (ALONE_SECONDS + 1e-6, 0.0, False, False), (math.inf, 0.0, False, False),
])  # fmt: skip
def test_how_long_a_copy_may_take(copy: float, left: float, others: bool, fits: bool) -> None:
    """Beside others as long as the device is busy and the setting more; alone longer, and never less."""
    assert StepLoadRule(HOLD).fits(copy, left, math.inf, others=others) is fits
    assert StepLoadRule(2 * ALONE_SECONDS).fits(2 * ALONE_SECONDS, 0.0, math.inf, others=others)
    assert not StepLoadRule(0.0).fits(0.0, 1.0, math.inf, others=others), "switched off"


def test_loads_of_one_step_follow_each_other() -> None:
    rule = StepLoadRule(HOLD)
    rule.planned(0.006)
    for others in (True, False):  # what is planned waits too, whoever says that there is nobody else
        assert rule.fits(0.004, 0.0, STEP, others=others) and not rule.fits(0.005, 0.0, STEP, others=others)
    assert rule.fits(0.005, 0.001, STEP, others=True)
    rule.planned(0.004)
    assert not rule.fits(0.001, 0.0, STEP, others=True)
    rule.next_step()
    assert rule.fits(HOLD, 0.0, STEP, others=True), "another step, another account"


seconds = st.floats(0, 0.1)


@given(st.floats(0, 0.05), seconds, seconds, st.lists(seconds, max_size=8))
def test_others_are_never_held_up_for_longer(hold: float, left: float, step: float, copies: list[float]) -> None:
    """Than the setting, nor than a step."""
    rule, planned = StepLoadRule(hold), 0.0
    for copy in copies:
        if rule.fits(copy, left, step, others=True):
            rule.planned(copy)
            planned += copy
    assert planned - left <= min(hold, step) + 1e-9


@given(seconds, seconds, seconds)
def test_one_that_does_not_fit_is_joined_by_the_same_rule(copy: float, left: float, step: float) -> None:
    """After so many seconds of its copy, what is left of it fits."""
    rule = StepLoadRule(HOLD)
    ran = rule.joins_after(copy, left, step)
    assert rule.fits(copy - ran - 1e-9, left, step, others=True)
    assert not rule.fits(copy - ran + 1e-6, left, step, others=True)
    assert rule.joins_after(math.inf, left, step) == StepLoadRule(0.0).joins_after(copy, left, step) == math.inf
