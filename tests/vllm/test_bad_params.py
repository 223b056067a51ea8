"""``kv_transfer_params`` that are missing, null, garbage or of another prompt: prefilled locally, one line, no harm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, EngineGroup, Lines, Pair, hand_over, settle

pytestmark = pytest.mark.vllm
IDS = prompt(100)


def local(d: Engine, request_id: str) -> None:
    """The request ends by itself, prefilled by D alone."""
    answer = d.finish(request_id)
    assert answer.finish == "length" and d.computed[request_id] == len(answer.prompt) and not d.loads[request_id]


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


# The forms that a message can have are in tests/unit/test_transfer_params.py.
GARBAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "null values": lambda p: p.update({key: None for key in p} | {"do_remote_prefill": True}),
    "another connector's": lambda p: p.pop("kvferry") and p.update(remote_block_ids=[[1, 2]]),
    "another version": changed("kvferry", "v", value=99),
    "a list": changed("kvferry", value=[1, 2]),
    "more tokens than the prompt": changed("kvferry", "num_tokens", value=101),
    "another prompt": changed("kvferry", "prompt", value="0" * 32),
    "a line break": changed("kvferry", "engine_id", value="a\nERROR something else"),
    "a zero in an address": changed("kvferry", "ranks", 0, 2, value="127.0.0.1\0"),
    "a lease that is over": changed("kvferry", "lease_seconds", value=-1),
    "ranks that no engine of this model has": lambda p: p["kvferry"].update(
        tp_size=512, ranks=[[0, n, "127.0.0.1", 5, "00" * 16] for n in range(512)]
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage(pair: Pair, lines: Lines, what: str) -> None:
    p, d = pair
    params = copy.deepcopy(p.prefill(IDS))
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
    p, d = group.pair(extra={"handover_timeout_seconds": 720.0})
    params = copy.deepcopy(p.prefill(IDS))
    params["kvferry"]["ranks"][0][2] = host
    bad = d.add(IDS, params)
    hand_over(p, d, prompt(60, 3))
    d.let_time_pass(100.0)  # a name server may be silent
    assert d.finish(bad, beside=[p]).finish == "length" and d.computed[bad] == 100
    settle(d)
    assert len(lines("hand-over of", bad, "failed")) == 1
    assert not lines("unexpected error")


def test_a_token_that_p_never_gave(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair(extra={"lease_seconds": 0.9})
    params = copy.deepcopy(p.prefill(IDS))
    params["kvferry"]["token"] = "ab" * 16
    request_id = d.add(IDS, params)
    d.finish(request_id, beside=[p])
    assert d.computed[request_id] == 100
    settle(p, d)
    assert len(lines("hand-over of", request_id, "denied", "unknown")) == 1


@pytest.mark.parametrize("value", [True, "yes", 1, [0]])
def test_odd_values_of_the_prefill_leg(pair: Pair, value: object) -> None:
    p, d = pair
    params = p.finish(p.add(IDS, PREFILL if value is True else {"do_remote_decode": value})).params
    d.finish(d.add(IDS, params), beside=[p])
    settle(p, d)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_a_role_that_does_not_fit(group: EngineGroup, lines: Lines, role: str) -> None:
    engine = group.engine(1, role=role)
    params = PREFILL if role == "kv_consumer" else group.engine(0).prefill(IDS)
    request_id = engine.add(IDS, params)
    local(engine, request_id)
    assert engine.answers[request_id].params is None
    what, fit = ("hand its prompt over", "kv_producer") if role == "kv_consumer" else ("load its prompt", "kv_consumer")
    assert len(lines(request_id, what, f"kv_role is {role}", f"as {fit} or kv_both")) == 1
    settle(engine)
