"""What needs engines of its own: P killed and restarted, other data planes, a P that computes in chunks, prefixes of
another engine, blocks of other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import SharedEngines
from tests.support.served import (
    Pair,
    PatientServerGroup,
    complete,
    count,
    eventually,
    kill,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    tokens_of,
)
from tests.support.server import Server, metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


READS = {"prefix_reads": True, "prefix_wait_seconds": 600.0}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """One with every plane on offer that computes its prompts in chunks of 256 tokens."""
    with PatientServerGroup(tmp_path_factory.mktemp("own")) as group:
        one = group.engine("one", model, extra=READS, arguments=["--max-num-batched-tokens", "256"])
        group.wait_ready()
        yield SharedEngines(group, model, one)


@pytest.fixture
def shared(running: SharedEngines) -> Iterator[SharedEngines]:
    with running.of_a_test():
        yield running


def test_p_is_killed_and_restarted(shared: SharedEngines) -> None:
    """D recomputes what P can no longer give, serves alone while P is away, and then loads from the new P."""
    group, decode = shared.group, shared.one
    (prefill,) = shared.beside("prefill")
    pair = Pair(group, prefill, decode)
    pair.check(prompt(200, 1))

    ids = prompt(300, 2)
    params = prefill_leg(prefill, ids)
    before = count(decode)
    kill(prefill)
    eventually(lambda: not prefill.healthy(), "P is gone")
    recomputed = complete(decode, ids, kv_transfer_params=params)
    eventually(lambda: (count(decode) - before).failed == 1, "the failed load is counted")
    assert tokens_of(recomputed) == tokens_of(complete(decode, ids, cache_salt="alone"))
    assert len(tokens_of(complete(pair.router, prompt(100, 3)))[0]) == 8, "the router goes on with D alone"
    no_block_held(decode)

    group.stop(prefill)
    (pair.prefill,) = shared.beside("prefill-again", port=prefill.port)
    pair.prefill.rpc("kv_watch")
    late = complete(decode, ids, kv_transfer_params=params, cache_salt="late")
    assert tokens_of(late) == tokens_of(recomputed), "parameters of the P that was: recomputed, not mistaken"
    no_block_held(decode)
    eventually(lambda: complete(pair.router, prompt(40, 4)) and records(pair.prefill), "the router is back")
    pair.check(prompt(350, 5))


@pytest.mark.parametrize("plane", ["shm", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_over_other_planes(shared: SharedEngines, plane: str) -> None:
    named = plane == "ucx"  # in host memory P offers it only where it is named
    names = [f"decode-{plane}", *([f"prefill-{plane}"] if named else [])]
    decode, prefill = [*shared.beside(*names, extra={"plane": plane}), shared.one][:2]
    pair = Pair(shared.group, prefill, decode)
    for tokens in (33, 400, 1500):
        pair.check(prompt(tokens, tokens + len(plane)), plane=plane)


def test_bytes_leave_while_p_computes(shared: SharedEngines) -> None:
    """The router asks both at once. How many bytes do depends on when D's engine takes its step; of some prompts some
    do."""
    (decode,) = shared.beside("decode-tcp", extra={"plane": "tcp"})
    pair = Pair(shared.group, shared.one, decode)
    for number in range(40):
        ids = prompt(1800, 200 + number)
        answer = pair.check(ids, plane="tcp")
        assert tokens_of(answer) == tokens_of(complete(decode, ids, cache_salt="alone"))
        if metric_sum(shared.one.metrics(), "vllm:kvferry_bytes_sent_total", when="computes"):
            return
    raise AssertionError("no byte of 40 prompts has left before its lease")


def test_a_conversation_that_changes_its_engine_with_each_turn(shared: SharedEngines) -> None:
    """Each engine reads what the other has. The tokens are those of an engine that computes all of it."""
    engines = [shared.one, *shared.beside("other", extra=READS)]
    history, sources = prompt(300, 10), list[Any]()
    for turn in range(4):
        server = engines[turn % 2]
        before, loads = count(server), reads(server)
        answer = complete(server, history, kv_transfer_params={"sources": sources})
        (tokens,) = tokens_of(answer)
        assert [tokens] == tokens_of(complete(server, history, cache_salt=f"alone {turn}"))
        if sources:
            eventually(lambda server=server, loads=loads: reads(server) == loads + 1, "it is counted")
            grown = count(server) - before
            assert grown.failed == 0 and grown.external > 0
        history, sources = [*history, *tokens, *prompt(20, turn)], [answer["kv_transfer_params"]["source"]]
    no_block_held(*engines)


def reads(server: Server) -> float:
    return metric_sum(server.metrics(), "vllm:kvferry_prefix_reads_total", result="loaded") or 0


def test_between_blocks_of_32_and_of_64_tokens(shared: SharedEngines) -> None:
    """Both directions. vLLM packs a block's tokens in an order of its own: keys transposed, or in tiles for AMX. A D's
    first forward may be of one token: in bfloat16 vLLM's AMX attention then runs before anybody has asked the kernel
    for AMX (where there is any)."""
    engines = [shared.group.engine(f"of-{size}", shared.model, dtype="bfloat16", block_size=size) for size in (64, 32)]
    for engine in engines:
        engine.is_engine = False  # no prompt to warm it up
    shared.group.wait_ready(servers=engines)
    large, small = engines
    for p, d in ((small, large), (large, small)):
        pair = Pair(shared.group, p, d)
        for tokens in (200, 2, 33, 64, 70, 500):
            pair.check(prompt(tokens, tokens + (p is large)))
        shared.group.stop(pair.router)
