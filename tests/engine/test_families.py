"""Hand-overs of model families whose caches take forms of their own: two real engines per family, every byte compared.

Grouped-query attention is test_pair.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES, WINDOW, Family
from tests.support.kv_bytes import prompt_digest
from tests.support.served import Pair, complete, differ, prompt, records, started_pair, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = (2, BLOCK, WINDOW + BLOCK - 1, 140, 1200)
"""In the third, the first token of the last one's window ends a block: vLLM gives that block back once all tokens are
computed, a token too early for a D that computes the last one again. The last is much longer than any window."""


@pytest.mark.parametrize("name", FAMILIES)
def test_family(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    model = family.build(tmp_path / "model")
    options: dict[str, Any] = {"dtype": family.dtype, "block_size": BLOCK, "arguments": family.arguments}
    with started_pair(tmp_path / "logs", model, **options) as pair:
        of_a_family(pair, family)


def of_a_family(pair: Pair, family: Family) -> None:
    prefill, decode = pair.prefill, pair.decode
    watched = decode.rpc("kv_watch")[0]
    assert (len(watched["layers"]), len(watched["states"])) == (family.layers, family.states)
    for tokens in LENGTHS:
        ids = prompt(tokens, tokens)
        answer = pair.check(ids)
        assert answer["usage"]["prompt_tokens"] == tokens
        alone = complete(decode, ids, cache_salt=f"alone-{tokens}")
        assert not family.exact or tokens_of(answer) == tokens_of(alone), f"{tokens} tokens"

    if family.states:
        _check_that_a_state_tells_one_token_more(pair, watched["states"])
    ids = prompt(300, 2)
    decode.rpc("kv_corrupt", str(family.layers))
    complete(pair.router, ids)
    of_d, of_p = records(decode), records(prefill)
    assert f"KV bytes differ in {family.layers} of {family.layers} layers" in str(differ(of_d, of_p, ids))
    pair.check(prompt(300, 3))


def _check_that_a_state_tells_one_token_more(pair: Pair, states: list[str]) -> None:
    """The state after the whole prompt, which D must not be given, is told from that after all but its last token."""
    whole = prompt(100, 4)
    complete(pair.router, whole)
    remote_prompt = next(record for record in records(pair.decode) if record["prompt"] == prompt_digest(whole))
    records(pair.prefill)
    complete(pair.router, [*whole, 7])  # of which P leaves the last token to D
    after = next(record for record in records(pair.prefill) if record["covers"] == prompt_digest(whole))
    assert not [name for name in states if remote_prompt["layers"][name] == after["layers"][name]]
