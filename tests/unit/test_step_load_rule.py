"""Which loads go inside the step: what they hold up others for is bounded, whatever else is in the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads.step_load_rule import ALONE_SECONDS, StepLoadRule

HOLD = 0.01


def test_never_where_it_is_switched_off() -> None:
    rule = StepLoadRule(0.0)
    assert not rule.fits(0.0, 1.0, others=False) and not rule.fits(0.0, 1.0, others=True)


@pytest.mark.parametrize(("copy", "left", "fits"), [
    (0.0, 0.0, True), (HOLD, 0.0, True), (HOLD + 1e-6, 0.0, False),
    (0.030, 0.020, True), (0.030, 0.019, False), (0.001, 5.0, True), (math.inf, 5.0, False),
])  # fmt: skip
def test_beside_others_the_copy_may_take_as_long_as_the_device_is_busy_and_the_setting_more(
    copy: float, left: float, fits: bool
) -> None:
    assert StepLoadRule(HOLD).fits(copy, left, others=True) is fits


def test_alone_it_may_take_longer() -> None:
    rule = StepLoadRule(HOLD)
    assert rule.fits(ALONE_SECONDS, 0.0, others=False) and not rule.fits(ALONE_SECONDS + 1e-6, 0.0, others=False)
    assert not rule.fits(math.inf, 0.0, others=False), "of what is not known nothing is expected"
    longer = StepLoadRule(2 * ALONE_SECONDS)
    assert longer.fits(2 * ALONE_SECONDS, 0.0, others=False), "never less than beside others"


def test_loads_of_one_step_follow_each_other() -> None:
    rule = StepLoadRule(HOLD)
    rule.planned(0.006)
    assert rule.fits(0.004, 0.0, others=True) and not rule.fits(0.005, 0.0, others=True)
    assert rule.fits(0.005, 0.001, others=True)
    rule.planned(0.004)
    assert not rule.fits(0.001, 0.0, others=True)
    rule.next_step()
    assert rule.fits(HOLD, 0.0, others=True), "another step, another account"


def test_what_is_planned_is_another_one() -> None:
    """It waits too, whoever says that there is nobody else."""
    rule = StepLoadRule(HOLD)
    rule.planned(0.006)
    assert not rule.fits(0.005, 0.0, others=False)


seconds = st.floats(0, 0.1)


@given(st.floats(0, 0.05), seconds, st.lists(seconds, max_size=8))
def test_others_are_never_held_up_for_longer(hold: float, left: float, copies: list[float]) -> None:
    rule, planned = StepLoadRule(hold), 0.0
    for copy in copies:
        if rule.fits(copy, left, others=True):
            rule.planned(copy)
            planned += copy
    assert planned - left <= hold + 1e-9
