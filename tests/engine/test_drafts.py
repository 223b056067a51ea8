"""Hand-overs to and from engines with an EAGLE head: its KV is handed over like that of any layer, or left to D."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafting_model import SPEC, build_with_eagle, build_with_mtp
from tests.support.kv_bytes import digest
from tests.support.served import (
    PatientServerGroup,
    complete,
    count,
    counted,
    differ,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    tokens_of,
)
from tests.support.server import Server, metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

DRAFTS, ANSWER, BLOCKS = 3, 40, 70
MODEL = [f"model.layers.{number}.self_attn.attn" for number in range(SPEC.layers)]
HEAD = [f"model.layers.{number}.self_attn.attn" for number in range(SPEC.layers, 2 * SPEC.layers)]


@dataclass
class Engines:
    """``one`` and ``other`` have a head, ``plain`` has none."""

    one: Server
    other: Server
    plain: Server


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("drafts")
    model, drafts = build_with_eagle(folder)
    with started(folder, model, drafts, drafts, {}) as found:
        yield Engines(*found)


@contextmanager
def started(folder: Path, model: Path, *drafts: dict[str, Any]) -> Iterator[list[Server]]:
    """Engines with these ways to draft."""
    arguments = ["--worker-extension-cls", "tests.support.kv_bytes.KVDrafts", "--num-gpu-blocks-override", str(BLOCKS)]
    with PatientServerGroup(folder / "logs") as group:
        for number, config in enumerate(drafts):
            drafting = ["--speculative-config", json.dumps({**config, "num_speculative_tokens": DRAFTS})]
            more = [*arguments, *(drafting if config else ())]
            group.engine(f"engine-{number}", model, kv_bytes=False, max_model_len=2048, arguments=more)
        group.wait_ready()
        found = [*group.servers]
        for server in found:
            server.rpc("kv_watch")
        yield found
        no_block_held(*found)
        assert all(server.alive for server in found)


@dataclass
class Answered:
    tokens: list[int]
    drafted: list[list[int]]  # in each step
    accepted: float


def answered(server: Server, ids: Sequence[int], **options: Any) -> Answered:
    """What an idle engine answers, and how."""
    server.rpc("drafted")
    before = accepted(server)
    (tokens,) = tokens_of(complete(server, ids, max_tokens=ANSWER, **options))
    return Answered(tokens, server.rpc("drafted")[0], accepted(server) - before)


def accepted(server: Server) -> float:
    return metric_sum(server.metrics(), "vllm:spec_decode_num_accepted_tokens_total") or 0


def handed_over(p: Server, d: Server, ids: Sequence[int], layers: Sequence[str]) -> tuple[Answered, dict[str, str]]:
    """What D answers to a prompt of P. All bytes of ``layers`` are P's; the digests of all of D's."""
    records(p), records(d)
    before = count(d)
    answer = answered(d, ids, kv_transfer_params=prefill_leg(p, ids))
    counted(d, before, len(ids))
    of_d, of_p = records(d), records(p)
    (loaded,) = [record["layers"] for record in of_d if record["when"] == "loaded"]
    for record in (*of_d, *of_p):
        record["layers"] = {name: record["layers"][name] for name in layers}
    assert differ(of_d, of_p, ids) is None
    no_block_held(p, d)
    return answer, loaded


@pytest.mark.parametrize("tokens", [2, 32, 33, 300, 1200])
def test_d_drafts_as_if_it_had_prefilled(engines: Engines, tokens: int) -> None:
    drafts_as_if_prefilled(engines.one, engines.other, tokens, [*MODEL, *HEAD])


def test_modules_of_mtp(tmp_path: Path) -> None:
    model, drafts = build_with_mtp(tmp_path)
    with started(tmp_path, model, drafts, drafts) as (p, d):
        for tokens in (33, 300):
            drafts_as_if_prefilled(p, d, tokens, MODEL)


def drafts_as_if_prefilled(p: Server, d: Server, tokens: int, layers: Sequence[str]) -> None:
    """The same drafts in the same steps, so the same are accepted."""
    ids = prompt(tokens, tokens)
    alone = answered(d, ids, cache_salt=f"alone-{tokens}")
    answer, loaded = handed_over(p, d, ids, layers)
    assert loaded.keys() == {*layers}
    assert answer == alone
    assert answer.accepted >= ANSWER / 2, "drafts are seldom right, which shows nothing"


def test_a_p_without_the_head(engines: Engines) -> None:
    """The head has no KV of the prompt, and none of other requests that had its blocks. The tokens are right, and a
    prompt that D prefills has drafts as good as ever."""
    plain, d = engines.plain, engines.other
    for seed in (1, 2):  # more than there are blocks
        complete(d, prompt(1900, seed))
    ids = prompt(300, 3)
    alone = answered(d, ids, cache_salt="alone")
    answer, loaded = handed_over(plain, d, ids, MODEL)
    assert answer.tokens == alone.tokens
    nothing = digest(torch.zeros(SPEC.kv_heads, len(ids) - 1, 2 * SPEC.head_dim))
    assert {loaded[name] for name in HEAD} == {nothing}
    assert answer.accepted < alone.accepted
    assert answered(d, ids, cache_salt="again") == alone


def test_a_d_without_the_head(engines: Engines) -> None:
    ids = prompt(300, 4)
    alone = answered(engines.plain, ids, cache_salt="alone")
    assert handed_over(engines.one, engines.plain, ids, MODEL)[0].tokens == alone.tokens
