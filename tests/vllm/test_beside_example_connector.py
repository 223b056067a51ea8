"""KVFerry and vLLM's own ExampleConnector, a store of whole prompts in files, as children of MultiConnector.

vLLM's OffloadingConnector refuses CPU engines. A second connector between P and D, as NixlConnector is, cannot be a
child beside KVFerry: it would take the same kv_transfer_params for its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import Engine, prefill, run, settle
from tests.vllm.stepped_model import next_token

pytestmark = pytest.mark.vllm
IDS = prompt(100)
STORED = 98 // BLOCK * BLOCK
"""The example connector keeps the whole blocks before the last two tokens."""
ORDER = pytest.mark.parametrize("first", [True, False], ids=["kvferry-first", "kvferry-second"])
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])


def multi(group: EngineGroup, origin: int, store: Path, *, first: bool, **kwargs: Any) -> Engine:
    kvferry = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.connector.vllm.adapter",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20},
    }
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    children = [kvferry, example] if first else [example, kvferry]
    return group.engine(origin, connector="MultiConnector", module=None, extra={"connectors": children}, **kwargs)


def decode(engines: list[Engine], d: Engine, ids: list[int], params: object = None) -> str:
    """One request on D to its end, its tokens right; its id."""
    request_id = d.add(ids, params, max_tokens=4)
    run(engines, lambda: d.answers[request_id].finish is not None)
    known = [*ids]
    for token in d.answers[request_id].tokens:
        assert token == next_token(known)
        known.append(token)
    return request_id


def files(store: Path) -> int:
    return len(list(store.glob("*/*.safetensors")))


@ORDER
def test_a_reset_reaches_both(group: EngineGroup, tmp_path: Path, first: bool) -> None:
    p = multi(group, 0, tmp_path, first=first)
    prefill(p, IDS)
    assert not p.scheduler.reset_prefix_cache(reset_connector=True)
    run([p], lambda: p.idle)
    assert p.scheduler.reset_prefix_cache(reset_connector=True)


@ORDER
@AHEAD
def test_p_hands_over_and_stores(group: EngineGroup, tmp_path: Path, first: bool, ahead: int) -> None:
    p, d = multi(group, 0, tmp_path, first=first, ahead=ahead), group.engine(1, ahead=ahead)
    request_id = decode([p, d], d, IDS, prefill(p, IDS))
    assert d.origins[request_id].theirs == 99
    assert files(tmp_path) == len(p.layers)
    settle(p, d)


@ORDER
@AHEAD
def test_d_loads_what_is_not_stored(group: EngineGroup, tmp_path: Path, first: bool, ahead: int) -> None:
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    request_id = decode([p, d], d, IDS, prefill(p, IDS))
    assert d.origins[request_id].theirs == 99 and d.loads[request_id] == 1
    settle(p, d)


@ORDER
@AHEAD
def test_d_has_the_choice(group: EngineGroup, tmp_path: Path, lines: Lines, first: bool, ahead: int) -> None:
    """The first child that has something is taken; where that is the store, P is released, and at once."""
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    stored = decode([d], d, IDS)
    assert d.computed[stored] == 103 and files(tmp_path) == len(d.layers)
    assert d.scheduler.reset_prefix_cache()
    for cache in d.workers[0].caches.values():
        cache.fill_(-1.0)
    request_id = decode([p, d], d, IDS, prefill(p, IDS))
    settle(p, d)
    found = d.origins[request_id]
    assert (found.ours, found.theirs) == ((0, 99) if first else (STORED, 0))
    assert d.loads[request_id] == first
    assert d.computed[request_id] == (4 if first else 100 - STORED + 3)
    assert not lines("expired")


@ORDER
def test_the_store_serves_a_request_without_a_hand_over(group: EngineGroup, tmp_path: Path, first: bool) -> None:
    p, d = multi(group, 0, tmp_path, first=first), multi(group, 1, tmp_path, first=first)
    prefill_only = decode([p], p, IDS)
    assert p.computed[prefill_only] == 103
    request_id = decode([p, d], d, IDS)
    assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (0, STORED)
    assert not d.loads
    settle(p, d)
