"""A fleet of P and D engines on one network, in one virtual time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.connector.config import Settings
from kvferry.connector.wire.messages import IDLE_LINK_SECONDS
from kvferry.connector.wire.metrics import Figures, add, no_figures
from tests.simulation.engines import Engine
from tests.simulation.memory import Form
from tests.simulation.network import ErrorLog, Network, Odds, Timeline, Violation
from tests.support.ranks import Timed

SETTINGS = Timed(
    lease_seconds=2.0,
    lease_cap_seconds=12.0,
    ask_hold_seconds=1.0,
    handshake_timeout_seconds=2.0,
    transfer_timeout_seconds=3.0,
    handover_timeout_seconds=9.0,
)
QUIET_SECONDS = 20.0
"""Longer than any deadline of these settings, one after the other."""


class World:
    """The engines, by name; a restarted engine takes the place of its former life."""

    def __init__(self, seed: int, settings: Settings = SETTINGS) -> None:
        self.timeline = Timeline(seed)
        self.network = Network(self.timeline)
        self.settings = settings
        self.engines: dict[str, Engine] = {}
        self.errors = ErrorLog()
        self.outcomes: Counter[str] = Counter()
        self._figures = no_figures()
        self._logger = logging.getLogger("vllm.kvferry")
        self._level, self._propagate = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.ERROR)  # the lines below are of no use here, and take time
        self._logger.propagate = False
        self._logger.addHandler(self.errors)

    def engine(self, name: str, form: Form, planes: tuple[str, ...], *, slow: float = 0.0) -> Engine:
        """A new engine."""
        number = len(self.engines)
        addresses = [(f"127.{number // 250}.{number % 250}.{rank + 1}", 5600 + rank) for rank in range(form.tp_size)]
        engine = self.engines[name] = Engine(self.network, self.settings, form, name, addresses, planes, slow=slow)
        return engine

    def restart(self, name: str) -> Engine:
        """The engine, which is dead, starts again."""
        self.count(self.engines[name])
        self.engines[name] = self.engines[name].again()
        return self.engines[name]

    def count(self, engine: Engine) -> None:
        """Add what an engine has counted."""
        self.outcomes += engine.outcomes
        engine.outcomes.clear()
        add(self._figures, engine.figures())

    def figures(self) -> Figures:
        """What all lives of all engines have counted."""
        for engine in self.engines.values():
            self.count(engine)
        return self._figures

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.timeline.run(seconds)
        self.check()

    def check(self) -> None:
        """Nothing is past its deadline, and no error was logged."""
        if self.errors.lines:
            raise Violation(f"logged as an error: {self.errors.lines[0]}")
        for engine in self.engines.values():
            engine.check()

    def settle(self) -> None:
        """The faults cease and time passes; then nothing may be left."""
        self.network.odds = Odds()
        for _ in range(10):
            self.run(QUIET_SECONDS / 10)
        for engine in self.engines.values():
            for request in list(engine.kept):
                engine.abort(request)
        self.run(QUIET_SECONDS)
        if any(engine.alive and (engine.requests or engine.prompts) for engine in self.engines.values()):
            self._check_empty()  # a load or a lease needs no more than that
        self.run(3 * IDLE_LINK_SECONDS)
        self._check_empty()

    def _check_empty(self) -> None:
        left = [what for engine in self.engines.values() for what in engine.left()]
        if left:
            raise Violation("left after all has ended: " + "; ".join(left))

    def close(self) -> None:
        """End all processes."""
        self.figures()
        for engine in self.engines.values():
            engine.kill()
        self._logger.removeHandler(self.errors)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagate

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add what happened last to the message of a violation."""
        try:
            yield
        except AssertionError as error:
            text = f"{error}\nat {self.timeline.now:.6f} s, after:\n{self.timeline.story()}"
            raise Violation(text) from error
