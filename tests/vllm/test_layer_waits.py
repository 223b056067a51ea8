"""The forward of a step with loads waits for them layer by layer: early layers run before late layers' KV has come, no
layer reads what has not come, and a load whose last portion fails is recovered from like any other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.connector.geometry import portions
from kvferry.connector.step_loads.step_hold import LayerWaits
from kvferry.connector.vllm import compat
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.connector.wire.transfer_estimate import TransferEstimates
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.slow_copies import SlowCopies, install
from tests.support.inside import worker_half
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import LAYERS, prompt
from tests.vllm.stepped import Engine, settle
from tests.vllm.test_step_loads import add, continued, meet, pair_of, to_the_end

pytestmark = pytest.mark.vllm
BY_LAYER = ("v1", "v2 eager")
LAST = LAYERS - 1


@pytest.fixture(params=BY_LAYER)
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


def learnt(group: EngineGroup, runner: str, **kwargs: Any) -> tuple[Engine, Engine]:
    """P and D, of which D has once computed with a load inside a step."""
    p, d = pair_of(group, runner=runner, **({"policy": "recompute"} | kwargs))
    meet(p, d)
    first = add(p, d, prompt(100, 2))
    to_the_end(d, first)
    assert d.step_loads[first] == 1
    settle(p, d)
    return p, d


def order_of(d: Engine) -> tuple[str, ...]:
    return tuple(worker_half(d.workers[0]).step_hold.layer_order)


@pytest.mark.parametrize("ahead", [0, 1])
def test_early_layers_run_before_late_layers_have_come(
    group: EngineGroup, held: HeldCopies, runner: str, ahead: int
) -> None:
    p, d = learnt(group, runner, ahead=ahead)
    assert held.portions == [1, 1], "before, nothing was known of the order"
    assert order_of(d) == tuple(d.layers)
    held.holds, ids = True, prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=20)
    came: list[tuple[int, bool]] = []

    def at_layer(layer: int) -> None:
        came.append((layer, held.gate.is_set()))
        if layer == LAST - 1:  # nothing but the forward itself lets the last layer come
            held.gate.set()

    d.at_layer = at_layer
    assert to_the_end(d, request_id) == "length"
    assert came[:LAYERS] == [(layer, layer == LAST) for layer in range(LAYERS)]
    assert held.portions[2:] == [min(LAYERS, portions.MAX_PORTIONS)]
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]
    assert d.answers[request_id].tokens == continued(ids, 20)
    assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (0, 299)
    settle(p, d)


def test_several_loads_of_one_step(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    p, d = learnt(group, runner, num_blocks=121)
    running = d.add(prompt(50, 3), max_tokens=30)
    d.step()
    held.holds = True
    d.at_layer = lambda layer: held.gate.set() if layer == LAST - 1 else None
    one, two = (add(p, d, prompt(200, seed), max_tokens=9) for seed in (5, 6))
    for request_id, seed in ((one, 5), (two, 6)):
        to_the_end(d, request_id)
        assert d.answers[request_id].tokens == continued(prompt(200, seed), 9)
    assert d.step_loads[one] == d.step_loads[two] == 1 and min(held.portions[2:]) > 1
    to_the_end(d, running)
    assert d.answers[running].tokens == continued(prompt(50, 3), 30)
    settle(p, d)


def test_on_two_ranks(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    p, d = learnt(group, runner, tp=2)
    request_id, ids = add(p, d, prompt(300, 9), max_tokens=5), prompt(300, 9)
    assert to_the_end(d, request_id) == "length"
    assert d.answers[request_id].tokens == continued(ids, 5) and d.step_loads[request_id] == 1
    assert min(held.portions[-2:]) > 1
    settle(p, d)


def test_a_hook_that_does_not_wait_is_seen(
    group: EngineGroup, held: HeldCopies, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the fault that all these tests are about: the last layer reads KV that has not come."""
    p, d = learnt(group, runner)
    held.holds = True
    request_id = add(p, d, prompt(300, 9))
    monkeypatch.setattr(LayerWaits, "layer", lambda waits, name: waits.called.setdefault(name))

    def at_layer(layer: int) -> None:
        if layer == LAST:
            threading.Timer(0.05, held.gate.set).start()  # else the step's output would never be final

    d.at_layer = at_layer
    with pytest.raises(AssertionError, match=f"{request_id}: wrong KV at positions"):
        to_the_end(d, request_id)


