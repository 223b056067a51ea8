"""Requests as routers in other languages send them, written down from their sources, against the real connector.

llm-d's sidecar, in Go (repository llm-d/llm-d-router, folder pkg/sidecar/proxy):

- nixl_push_identity.go at 46fe6af9f67a: which of P's answer it keeps, and that strings and numbers only are kept.
- connector_nixlv2_push_parallel_test.go at 19a613d717cd, and connector_nixlv2.go beside it: both legs at once, D sent
  again with P's answer, a retry of P with a new transfer_id, ``transfer_id`` beside P's answer where the legs go one
  after the other.

Dynamo's vLLM workers (repository ai-dynamo/dynamo, folder components/src/dynamo/vllm):

- kv_connector_protocols.py at 067528be801c: both forms. P's leg is sent with ``min_tokens`` 1 (handlers.py).

A leg is written as its ``X-Request-Id``, from which vLLM makes the request id, and its ``kv_transfer_params``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.connector.engine.load_planner import RequestPhase
from tests.support.inside import leases_of
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PATIENT, PREFILL, Engine, EngineGroup, Pair, eventually, loaded, settle
from tests.vllm.test_rendezvous import IDS, ends_well

pytestmark = pytest.mark.vllm
REQUEST_ID = "9c5b1ab8-c8ee-11f0-8de9-0242ac120002"
"""X-Request-Id of both legs: a UUID of version 1."""
IDENTITY = {
    "remote_engine_id": True, "remote_host": True, "remote_port": True, "tp_size": True, "transfer_mode": True,
    "pp_size": False, "dcp_size": False,
}  # fmt: skip
"""What llm-d keeps of P's answer, and whether it must be there."""
ENDPOINTS = ["cmpl-{}-0-89abcdef", "chatcmpl-{}-89abcdef"]
"""vLLM's request ids, by ``X-Request-Id``."""


def through_go(params: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of JSON that a Go program has read and written: each number was a float of 64 bits."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() and abs(value) < 1e21 else value

    read: dict[str, Any] = json.loads(json.dumps(params), parse_int=number, parse_float=number)
    return dict(sorted(read.items()))


def llm_d_prefill(transfer_id: str) -> dict[str, Any]:
    return PREFILL | {"transfer_id": transfer_id}


def llm_d_identity(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What llm-d keeps of P's answer; it would go on to send one leg after the other if anything was missing."""
    assert answer["transfer_mode"] == "push"
    kept = {name: answer[name] for name, required in IDENTITY.items() if required or name in answer}
    assert all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in kept.values())
    return through_go(kept)


def llm_d_decode(identity: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
    own = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": REQUEST_ID}
    return {**identity, **own, "transfer_id": transfer_id}


def new_transfer_id() -> str:
    return f"xfer-{uuid.uuid4()}"


def ask_p(p: Engine, params: dict[str, Any], ids: list[int] = IDS, **options: Any) -> dict[str, Any]:
    """One leg of P; the ``kv_transfer_params`` of its answer, as JSON has them."""
    return dict(json.loads(json.dumps(p.prefill(ids, params, **options))))


@pytest.fixture
def pair(group: EngineGroup) -> Pair:
    return group.pair(max_batched=128)


def learn(p: Engine, d: Engine) -> dict[str, Any]:
    """What llm-d knows of P after its first request, whose legs it sends one after the other."""
    other, first = prompt(100, 9), new_transfer_id()
    answer = ask_p(p, llm_d_prefill(first), other)
    leg = d.add(other, through_go(answer) | {"transfer_id": first})
    loaded(p, d, leg)  # a serial leg of D has the transfer_id beside P's answer
    settle(p, d)
    return llm_d_identity(answer)


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_llm_d_sends_both_legs_at_once(pair: Pair, endpoint: str, first: str) -> None:
    p, d = pair
    identity, name = learn(p, d), new_transfer_id()
    p_id, d_id = endpoint.format(REQUEST_ID), endpoint.format(REQUEST_ID)[:-8] + "01234567"
    if first == "P":
        p.add(IDS, llm_d_prefill(name), request_id=p_id)
        p.step()
    d.add(IDS, llm_d_decode(identity, name), max_tokens=4, request_id=d_id)
    d.step()
    if first == "D":
        assert d.phase(d_id) is RequestPhase.AWAITED and d.free_blocks == d.baseline
        p.add(IDS, llm_d_prefill(name), request_id=p_id)
    ends_well(p, d, d_id)


def test_llm_d_sends_d_again_where_another_p_has_answered(group: EngineGroup, pair: Pair) -> None:
    """P was restarted: the identity that llm-d keeps is of its last life."""
    p, d = pair
    other, name = group.engine(0), new_transfer_id()
    stale = learn(p, d)
    told = d.add(IDS, llm_d_decode(stale, name), max_tokens=4, request_id=f"cmpl-{REQUEST_ID}-0-89abcdef")
    d.step()
    answer = ask_p(other, llm_d_prefill(name))
    assert llm_d_identity(answer) != stale
    d.abort(told)
    again = d.add(IDS, through_go(answer) | {"transfer_id": name}, request_id=f"cmpl-{REQUEST_ID}-0-01234567")
    ends_well(other, d, again)
    settle(p)


def test_llm_d_tries_p_again_under_a_new_name(pair: Pair) -> None:
    """The failed attempt may still end on P: D takes the lease of the attempt that it was told of."""
    p, d = pair
    learn(p, d)
    failed, name = new_transfer_id(), new_transfer_id()
    left = ask_p(p, llm_d_prefill(failed), request_id=f"cmpl-{REQUEST_ID}-0-89abcdef")
    answer = ask_p(p, llm_d_prefill(name), request_id=f"cmpl-{REQUEST_ID}-0-01234567")
    leg = d.add(IDS, through_go(answer) | {"transfer_id": name}, max_tokens=4)
    loaded(p, d, leg)
    eventually(lambda: [token.hex() for token in leases_of(p)] == [left["remote_request_id"]])
    p.let_time_pass(PATIENT["lease_seconds"])
    settle(p, d)


# --- Dynamo -------------------------------------------------------------------------------------------------------


def test_dynamos_form_under_the_name_that_it_knows(group: EngineGroup) -> None:
    """Its request ids have no prefix of vLLM's, and D's is P's."""
    known: dict[str, Any] = {"connector": "NixlConnector", "module": "kvferry.connector.vllm.as_nixl"}
    p, d = (group.engine(origin, **known) for origin in (0, 1))
    answer = ask_p(p, PREFILL, request_id=REQUEST_ID, min_tokens=1)
    ends_well(p, d, d.add(IDS, answer, max_tokens=4, request_id=REQUEST_ID))
