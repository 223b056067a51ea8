"""Turns of a conversation that move between two real engines: each reads what the other has, over HTTP as users ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import PatientServerGroup, complete, count, eventually, no_block_held, prompt, tokens_of
from tests.support.server import Server, metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
READS = {"prefix_reads": True, "prefix_wait_seconds": 600.0}


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with PatientServerGroup(tmp_path_factory.mktemp("logs")) as group:
        found = [group.engine(name, model, extra=READS, kv_bytes=False) for name in ("one", "other")]
        group.wait_ready()
        yield found


def reads(server: Server, **labels: str) -> float:
    return metric_sum(server.metrics(), "vllm:kvferry_prefix_reads_total", **labels) or 0


def ask(server: Server, ids: list[int], sources: list[Any], **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and the engine that gave it, as a source."""
    answer = complete(server, ids, kv_transfer_params={"sources": sources}, **options)
    (tokens,) = tokens_of(answer)
    return tokens, answer["kv_transfer_params"]["source"]


def test_a_conversation_that_changes_its_engine_with_each_turn(engines: list[Server]) -> None:
    """Its tokens are those of an engine that computes all of it."""
    history, source = prompt(300, 1), None
    for turn in range(4):
        server = engines[turn % 2]
        before, loads = count(server), reads(server, result="loaded")
        tokens, answered = ask(server, history, [source] if source else [])
        alone, _ = ask(server, history, [], cache_salt=f"alone {turn}")
        assert tokens == alone
        if source:
            eventually(lambda server=server, loads=loads: reads(server, result="loaded") == loads + 1, "it is counted")
            grown = count(server) - before
            assert grown.failed == 0 and grown.external > 0
        history, source = [*history, *tokens, *prompt(20, turn)], answered
    no_block_held(*engines)


def test_another_tenant_reads_nothing(engines: list[Server]) -> None:
    one, other = engines
    ids = prompt(300, 2)
    _, source = ask(one, ids, [], cache_salt="one tenant")
    before = count(other)
    ask(other, ids, [source], cache_salt="another tenant")
    eventually(lambda: reads(other, result="local", reason="no_lease") == 1, "it is counted")
    assert (count(other) - before).external == 0
    ask(other, prompt(310, 2), [source], cache_salt="one tenant")
    eventually(lambda: (count(other) - before).external == 288, "the prefix is read")
