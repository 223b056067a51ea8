"""KVFerry and vLLM's own ExampleConnector, a store of whole prompts in files, as children of MultiConnector.

``test_beside_offloading_connector.py`` is of another store. A second connector between P and D, as NixlConnector is,
cannot be a child beside KVFerry: it would take the same kv_transfer_params for its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import (
    KVFERRY,
    PATIENT,
    PREFILL,
    ROOM,
    Engine,
    EngineGroup,
    Lines,
    hand_over,
    run,
    settle,
)

pytestmark = pytest.mark.vllm
IDS = prompt(100)
STORED = 98 // BLOCK * BLOCK
"""The example connector keeps the whole blocks before the last two tokens."""
ORDER = pytest.mark.parametrize("first", [True, False], ids=["kvferry-first", "kvferry-second"])
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])


def multi(group: EngineGroup, origin: int, store: Path, *, first: bool, **kwargs: Any) -> Engine:
    ours = KVFERRY | {"kv_connector_extra_config": ROOM | PATIENT}
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }  # fmt: skip
    return group.multi(origin, *((ours, example) if first else (example, ours)), **kwargs)


def files(store: Path) -> int:
    return len(list(store.glob("*/*.safetensors")))


@ORDER
def test_a_reset_reaches_both(group: EngineGroup, tmp_path: Path, first: bool) -> None:
    p = multi(group, 0, tmp_path, first=first)
    p.prefill(IDS)
    assert not p.scheduler.reset_prefix_cache(reset_connector=True)
    run([p], lambda: p.idle)
    assert p.scheduler.reset_prefix_cache(reset_connector=True)


@ORDER
@AHEAD
def test_d_loads_what_is_not_stored(group: EngineGroup, tmp_path: Path, first: bool, ahead: int) -> None:
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    assert d.loads[hand_over(p, d, IDS, max_tokens=4)] == 1
    aborted = d.add(prompt(200, 1), p.prefill(prompt(200, 1)))
    d.step()
    d.abort(aborted)
    settle(p, d)
    assert d.stats, "figures pass through"


@ORDER
@AHEAD
def test_d_has_the_choice(group: EngineGroup, tmp_path: Path, lines: Lines, first: bool, ahead: int) -> None:
    """The first child that has something is taken; where that is the store, P is released, and at once."""
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    stored = d.add(IDS, max_tokens=4)
    d.finish(stored)
    assert d.computed[stored] == 103 and files(tmp_path) == len(d.layers)
    assert d.scheduler.reset_prefix_cache()
    for cache in d.workers[0].caches.values():
        cache.fill_(-1.0)
    request_id = hand_over(p, d, IDS, 99 if first else 0, max_tokens=4)
    settle(p, d)
    assert d.origins[request_id].ours == (0 if first else STORED) and d.loads[request_id] == first
    assert d.computed[request_id] == (4 if first else 100 - STORED + 3)
    assert not lines("expired")


def test_another_child_takes_the_handshake(
    group: EngineGroup, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector passes on what its first child tells; without our addresses nothing can be handed over."""
    greeting = KVConnectorHandshakeMetadata()
    monkeypatch.setattr(ExampleConnector, "get_handshake_metadata", lambda self: greeting)
    p = multi(group, 0, tmp_path, first=False)
    assert len(lines("list KVFerryConnector first")) == 1
    assert p.finish(p.add(IDS, PREFILL)).params is None
    settle(p)
    assert multi(group, 0, tmp_path, first=True).prefill(IDS)
