"""The forward of a step with loads waits for them layer by layer: early layers run before late layers' KV has come, no
layer reads what has not come, and a load whose last portion fails is recovered from like any other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.connector.geometry import portions
from kvferry.connector.step_loads.step_hold import LayerWaits
from kvferry.transport.planes import cma
from tests.support.inside import worker_half
from tests.vllm.labelled import LAYERS, prompt
from tests.vllm.stepped import Engine, EngineGroup, Lines, Pair, settle
from tests.vllm.test_step_loads import IDS, add, falls, inside, met, pair_of

pytestmark = pytest.mark.vllm
LAST = LAYERS - 1


@pytest.fixture(params=["v1", "v2 eager"])
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)


class HeldCopies:
    """D's reads of P's pages by ``cma``, each portion as soon as the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.portions: list[int] = []  # of each copy
        self.holds = False
        self.fails = False
        self.gate = threading.Event()
        self._turn = cma.CmaCopy.turn

        def held(copy: Any) -> None:
            self.turn(copy)

        monkeypatch.setattr(cma.CmaCopy, "turn", held)

    def turn(self, copy: Any) -> None:
        if not copy.moved:
            self.portions.append(copy.portions)
        if self.holds and copy.ends and copy.moved >= copy.ends[-2]:
            if not self.gate.wait(1e-3):  # not longer: P may be served by this thread
                return
            if self.fails:
                copy.peer_lost = True
                copy.end("planted")
                return
        self._turn(copy)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    return HeldCopies(monkeypatch)


def learnt(group: EngineGroup, runner: str, **kwargs: Any) -> Pair:
    """P and D, of which D has once computed with a load inside a step."""
    p, d = met(group, runner=runner, **({"policy": "recompute"} | kwargs))
    learn(p, d)
    return p, d


def learn(p: Engine, d: Engine) -> None:
    inside(d, add(p, d, prompt(100, 2)))
    settle(p, d)


def order_of(d: Engine) -> tuple[str, ...]:
    return tuple(worker_half(d.workers[0]).step_hold.layer_order)


@pytest.mark.parametrize("ahead", [0, 1])
def test_early_layers_run_before_late_layers_have_come(
    group: EngineGroup, held: HeldCopies, runner: str, ahead: int
) -> None:
    p, d = learnt(group, runner, ahead=ahead)
    assert held.portions == [1, 1], "before, nothing was known of the order"
    assert order_of(d) == tuple(d.layers)
    held.holds = True
    request_id = add(p, d, IDS, max_tokens=20)
    came: list[tuple[int, bool]] = []

    def at_layer(layer: int) -> None:
        came.append((layer, held.gate.is_set()))
        if layer == LAST - 1:  # nothing but the forward itself lets the last layer come
            held.gate.set()

    d.at_layer = at_layer
    inside(d, request_id)
    assert came[:LAYERS] == [(layer, layer == LAST) for layer in range(LAYERS)]
    assert held.portions[2:] == [min(LAYERS, portions.MAX_PORTIONS)]
    settle(p, d)


def test_several_loads_of_one_step(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    p, d = learnt(group, runner, num_blocks=121)
    running = d.add(prompt(50, 3), max_tokens=30)
    d.step()
    held.holds = True
    d.at_layer = lambda layer: held.gate.set() if layer == LAST - 1 else None
    one, two = (add(p, d, prompt(200, seed), max_tokens=9) for seed in (5, 6))
    inside(d, one)
    inside(d, two)
    assert min(held.portions[2:]) > 1
    d.finish(running)
    settle(p, d)


def test_a_hook_that_does_not_wait_is_seen(
    group: EngineGroup, held: HeldCopies, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the fault that all these tests are about: the last layer reads KV that has not come."""
    p, d = learnt(group, runner)
    held.holds = True
    request_id = add(p, d, IDS)
    monkeypatch.setattr(LayerWaits, "layer", lambda waits, name: waits.called.setdefault(name))

    def at_layer(layer: int) -> None:
        if layer == LAST:
            threading.Timer(0.05, held.gate.set).start()  # else the step's output would never be final

    d.at_layer = at_layer
    with pytest.raises(AssertionError, match=f"{request_id}: wrong KV at positions"):
        d.finish(request_id)


def test_another_order_of_the_layers(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    """Than that in which the engine has registered them: their portions come in the order of the forward."""
    p, d = pair_of(group, runner=runner, policy="recompute")
    d.workers[0].hook_order = list(reversed(range(LAYERS)))
    d.finish(add(p, d, prompt(60, 1)))
    learn(p, d)
    assert order_of(d) == tuple(reversed(d.layers))
    held.holds = True
    came: list[bool] = []

    def at_layer(layer: int) -> None:
        came.append(held.gate.is_set())
        if layer == 1:
            held.gate.set()

    d.at_layer = at_layer
    inside(d, add(p, d, IDS, max_tokens=5))
    assert came[:LAYERS] == [False] * LAST + [True]
    # And an order that is not the last one: each layer waits for what it needs.
    held.gate.clear()
    held.holds, d.at_layer = False, lambda layer: None
    d.workers[0].hook_order = range(LAYERS)
    inside(d, add(p, d, prompt(310, 8), max_tokens=5))
    settle(p, d)


def test_a_forward_that_skips_a_layer_s_call(group: EngineGroup, held: HeldCopies, runner: str, lines: Lines) -> None:
    """The last one made it. What it has computed with is not known, so the load fails, and D computes the prompt."""
    p, d = learnt(group, runner)
    wait = d.workers[0].connector.wait_for_layer_load
    d.workers[0].connector.wait_for_layer_load = lambda name: None if name == d.layers[LAST] else wait(name)
    held.holds = True
    d.at_layer = lambda layer: held.gate.set() if layer == LAST else None
    falls(d, add(p, d, IDS, max_tokens=5), "recompute")
    assert len(lines("its forward has not waited for", d.layers[LAST])) == 1
    again = add(p, d, prompt(200, 7), max_tokens=5)
    d.finish(again)
    assert d.origins[again].theirs == 199, "the next one knows"
    settle(p, d)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_last_portion_fails(
    group: EngineGroup, held: HeldCopies, runner: str, ahead: int, policy: str, lines: Lines
) -> None:
    p, d = learnt(group, runner, ahead=ahead, policy=policy)
    held.holds = held.fails = True
    d.at_layer = lambda layer: held.gate.set()
    request_id = add(p, d, IDS, max_tokens=5)
    falls(d, request_id, policy)
    assert len(lines("hand-over of", request_id, "tokens not loaded")) == 1
    settle(p, d)


def test_a_portion_that_does_not_come(
    group: EngineGroup, held: HeldCopies, runner: str, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    """The step goes on after its patience, and the load fails."""
    p, d = learnt(group, runner)
    monkeypatch.setattr(worker_half(d.workers[0]).step_hold, "patience", 0.3)
    held.holds = True
    request_id = add(p, d, IDS, max_tokens=5)
    falls(d, request_id, "recompute")
    assert not held.gate.is_set() and len(lines("a step has waited", request_id, "goes on")) == 1
    settle(p, d)
