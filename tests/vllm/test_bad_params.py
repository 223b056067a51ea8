"""``kv_transfer_params`` that are missing, null, garbage or of another prompt: prefilled locally, one line, no harm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, prefill, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(100)
Pair = tuple[Engine, Engine]


def local(d: Engine, request_id: str, tokens: int = len(IDS)) -> None:
    """The request ends by itself, prefilled by D alone."""
    run([d], lambda: d.answers[request_id].finish is not None)
    assert d.answers[request_id].finish == "length"
    assert d.computed[request_id] == tokens and not d.loads[request_id]


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "kvferry": None}, {"other": 1}]
)
def test_none_at_all(pair: Pair, lines: Lines, params: Any) -> None:
    _, d = pair
    local(d, d.add(IDS, params))
    settle(d)
    assert not lines("req-")


def changed(*path: Any, value: object) -> Callable[[dict[str, Any]], object]:
    def change(params: dict[str, Any]) -> None:
        inner: Any = params
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


GARBAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "null values": lambda p: p.update({key: None for key in p} | {"do_remote_prefill": True}),
    "another connector's": lambda p: p.pop("kvferry") and p.update(remote_block_ids=[[1, 2]]),
    "another version": changed("kvferry", "v", value=99),
    "not a mapping": changed("kvferry", value="kvferry"),
    "a list": changed("kvferry", value=[1, 2]),
    "an empty mapping": changed("kvferry", value={}),
    "token of another length": changed("kvferry", "token", value="ab"),
    "token of another type": changed("kvferry", "token", value=7),
    "no tokens": changed("kvferry", "num_tokens", value=0),
    "a huge number": changed("kvferry", "num_tokens", value=1 << 63),
    "no ranks": changed("kvferry", "ranks", value=[]),
    "too few ranks": changed("kvferry", "tp_size", value=3),
    "a port out of range": changed("kvferry", "ranks", 0, 3, value=70000),
    "not a number": changed("kvferry", "lease_seconds", value=float("nan")),
    "deep nesting": changed("kvferry", "ranks", value=[[[[[[]]]]]]),
    "more tokens than the prompt": changed("kvferry", "num_tokens", value=101),
    "another prompt": changed("kvferry", "prompt", value="0" * 32),
    "a long string": changed("kvferry", "engine_id", value="x" * 100_000),
    "half a character": changed("kvferry", "engine_id", value="\udcff"),
    "a line break": changed("kvferry", "engine_id", value="a\nERROR something else"),
    "a line break in an address": changed("kvferry", "ranks", 0, 2, value="127.0.0.1\n"),
    "a zero in an address": changed("kvferry", "ranks", 0, 2, value="127.0.0.1\0"),
    "an infinite lease": changed("kvferry", "lease_seconds", value=float("inf")),
    "a lease that is over": changed("kvferry", "lease_seconds", value=-1),
    "ranks that no engine of this model has": lambda p: p["kvferry"].update(
        tp_size=512, ranks=[[0, n, "127.0.0.1", 5, "00" * 16] for n in range(512)]
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage(pair: Pair, lines: Lines, what: str) -> None:
    p, d = pair
    params = copy.deepcopy(prefill(p, IDS))
    GARBAGE[what](params)
    request_id = d.add(IDS, params)
    local(d, request_id)
    said = lines(request_id, "prefills locally")
    assert len(said) == 1 and "\n" not in said[0] and len(said[0]) < 600
    settle(d)


NOWHERE = ["no such host", "nowhere.invalid", "*", "0.0.0.0:1", "[::1", "a/../b", "x" * 255, "\u00e9", "%s", "@ipc"]


@pytest.mark.parametrize("host", NOWHERE)
def test_an_address_that_leads_nowhere(group: EngineGroup, lines: Lines, host: str) -> None:
    """It reaches the transfer thread: the load fails in time, the thread lives, and others are served."""
    p, d = group.pair(extra={"handshake_timeout_seconds": 5.0})
    params = copy.deepcopy(prefill(p, IDS))
    params["kvferry"]["ranks"][0][2] = host
    bad = d.add(IDS, params)
    good = d.add(prompt(60, 3), prefill(p, prompt(60, 3)))
    run([p, d], lambda: all(d.answers[name].finish is not None for name in (bad, good)))
    assert d.origins[good].theirs == 59
    assert d.computed[bad] == 100
    settle(d)
    assert len(lines("hand-over of", bad, "failed")) == 1
    assert not lines("unexpected error")


def test_an_address_that_leads_nowhere_and_no_load(group: EngineGroup, lines: Lines) -> None:
    """Renewals and the release go to the same address."""
    p, d = group.pair(extra={"lease_seconds": 4.0})
    params = copy.deepcopy(prefill(p, IDS))
    params["kvferry"]["ranks"][0][2] = "no such host"
    params["kvferry"]["lease_seconds"] = 0.05
    running = d.add(prompt(450, seed=8), max_tokens=40)
    d.step()
    waiting = d.add(prompt(400), params)
    waiting_well = d.add(IDS, params)
    run([p, d], lambda: d.answers[running].finish is not None)
    run([p, d], lambda: all(d.answers[name].finish is not None for name in (waiting, waiting_well)))
    ids = prompt(60, 3)
    good = d.add(ids, prefill(p, ids))
    run([p, d], lambda: d.answers[good].finish is not None)
    assert d.origins[good].theirs == 59
    settle(p, d)
    assert not lines("unexpected error")


def test_another_prompt_than_ps_leaves_the_lease_to_whose_it_is(pair: Pair, lines: Lines) -> None:
    p, d = pair
    other, params = prompt(100, seed=1), prefill(p, IDS)
    request_id = d.add(other, params)
    local(d, request_id)
    assert len(lines(request_id, "prefills locally", "another prompt")) == 1
    settle(d)
    honest = d.add(IDS, params)
    run([p, d], lambda: d.answers[honest].finish is not None)
    assert d.origins[honest].theirs == len(IDS) - 1
    settle(p, d)


def test_a_token_that_p_never_gave(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair(extra={"ask_hold_seconds": 0.3, "lease_seconds": 0.5})
    params = copy.deepcopy(prefill(p, IDS))
    params["kvferry"]["token"] = "ab" * 16
    request_id = d.add(IDS, params)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.computed[request_id] == 100
    settle(p, d)
    assert len(lines("hand-over of", request_id, "denied", "unknown")) == 1


@pytest.mark.parametrize("value", [True, "yes", 1, [0]])
def test_odd_values_of_the_prefill_leg(pair: Pair, value: object) -> None:
    p, d = pair
    params = prefill(p, IDS) if value is True else None
    if params is None:
        request_id = p.add(IDS, {"do_remote_decode": value})
        run([p], lambda: p.answers[request_id].finish is not None)
        params = p.answers[request_id].params
    request_id = d.add(IDS, params)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    settle(p, d)


def test_a_consumer_hands_nothing_over(group: EngineGroup, lines: Lines) -> None:
    d = group.engine(1, role="kv_consumer")
    request_id = d.add(IDS, PREFILL)
    local(d, request_id)
    assert d.answers[request_id].params is None
    assert len(lines(request_id, "hand its prompt over", "kv_role is kv_consumer", "as kv_producer or kv_both")) == 1
    settle(d)


def test_a_producer_loads_nothing(group: EngineGroup, lines: Lines) -> None:
    first, second = group.engine(0), group.engine(1, role="kv_producer")
    request_id = second.add(IDS, prefill(first, IDS))
    local(second, request_id)
    assert len(lines(request_id, "load its prompt", "kv_role is kv_producer", "as kv_consumer or kv_both")) == 1
    settle(second)
