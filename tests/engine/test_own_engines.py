"""What needs engines of its own: P killed and restarted, each data plane, the first forward of a D."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """A P with every plane on offer."""
    with PatientServerGroup(tmp_path_factory.mktemp("own")) as group:
        prefill = group.engine("prefill", model)
        group.wait_ready()
        yield SharedEngines(group, model, prefill)


@pytest.fixture
def shared(running: SharedEngines) -> Iterator[SharedEngines]:
    with running.of_a_test():
        yield running


def test_p_is_killed_and_restarted(shared: SharedEngines) -> None:
    """D recomputes what P can no longer give, serves alone while P is away, and then loads from the new P."""
    group, prefill = shared.group, shared.one
    (decode,) = shared.beside("decode")
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
    (shared.one,) = shared.beside("prefill-again", port=prefill.port)
    pair.prefill = shared.one
    pair.prefill.rpc("kv_watch")
    late = complete(decode, ids, kv_transfer_params=params, cache_salt="late")
    assert tokens_of(late) == tokens_of(recomputed), "parameters of the P that was: recomputed, not mistaken"
    no_block_held(decode)
    eventually(lambda: complete(pair.router, prompt(40, 4)) and records(pair.prefill), "the router is back")
    pair.check(prompt(350, 5))


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_over_every_plane(shared: SharedEngines, plane: str) -> None:
    named = plane in ("zmq", "ucx")  # in host memory P offers these only where they are named
    names = [f"decode-{plane}", *([f"prefill-{plane}"] if named else [])]
    decode, prefill = [*shared.beside(*names, extra={"plane": plane}), shared.one][:2]
    pair = Pair(shared.group, prefill, decode)
    for tokens in (33, 400, 1500):
        pair.check(prompt(tokens, tokens + len(plane)), plane=plane)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_between_blocks_of_32_and_of_64_tokens(shared: SharedEngines, dtype: str) -> None:
    """Both directions. vLLM packs a block's tokens in an order of its own: keys transposed, or in tiles for AMX."""
    (large,) = shared.beside(f"64-{dtype}", dtype=dtype, block_size=64)
    (small,) = [shared.one] if dtype == "float32" else shared.beside(f"32-{dtype}", dtype=dtype)
    for p, d in ((small, large), (large, small)):
        pair = Pair(shared.group, p, d)
        for tokens in (2, 33, 64, 70, 500):
            pair.check(prompt(tokens, tokens + (p is large)))
        shared.group.stop(pair.router)


def test_the_first_forward_of_a_d_may_be_one_token(shared: SharedEngines) -> None:
    """In bfloat16 vLLM's AMX attention then runs before anybody has asked the kernel for AMX (where there is any)."""
    names = ("bf16-p", "bf16-d")
    pair = [shared.group.engine(name, shared.model, dtype="bfloat16", kv_bytes=False) for name in names]
    for engine in pair:
        engine.is_engine = False  # no prompt to warm it up
    shared.group.wait_ready(servers=pair)
    prefill, decode = pair
    ids = prompt(200, 5)
    assert len(tokens_of(complete(decode, ids, kv_transfer_params=prefill_leg(prefill, ids)))) > 0
    assert count(decode).external >= len(ids) - 1, "it was loaded, so D computed the last token alone"