def test_another_order_of_the_layers(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    """Than that in which the engine has registered them: their portions come in the order of the forward."""
    p, d = pair_of(group, runner=runner, policy="recompute")
    d.workers[0].hook_order = list(reversed(range(LAYERS)))
    meet(p, d)
    to_the_end(d, add(p, d, prompt(100, 2)))
    settle(p, d)
    assert order_of(d) == tuple(reversed(d.layers))
    held.holds, ids = True, prompt(300, 9)
    came: list[bool] = []

    def at_layer(layer: int) -> None:
        came.append(held.gate.is_set())
        if layer == 1:
            held.gate.set()

    d.at_layer = at_layer
    request_id = add(p, d, ids, max_tokens=5)
    to_the_end(d, request_id)
    assert came[:LAYERS] == [False] * LAST + [True]
    assert d.answers[request_id].tokens == continued(ids, 5)
    # And an order that is not the last one: each layer waits for what it needs.
    held.gate.clear()
    held.holds, d.at_layer = False, lambda layer: None
    d.workers[0].hook_order = range(LAYERS)
    request_id, ids = add(p, d, prompt(310, 8), max_tokens=5), prompt(310, 8)
    to_the_end(d, request_id)
    assert d.answers[request_id].tokens == continued(ids, 5) and d.step_loads[request_id] == 1
    settle(p, d)


def test_a_layer_of_which_the_connector_does_not_hear(group: EngineGroup, held: HeldCopies, runner: str) -> None:
    """As the caches of sparse attention's indexers: they come first, before the forward begins."""
    p, d = pair_of(group, runner=runner, policy="recompute")
    silent = d.layers[LAST]
    wait = d.workers[0].connector.wait_for_layer_load
    d.workers[0].connector.wait_for_layer_load = lambda name: None if name == silent else wait(name)
    meet(p, d)
    to_the_end(d, add(p, d, prompt(100, 2)))
    settle(p, d)
    assert order_of(d) == tuple(d.layers[:LAST])
    request_id, ids = add(p, d, prompt(300, 9), max_tokens=5), prompt(300, 9)
    to_the_end(d, request_id)
    assert held.portions[-1] == min(LAST, portions.MAX_PORTIONS)
    assert d.answers[request_id].tokens == continued(ids, 5) and d.step_loads[request_id] == 1
    settle(p, d)


def test_a_layer_that_uses_the_cache_of_another_one(group: EngineGroup, held: HeldCopies) -> None:
    """It has a name of its own, which is in no region: it waits for all layers."""
    p, d = learnt(group, "v1")
    held.holds = True
    wait = d.workers[0].connector.wait_for_layer_load
    names = []

    def shares(name: str) -> None:
        names.append(name)
        if len(names) == 1:
            threading.Timer(0.05, held.gate.set).start()
            wait("model.layers.9.shares")
            assert held.gate.is_set()
        wait(name)

    d.workers[0].connector.wait_for_layer_load = shares
    request_id, ids = add(p, d, prompt(300, 9), max_tokens=5), prompt(300, 9)
    to_the_end(d, request_id)
    assert d.answers[request_id].tokens == continued(ids, 5)
    assert order_of(d) == tuple(d.layers)
    settle(p, d)


def test_a_step_that_is_a_graph_after_one_that_was_none(
    group: EngineGroup, held: HeldCopies, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is cut, and the whole of it awaited before the forward; the next one is not cut."""
    p, d = learnt(group, runner)
    monkeypatch.setattr(compat, "waits_by_layer", lambda: False)
    monkeypatch.setattr(KVFerryConnector, "wait_for_layer_load", lambda *_: None)
    held.holds = True
    began: list[bool] = []
    d.device = lambda: began.append(held.gate.is_set())
    opened = threading.Timer(0.05, held.gate.set)
    request_id, ids = add(p, d, prompt(300, 9), max_tokens=5), prompt(300, 9)
    opened.start()
    to_the_end(d, request_id)
    assert began[0] and held.portions[2] > 1
    assert d.answers[request_id].tokens == continued(ids, 5)
    assert order_of(d) == ()
    to_the_end(d, add(p, d, prompt(100, 4)))
    assert held.portions[3] == 1
    settle(p, d)


def test_a_forward_that_skips_a_layer_s_call(group: EngineGroup, held: HeldCopies, runner: str, lines: Lines) -> None:
    """The last one made it. What it has computed with is not known, so the load fails, and D computes the prompt."""
    p, d = learnt(group, runner)
    wait = d.workers[0].connector.wait_for_layer_load
    d.workers[0].connector.wait_for_layer_load = lambda name: None if name == d.layers[LAST] else wait(name)
    held.holds = True
    d.at_layer = lambda layer: held.gate.set() if layer == LAST else None
    request_id, ids = add(p, d, prompt(300, 9), max_tokens=5), prompt(300, 9)
    to_the_end(d, request_id)
    assert d.step_loads[request_id] == 1 and d.computed[request_id] >= 300, "it was computed again"
    assert d.answers[request_id].tokens == continued(ids, 5)
    assert len(lines("its forward has not waited for", d.layers[LAST])) == 1
    again = add(p, d, prompt(200, 7), max_tokens=5)
    to_the_end(d, again)
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
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=5)
    finish = to_the_end(d, request_id)
    assert d.step_loads[request_id] == 1
    assert len(lines("hand-over of", request_id, "tokens not loaded")) == 1
    if policy == "fail":
        assert finish == "error" and not d.answers[request_id].tokens
        settle(d)
        again = d.add(ids)
        to_the_end(d, again)
        assert d.computed[again] == len(ids), "no block of it is found in the prefix cache"
    else:
        assert finish == "length" and d.computed[request_id] >= 300
        assert d.answers[request_id].tokens == continued(ids, 5)
    settle(p, d)


def test_a_portion_that_does_not_come(
    group: EngineGroup, held: HeldCopies, runner: str, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    """The step goes on after its patience, and the load fails."""
    p, d = learnt(group, runner)
    monkeypatch.setattr(worker_half(d.workers[0]).step_hold, "patience", 0.3)
    held.holds, ids = True, prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=5)
    to_the_end(d, request_id)
    assert not held.gate.is_set()
    assert d.answers[request_id].tokens == continued(ids, 5) and d.computed[request_id] >= 300
    assert len(lines("a step has waited", request_id, "goes on")) == 1
    settle(p, d)


# --- as on GPUs, where a device waits for events of the copies ------------------------------------------------------


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[SlowCopies]:
    monkeypatch.setattr(CmaChannel, "read", lambda channel, request: request.launch())
    monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: 0.0)
    return install(monkeypatch)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_device_waits_for_the_event_of_each_portion(
    group: EngineGroup, on_device: list[SlowCopies], runner: str, ahead: int
) -> None:
    p, d = pair_of(group, runner=runner, ahead=ahead)
    copies = on_device[1]
    d.device = lambda: wait_for(copies)
    to_the_end(d, add(p, d, prompt(60, 1)))
    settle(p, d)
    assert order_of(d) == tuple(d.layers)
    copies.held.clear()
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=5)
    copies.gate.clear()
    waits: list[int] = []

    def at_layer(layer: int) -> None:
        waits.append(len(copies.held))
        copies.gate.set()
        wait_for(copies)

    d.device, d.at_layer = lambda: None, at_layer
    assert to_the_end(d, request_id) == "length"
    assert waits[:LAYERS] == list(range(1, LAYERS + 1)), "one more for each layer"
    assert d.answers[request_id].tokens == continued(ids, 5)
    assert d.step_loads[request_id] == 1
    settle(p, d)


def wait_for(copies: SlowCopies) -> None:
    for event in copies.held:
        assert event.wait(60)


def test_the_device_waits_for_all_of_it_after_the_forward(group: EngineGroup, on_device: list[SlowCopies]) -> None:
    """Drafts, and the next step, are not told of layers."""
    p, d = pair_of(group, runner="v1")
    copies = on_device[1]
    d.device = lambda: wait_for(copies)
    to_the_end(d, add(p, d, prompt(60, 1)))
    settle(p, d)
    copies.held.clear()
    copies.gate.clear()  # a copy that has ended before the forward is waited for by nobody

    def at_layer(layer: int) -> None:
        copies.gate.set()
        wait_for(copies)

    d.device, d.at_layer = lambda: None, at_layer
    to_the_end(d, add(p, d, prompt(300, 9)))
    assert len(copies.held) == LAYERS + 1
    settle(p, d)
