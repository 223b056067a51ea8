"""Hand-overs of model families whose caches take forms of their own: two real engines per family, every byte compared.

Grouped-query attention is test_pair.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES, WINDOW, Family
from tests.support.kv_bytes import prompt_digest
from tests.support.served import Pair, complete, differ, prefill_leg, prompt, records, started_pair, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = (1200, 2, BLOCK, WINDOW + BLOCK - 1, 140)
"""The first is much longer than any window; by its time D expects the others to be fast. In the fourth, the first token
of the last one's window ends a block: vLLM gives that block back once all tokens are computed, a token too early for a
D that computes the last one again."""
MOST_ATTEMPTS = 40
"""On a host that stands still for seconds a load is seen to be slow, and the next one goes beside the steps."""


@pytest.mark.parametrize("name", FAMILIES)
def test_family(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    model = family.build(tmp_path / "model")
    extension = ("--worker-extension-cls", "tests.support.kv_bytes.KVFailing")
    options: dict[str, Any] = {
        "dtype": family.dtype, "block_size": BLOCK, "arguments": (*family.arguments, *extension), "kv_bytes": False,
        "extra": {"step_hold_seconds": 1.0},
    }  # fmt: skip
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

    _check_inside_a_step(pair)
    _check_one_that_fails_inside_its_step(pair, family)
    if family.states:
        _check_that_a_state_tells_one_token_more(pair, watched["states"])
    ids = prompt(300, 2)
    decode.rpc("kv_corrupt", str(family.layers))
    complete(pair.router, ids)
    of_d, of_p = records(decode), records(prefill)
    assert f"KV bytes differ in {family.layers} of {family.layers} layers" in str(differ(of_d, of_p, ids))
    pair.check(prompt(300, 3))


def _check_inside_a_step(pair: Pair) -> None:
    """D's tokens after a load inside a step are those after one beside the steps, whatever its kernels round: in both
    cases D computes one token with the same bytes. Inside goes a load of which D expects that it is fast."""
    ids, tokens = prompt(200, 5), dict[bool, list[list[int]]]()
    for attempt in range(MOST_ATTEMPTS):
        pair.forget()
        salt: dict[str, Any] = {"cache_salt": f"attempt {attempt}"}
        params = prefill_leg(pair.prefill, ids, **salt)
        params["report"] = False not in tokens  # a client that asks for the time of a load gets it beside the steps
        answer = complete(pair.decode, ids, kv_transfer_params=params, **salt)
        of_d, of_p = records(pair.decode), records(pair.prefill)
        assert differ(of_d, of_p, ids) is None
        (inside,) = [record["inside"] for record in of_d if record["when"] == "loaded"]
        tokens[inside] = tokens_of(answer)
        if len(tokens) == 2:
            break
    assert tokens[True] == tokens[False]


def _check_one_that_fails_inside_its_step(pair: Pair, family: Family) -> None:
    """D's tokens are those of a D that was handed nothing; and what the step made of nothing is not found again, where
    the prompt ends a block either."""
    decode = pair.decode
    decode.rpc("kv_fail_inside")
    for attempt in range(MOST_ATTEMPTS):
        ids = prompt(10 * BLOCK, 600 + attempt)
        answer = complete(decode, ids, kv_transfer_params=prefill_leg(pair.prefill, ids))
        if failed := "failed inside its step" in decode.log_text():
            break
    decode.rpc("kv_fail_inside")
    longer = [*ids, *prompt(40, 6)]
    after = complete(decode, longer)
    assert failed and tokens_of(answer) == tokens_of(complete(decode, ids, cache_salt="alone"))
    assert not family.exact or tokens_of(after) == tokens_of(complete(decode, longer, cache_salt="alone"))


def _check_that_a_state_tells_one_token_more(pair: Pair, states: list[str]) -> None:
    """The state after the whole prompt, which D must not be given, is told from that after all but its last token."""
    whole = prompt(100, 4)
    complete(pair.router, whole)
    remote_prompt = next(record for record in records(pair.decode) if record["prompt"] == prompt_digest(whole))
    records(pair.prefill)
    complete(pair.router, [*whole, 7])  # of which P leaves the last token to D
    after = next(record for record in records(pair.prefill) if record["covers"] == prompt_digest(whole))
    assert not [name for name in states if remote_prompt["layers"][name] == after["layers"][name]]
