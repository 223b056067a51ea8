"""Real engines that a router asks both at once: D waits for P by name, loads, and its tokens are a plain engine's."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import (
    Count,
    Pair,
    complete,
    count,
    counted,
    differ,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    started_pair,
    tokens_of,
    usage,
)
from tests.support.server import metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
SEEDS = itertools.count(9000)
"""Of prompts that no prefix cache has."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """P computes its prompts in chunks of 256 tokens."""
    chunked = {"arguments": ["--max-num-batched-tokens", "256"]}
    with started_pair(tmp_path_factory.mktemp("logs"), model, of_p=chunked, extra={"plane": "tcp"}) as pair:
        yield pair


def identity_of(pair: Pair) -> dict[str, Any]:
    """What a router knows of P from an earlier answer, whose lease D has released. All of it is counted."""
    ids, before = prompt(40, next(SEEDS)), count(pair.decode)
    known = prefill_leg(pair.prefill, ids)
    complete(pair.decode, ids, kv_transfer_params=known)
    counted(pair.decode, before, len(ids))
    return known


def both_legs(pair: Pair, ids: list[int], first: str, named: str, name: str) -> tuple[list[list[int]], Count]:
    """Send both legs of a request at once, the ``first`` one a moment earlier; the tokens of D's answer, and what D had
    counted before."""
    known, before = identity_of(pair), count(pair.decode)
    assert known["transfer_mode"] == "push"
    identity = {key: known[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size")}
    own = {named: name}
    body: dict[str, Any] = {
        "model": "model", "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True
    }  # fmt: skip
    to_p = {"do_remote_decode": True, "do_remote_prefill": False} | (own if named == "transfer_id" else {})
    to_d = {"do_remote_prefill": True, "do_remote_decode": False, **identity, **own}
    legs = {
        "P": (pair.prefill, body | {"max_tokens": 1, "kv_transfer_params": to_p}),
        "D": (pair.decode, body | {"kv_transfer_params": to_d}),
    }
    pair.forget()

    def send(leg: str) -> Any:
        server, content = legs[leg]
        return server.post("/v1/completions", content, timeout=180, headers={"X-Request-Id": name})

    with ThreadPoolExecutor(2) as pool:
        answers = {first: pool.submit(send, first)}
        if first == "D":
            assert usage(pair.decode) == 0, "D holds no blocks for it"
        other = "D" if first == "P" else "P"
        answers[other] = pool.submit(send, other)
        tokens = tokens_of(answers["D"].result())
        answers["P"].result()
    return tokens, before


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("named", ["transfer_id", "remote_request_id"])
def test_both_legs_at_once(pair: Pair, first: str, named: str) -> None:
    ids, name = prompt(1500, sum(map(ord, first + named))), str(uuid.uuid4())
    alone = tokens_of(complete(pair.decode, ids, cache_salt=name))
    tokens, before = both_legs(pair, ids, first, named, name)
    assert tokens == alone
    assert counted(pair.decode, before, len(ids)).failed == 0
    assert differ(records(pair.decode), records(pair.prefill), ids) is None
    no_block_held(pair.prefill, pair.decode)


def test_bytes_leave_while_p_computes(pair: Pair) -> None:
    """How many do depends on when D's engine takes its step; of some prompts some do."""

    def early() -> float:
        return metric_sum(pair.prefill.metrics(), "vllm:kvferry_bytes_sent_total", when="computes") or 0

    for number in range(20):
        ids, name = prompt(1800, 200 + number), str(uuid.uuid4())
        _, before = both_legs(pair, ids, "D", "transfer_id", name)
        assert counted(pair.decode, before, len(ids)).failed == 0
        assert differ(records(pair.decode), records(pair.prefill), ids) is None
        no_block_held(pair.prefill, pair.decode)
        if early():
            return
    raise AssertionError("no byte of 20 prompts has left before its lease")
