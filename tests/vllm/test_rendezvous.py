"""Both legs of a request sent at once: D's engine waits without blocks until P tells of the prompt, by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.protocol.request_lifetime import RequestPhase
from tests.vllm.engine_group import EngineGroup
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(300)


def to_d(p: Engine, **more: Any) -> dict[str, Any]:
    """The parameters of D's leg, as a router knows them that has seen one answer of P."""
    address = p.workers[0].connector.get_handshake_metadata().address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": p.config.kv_transfer_config.engine_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "tp_size": p.tp,
        **more,
    }


def phase(d: Engine, request_id: str) -> RequestPhase | None:
    entry = d.connector._scheduling._load_planner._requests.get(request_id)
    return None if entry is None else entry.lifetime.state.phase


@pytest.mark.parametrize("plane", ["cma", "tcp"])
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("name", ["transfer_id", "remote_request_id"])
def test_both_legs_at_once(group: EngineGroup, plane: str, first: str, name: str) -> None:
    p, d = group.pair(extra={"plane": plane}, max_batched=128)
    uuid = "0d9f5b3a-6a3e-4a57-9d0a-0123456789ab"
    decode = to_d(p, **{name: uuid})
    prefill = PREFILL | ({"transfer_id": uuid} if name == "transfer_id" else {})
    if first == "P":
        leg = p.add(IDS, prefill, request_id=f"cmpl-{uuid}-0-89abcdef")
        p.step()
    request_id = d.add(IDS, decode, max_tokens=8)
    for _ in range(3):
        d.step()
    if first == "D":
        assert d.free_blocks == d.baseline and phase(d, request_id) is RequestPhase.AWAITED
        leg = p.add(IDS, prefill, request_id=f"cmpl-{uuid}-0-89abcdef")
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert p.answers[leg].finish is not None
    assert d.origins[request_id].theirs == len(IDS) - 1
    assert (d.answers[request_id].external, len(d.answers[request_id].tokens)) == (len(IDS), 8)
    settle(p, d)
    assert not d.workers[0].failed
