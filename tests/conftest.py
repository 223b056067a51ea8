"""How all property tests draw: the same examples in every run, however slow the machine is at the moment.

``pytest --hypothesis-profile default`` draws anew.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
