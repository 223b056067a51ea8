"""The protocol under every order of events that hypothesis finds: hand-overs, aborts, losses, deaths, time-outs.

P and D ranks are real (``node``), their network and their time are simulated. After each rule no deadline is over and
no error was logged; the engines check at each report that it comes once, that the bytes are right, and that nothing
uses the blocks any more. At the end the faults cease, and nothing may be left in any table.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.engines import Engine, Prompt, Request
from tests.simulation.memory import Form
from tests.simulation.node import Node
from tests.simulation.world import World

HEADS, BLOCKS = 6, 24
PLANES = st.sampled_from([("sim_pull",), ("sim_place",), ("sim_push",), ("sim_push", "sim_pull")])
EVERYTHING = ("sim_pull", "sim_place", "sim_push")
TP = st.sampled_from([1, 1, 2, 3])
NUMBER = st.integers(0, 11)
MOMENTS = st.sampled_from([30e-6, 100e-6, 200e-6, 300e-6, 600e-6, 1e-3])
LATE = st.sampled_from([0.0, 0.0, 0.0, 200e-6, 0.03, 0.7, None])


class HandOvers(RuleBasedStateMachine):
    """Two P engines, two D engines."""

    world: World

    @initialize(seed=st.integers(0, 1 << 16), p=TP, q=TP, d=TP, e=TP, planes=PLANES, others=PLANES)
    def begin(self, seed: int, p: int, q: int, d: int, e: int, planes: Any, others: Any) -> None:
        self.world = World(seed)
        self.prompts: list[Prompt] = []
        self.requests: list[tuple[Engine, Request]] = []
        for name, size in (("p", p), ("q", q)):
            self.world.engine(name, Form(size, HEADS, BLOCKS), EVERYTHING, slow=300e-6)
        for name, size, use in (("d", d, planes), ("e", e, others)):
            self.world.engine(name, Form(size, HEADS, BLOCKS), use, slow=300e-6)

    def _nodes(self) -> list[Node]:
        return [node for engine in self.world.engines.values() for node in engine.nodes]

    # --- hand-overs -----------------------------------------------------------------------------------------------

    @rule(p=st.sampled_from("ppq"), tokens=st.sampled_from([5, 16, 40, 90]), late=st.tuples(LATE, LATE, LATE))
    def prefill(self, p: str, tokens: int, late: tuple[float | None, ...]) -> None:
        with self.world.explained():
            prompt = self.world.engines[p].prefill(tokens, late)
        if prompt is not None:
            self.prompts.append(prompt)

    @precondition(lambda self: self.prompts)
    @rule(which=NUMBER, p=st.sampled_from("pq"))
    def prefill_again(self, which: int, p: str) -> None:
        """A P computes a prompt that another P has computed."""
        prompt = self.prompts[-1 - which % len(self.prompts)]
        with self.world.explained():
            other = self.world.engines[p].prefill(prompt.num_tokens, number=prompt.number)
        if other is not None:
            self.prompts.append(other)

    @precondition(lambda self: self.prompts)
    @rule(which=NUMBER, d=st.sampled_from("dde"), siblings=st.sampled_from([False, False, True]), at_once=st.booleans(),
          inside=st.booleans(), start=st.sampled_from([0, 0, 0, 3, 16]))  # fmt: skip
    def come(self, which: int, d: str, siblings: bool, at_once: bool, inside: bool, start: int) -> None:
        """A request comes to D: the first, one more sample, or a second consumer's."""
        engine, prompt = self.world.engines[d], self.prompts[-1 - which % len(self.prompts)]
        if engine.alive:
            others = [other for other in self.prompts if other.number == prompt.number and other is not prompt][:4]
            request = engine.keep(prompt, f"r{len(self.requests)}", siblings=siblings, others=others)
            self.requests.append((engine, request))
            if at_once:
                self._load(engine, request, start, inside)

    @precondition(lambda self: self.requests)
    @rule(which=NUMBER, inside=st.booleans(), start=st.sampled_from([0, 0, 3, 16]))
    def load(self, which: int, inside: bool, start: int) -> None:
        self._load(*self.requests[-1 - which % len(self.requests)], start, inside)

    def _load(self, engine: Engine, request: Request, start: int, inside: bool) -> None:
        with self.world.explained():
            engine.load(request, start if start < request.prompt.num_tokens else 0, now=inside)

    @precondition(lambda self: self.requests)
    @rule(which=NUMBER)
    def abort(self, which: int) -> None:
        engine, request = self.requests[-1 - which % len(self.requests)]
        engine.abort(request)

    @rule(d=st.sampled_from("de"))
    def cancel_burst(self, d: str) -> None:
        engine = self.world.engines[d]
        for request in [*engine.kept, *engine.requests.values()]:
            engine.abort(request)

    # --- time -----------------------------------------------------------------------------------------------------

    @rule(seconds=MOMENTS, again=st.sampled_from([1, 1, 3, 10]))
    def a_moment(self, seconds: float, again: int) -> None:
        with self.world.explained():
            self.world.run(seconds * again)

    @rule(seconds=st.sampled_from([0.02, 0.02, 0.1, 0.6, 2.5, 2.5, 6.0, 14.0]))
    def a_while(self, seconds: float) -> None:
        """Long enough that a tick comes, a renewal, the end of a lease, of a time-out, of the cap."""
        with self.world.explained():
            self.world.run(seconds)

    # --- faults ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.network.under_way)
    @rule(which=NUMBER, how=st.sampled_from(["lose", "double", "overtake", "overtake", "delay"]))
    def harm_a_packet(self, which: int, how: str) -> None:
        network = self.world.network
        packet = network.packet(which)
        if packet is None:
            return
        if how == "lose":
            network.lose(packet)
        elif how == "double":
            network.double(packet)
        else:
            network.delay(packet, 400e-6 if how == "overtake" else 0.5)

    @rule(a=NUMBER, b=NUMBER, seconds=st.sampled_from([400e-6, 0.1, 2.5, 8.0]))
    def cut(self, a: int, b: int, seconds: float) -> None:
        nodes = self._nodes()
        first, second = nodes[a % len(nodes)], nodes[b % len(nodes)]
        if first is not second and first.alive and second.alive:
            self.world.network.cut(first, second, seconds)

    @rule(which=NUMBER, seconds=st.sampled_from([400e-6, 0.1, 2.5, 8.0]))
    def stand_still(self, which: int, seconds: float) -> None:
        nodes = self._nodes()
        nodes[which % len(nodes)].stand_still(seconds)

    @rule(which=NUMBER, end=st.sampled_from([0.0, 0.3, 0.6, 0.99]))
    def break_a_plane(self, which: int, end: float) -> None:
        """A channel breaks, and the control connection stands."""
        nodes = self._nodes()
        nodes[which % len(nodes)].break_plane(end)

    @rule(name=st.sampled_from("pqde"), how=st.sampled_from(["kill", "kill", "power off", "close"]))
    def end(self, name: str, how: str) -> None:
        engine = self.world.engines[name]
        with self.world.explained():
            if how == "close":
                engine.close()
            else:
                engine.kill(silently=how == "power off")

    @rule(name=st.sampled_from("pqde"))
    def restart(self, name: str) -> None:
        if not self.world.engines[name].alive:
            self.world.restart(name)

    @rule(which=NUMBER, odds=st.sampled_from([0.0, 0.5]))
    def copies_fail(self, which: int, odds: float) -> None:
        nodes = self._nodes()
        nodes[which % len(nodes)].copies.failing = odds

    # --- promises -------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_overdue(self) -> None:
        if hasattr(self, "world"):
            with self.world.explained():
                self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            for node in self._nodes():
                node.copies.failing = 0.0
            with self.world.explained():
                self.world.settle()
        finally:
            self.world.close()


TestHandOvers = HandOvers.TestCase
assert settings.default is not None
TestHandOvers.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
