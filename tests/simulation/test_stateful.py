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
START = st.sampled_from([0, 0, 0, 3, 16])
MOMENTS = st.sampled_from([30e-6, 100e-6, 200e-6, 300e-6, 600e-6, 1e-3, 3e-3, 10e-3])
WHILES = st.sampled_from([0.02, 0.02, 0.1, 0.6, 2.5, 2.5, 6.0, 14.0])
"""Long enough that a tick comes, a renewal, the end of a lease, of a time-out, of the cap."""
LATE = st.sampled_from([0.0, 0.0, 0.0, 200e-6, 0.03, 0.7, None])


class HandOvers(RuleBasedStateMachine):
    """Two P engines, two D engines."""

    world: World

    @initialize(seed=st.integers(0, 1 << 16), sizes=st.tuples(TP, TP, TP, TP), planes=PLANES, others=PLANES)
    def begin(self, seed: int, sizes: tuple[int, ...], planes: Any, others: Any) -> None:
        self.world = World(seed)
        self.prompts: list[Prompt] = []
        self.requests: list[tuple[Engine, Request]] = []
        for name, size, use in zip("pqde", sizes, (EVERYTHING, EVERYTHING, planes, others), strict=True):
            self.world.engine(name, Form(size, HEADS, BLOCKS), use, slow=300e-6)

    def _nodes(self) -> list[Node]:
        return [node for engine in self.world.engines.values() for node in engine.nodes]

    # --- hand-overs -----------------------------------------------------------------------------------------------

    @rule(p=st.sampled_from("ppq"), tokens=st.sampled_from([5, 16, 40, 90]), late=st.tuples(LATE, LATE, LATE),
          again=st.one_of(st.none(), st.none(), NUMBER))  # fmt: skip
    def prefill(self, p: str, tokens: int, late: tuple[float | None, ...], again: int | None) -> None:
        """``again``: a prompt that perhaps another P has computed."""
        number = None
        if again is not None and self.prompts:
            known = self.prompts[-1 - again % len(self.prompts)]
            tokens, number = known.num_tokens, known.number
        with self.world.explained():
            prompt = self.world.engines[p].prefill(tokens, late, number=number)
        if prompt is not None:
            self.prompts.append(prompt)

    @precondition(lambda self: self.prompts)
    @rule(which=NUMBER, d=st.sampled_from("dde"), siblings=st.sampled_from([False, False, True]), at_once=st.booleans(),
          inside=st.booleans(), start=START)  # fmt: skip
    def come(self, which: int, d: str, siblings: bool, at_once: bool, inside: bool, start: int) -> None:
        """A request comes to D: the first, one more sample, or a second consumer's."""
        engine, prompt = self.world.engines[d], self.prompts[-1 - which % len(self.prompts)]
        if engine.alive:
            others = [other for other in self.prompts if other.number == prompt.number and other is not prompt][:4]
            request = engine.keep(prompt, f"r{len(self.requests)}", siblings=siblings, others=others)
            self.requests.append((engine, request))
            if at_once:
                self.load(0, inside, start)

    @precondition(lambda self: self.requests)
    @rule(which=NUMBER, inside=st.booleans(), start=START)
    def load(self, which: int, inside: bool, start: int) -> None:
        engine, request = self.requests[-1 - which % len(self.requests)]
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

    @rule(seconds=st.one_of(MOMENTS, WHILES))
    def wait(self, seconds: float) -> None:
        with self.world.explained():
            self.world.run(seconds)

    # --- faults ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.network.under_way)
    @rule(which=NUMBER, how=st.sampled_from(["lose", "double", "overtake", "overtake", "delay"]))
    def harm_a_packet(self, which: int, how: str) -> None:
        network = self.world.network
        packet = network.packet(which)
        match how:
            case _ if packet is None:
                return
            case "lose":
                network.lose(packet)
            case "double":
                network.double(packet)
            case _:
                network.delay(packet, 400e-6 if how == "overtake" else 0.5)

    @rule(a=NUMBER, b=NUMBER, seconds=st.sampled_from([400e-6, 0.1, 2.5, 8.0]),
          how=st.sampled_from(["cut", "stand still", "break a plane", "copies fail", "copies succeed"]))  # fmt: skip
    def harm_a_process(self, a: int, b: int, seconds: float, how: str) -> None:
        """``break a plane``: the control connection stands."""
        nodes = self._nodes()
        first, second = nodes[a % len(nodes)], nodes[b % len(nodes)]
        match how:
            case "cut" if first is not second and first.alive and second.alive:
                self.world.network.cut(first, second, seconds)
            case "stand still":
                first.stand_still(seconds)
            case "break a plane":
                first.break_plane(b / 12)
            case "copies fail" | "copies succeed":
                first.copies.failing = 0.5 if how == "copies fail" else 0.0

    @rule(name=st.sampled_from("pqde"), how=st.sampled_from(["kill", "kill", "power off", "close"]))
    def end_or_restart(self, name: str, how: str) -> None:
        engine = self.world.engines[name]
        with self.world.explained():
            if not engine.alive:
                self.world.restart(name)
            elif how == "close":
                engine.close()
            else:
                engine.kill(silently=how == "power off")

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
TestHandOvers.settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=40)
