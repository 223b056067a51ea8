"""Sliding windows beside full attention: what P has kept, what D's blocks need, and nothing that is filled in part.

One layer attends to everything, the other to the last tokens only; vLLM's scheduler gives its blocks back as it goes.
Every forward checks the labels of all tokens that it attends to.
"""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.vllm import compat
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, ROOM, EngineGroup, Lines, Pair, hand_over, loaded, settle

pytestmark = pytest.mark.vllm
WINDOW = 64


def pair(
    group: EngineGroup, p_block: int = 16, d_block: int = 16, windows: tuple[int | None, int | None] = (WINDOW, WINDOW)
) -> Pair:
    p = group.engine(0, extra=ROOM, window=windows[0], block=p_block, num_blocks=90)
    return p, group.engine(1, extra=ROOM, window=windows[1], block=d_block, num_blocks=90)


@pytest.mark.parametrize("tokens", [2, 17, 63, 64, 65, 79, 80, 81, 95, 96, 97, 112, 300])
def test_each_length_around_the_window_is_handed_over(group: EngineGroup, tokens: int) -> None:
    p, d = pair(group)
    hand_over(p, d, prompt(tokens), max_tokens=20)
    assert not d.failed
    settle(p, d)


def test_p_leaves_its_last_token_to_d_where_its_window_would_lose_a_block(group: EngineGroup) -> None:
    p, _ = pair(group)
    counts = {}
    for tokens in range(60, 120):
        request_id = p.add(prompt(tokens, seed=tokens), PREFILL)
        counts[tokens] = tokens - p.scheduler.requests[request_id].num_prompt_tokens
        p.abort(request_id)
    assert [tokens for tokens, count in counts.items() if count] == [79, 95, 111]
    request_id = p.add(prompt(79))
    assert p.scheduler.requests[request_id].num_prompt_tokens == 79, "what is not handed over is computed whole"
    request_id = p.add(prompt(79), PREFILL, prompt_logprobs=1)
    assert p.scheduler.requests[request_id].num_prompt_tokens == 79, "D computes all of this one"


def test_what_is_left_to_d_leaves_nothing_behind(group: EngineGroup) -> None:
    """Neither in the caller's list nor in the hashes, by which a block with P's own next token would be found."""
    p, _ = pair(group)
    ids = prompt(80)
    theirs = [*ids]
    request, whole = (p.scheduler.requests[p.add(given)] for given in (theirs, ids))
    assert len(request.block_hashes) == len(whole.block_hashes) == 5
    compat.truncate_prompt(request, 1)
    assert theirs == ids and list(request.prompt_token_ids) == ids[:-1] == list(request.all_token_ids)
    request.append_output_token_ids(ids[-1] + 1)
    assert request.block_hashes[:4] == whole.block_hashes[:4] and len(request.block_hashes) == 5
    assert request.block_hashes[4] != whole.block_hashes[4]


def test_a_prompt_with_embeddings_is_left_alone(group: EngineGroup) -> None:
    """Beside them vLLM has ids that stand for them, alike for all, and of the same length."""
    p, _ = pair(group)
    request = p.scheduler.requests[p.add(prompt(79))]
    request.prompt_embeds = torch.zeros(79, 8)
    request.kv_transfer_params = PREFILL
    p.connector.on_new_request(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == 79
    given, params = p.connector.request_finished_all_groups(request, ((1, 2, 3, 4, 5),) * 2)
    assert (given, params) == (False, None)


@pytest.mark.parametrize(("p_block", "d_block"), [(32, 16), (48, 16), (16, 32), (16, 48), (32, 48), (48, 32)])
def test_other_block_sizes(group: EngineGroup, p_block: int, d_block: int) -> None:
    """Handed over, or prefilled on D where P has given back a part of D's first block: right either way."""
    p, d = pair(group, p_block, d_block)
    came = []
    for tokens in (40, 64, 111, 129, 200, 215, 230, 250, 288):
        ids = prompt(tokens, seed=tokens)
        request_id = d.add(ids, p.prefill(ids), max_tokens=5)
        d.finish(request_id, beside=[p])
        came.append(d.origins[request_id].theirs == tokens - 1)
    assert not d.failed
    settle(p, d)
    assert came[0]
    if p_block % d_block == 0:
        assert all(came)
    else:
        assert any(came[3:]) and not all(came)


def test_a_block_that_p_cannot_fill_is_never_offered_to_another_request(group: EngineGroup, lines: Lines) -> None:
    """P kept a window that begins at token 137 from token 128 on; D's blocks of 48 begin at 96. Loaded in part, that
    block would count as whole, and a second request with the first 144 tokens would attend to what it lacks."""
    p, d = pair(group, 16, 48)
    ids = prompt(200)
    loaded(None, d, d.add(ids, p.prefill(ids), max_tokens=20), 0)
    assert len(lines("prefills locally", "kept the window of 64 tokens from token 128", "begin at 96")) == 1
    d.finish(d.add(ids[:150] + prompt(20, seed=9), max_tokens=20))
    settle(p, d)


def test_what_p_says_it_kept_is_not_what_p_goes_by(group: EngineGroup) -> None:
    """A D that believes it may load gets no block that P has given back: the load fails, and D prefills."""
    p, d = pair(group, 16, 48)
    ids = prompt(200)
    params = p.prefill(ids)
    params["kvferry"]["kept"] = []
    request_id = d.add(ids, params, max_tokens=20)
    d.finish(request_id, beside=[p])
    assert d.workers[0].failed == {request_id: 1}
    d.finish(d.add(ids[:150] + prompt(20, seed=9), max_tokens=20))
    settle(p, d)


def test_a_d_without_windowed_tables_takes_what_p_has_in_full(group: EngineGroup) -> None:
    p, d = pair(group, windows=(WINDOW, None))
    for tokens, theirs in ((60, 59), (200, 0)):
        hand_over(p, d, prompt(tokens, seed=tokens), theirs, max_tokens=5)
    assert not d.failed
    settle(p, d)


def test_a_p_without_windowed_tables_has_all_that_d_needs(group: EngineGroup) -> None:
    p, d = pair(group, 32, 48, windows=(None, WINDOW))
    for tokens in (60, 111, 200, 250):
        hand_over(p, d, prompt(tokens, seed=tokens), max_tokens=5)
    settle(p, d)
