"""What travels through the router: there and back, and every way of being wrong in one line."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.connector.engine.params import (
    RemotePrompt,
    check_reachable,
    from_transfer_params,
    prompt_digest,
    to_transfer_params,
    wants_prefill,
)
from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.errors import ProtocolError

HERE, THERE = "0123456789abcdef", "fedcba9876543210"


def remote_prompt(host: str = "127.0.0.1", tp_size: int = 2) -> RemotePrompt:
    ranks = tuple(RankAddress(0, r, host, 5000 + r, bytes([r]) * 16, "0123456789ab") for r in range(tp_size))
    return RemotePrompt(b"t" * 16, 77, prompt_digest([1, 2, 3]), PeerEngine("engine-p", tp_size, 1, 30.0, ranks, HERE))


def test_there_and_back_through_json() -> None:
    plain = remote_prompt()
    peer = msgspec.structs.replace(plain.peer, shardings=(TokenSharding(1), TokenSharding(2, 16)))
    for prompt, dcp_size in ((plain, 1), (msgspec.structs.replace(plain, peer=peer), 2)):
        params = json.loads(json.dumps(to_transfer_params(prompt)))
        assert from_transfer_params(params) == prompt and params["dcp_size"] == dcp_size


def test_nixls_own_keys_are_all_there() -> None:
    params = to_transfer_params(remote_prompt())
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert {"remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"} <= set(params)
    assert params["remote_block_ids"] == [], "block ids do not travel through a router"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None}])
def test_missing_or_null_means_prefill_locally(params: dict[str, Any] | None) -> None:
    assert from_transfer_params(params) is None
    assert not wants_prefill(params)


def broken(**changes: Any) -> dict[str, Any]:
    params = to_transfer_params(remote_prompt())
    params["kvferry"] = {**params["kvferry"], **changes}
    return params


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_prefill": True}, "names no prefill engine"),
        ({"do_remote_prefill": True, "remote_engine_id": None, "kvferry": None}, "names no prefill engine"),
        ({"do_remote_prefill": True, "remote_engine_id": "x"}, "no 'kvferry' entry"),
        (broken(v="x" * 3_000_000), r"version is 'x+\.\.\.x+', expected 1"),
        (broken(v=10**5000), "version is a value of type int, expected 1"),
        (broken(v=[[[[[[[[[[1]]]]]]]]]] * 1000), "version is .*, expected 1"),
        (broken(engine_id="a\u2028b"), "engine_id"),
        (broken(token="xyz"), "token"),
        (broken(num_tokens=0), "num_tokens"),
        (broken(lease_seconds=-1), "lease_seconds"),
        (broken(shardings=[[5000, 1]]), "shardings"),
        (broken(shardings=[[2, 0]]), "shardings"),
        (broken(shardings=[[1, 1], [3, 1]]), "1, 3 of 2 ranks share tokens out"),
        (
            broken(ranks=[[0, 0, "h", 1, "00" * 16, ""], [0, 2, "h", 1, "00" * 16, ""]]),
            "a rank pp0 tp2, expected below pp1 and tp2",
        ),
        (broken(tp_size=3), "names 2 ranks, expected 1 x 3"),
        (broken(ranks=[[0, 0, "h", 70000, "00" * 16, ""]]), "ranks"),
        (broken(ranks=[[0, 0, "h", 1, "00" * 16, "a key\n"]]), "ranks"),
        ({**to_transfer_params(remote_prompt()), "kvferry": [1, 2]}, "malformed"),
    ],
)
def test_what_cannot_be_used_is_one_line(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named) as caught:
        from_transfer_params(params)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_more_ranks_than_an_engine_of_this_model_has() -> None:
    params = to_transfer_params(remote_prompt())
    assert from_transfer_params(params, (2, 1)) == remote_prompt()
    with pytest.raises(ProtocolError, match="tp_size 2 and pp_size 1; an engine of this model has at most 1 and 9"):
        from_transfer_params(params, (1, 9))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1"])
def test_a_loopback_address_of_another_host_is_refused(host: str) -> None:
    with pytest.raises(ProtocolError, match=f"{host}; set side_channel_host"):
        check_reachable(remote_prompt(host).peer, THERE)
    for other, ours in ((host, HERE), ("10.0.0.1", THERE), (host, "")):
        check_reachable(remote_prompt(other).peer, ours)


def test_digest_tells_prompts_apart() -> None:
    digests = {
        prompt_digest([1, 2, 3]), prompt_digest([1, 2]), prompt_digest([3, 2, 1]), prompt_digest([1, 2, 3], ["lora:a"]),
        prompt_digest([1, 2, 3], ["a", "b"]), prompt_digest([1, 2, 3], ["ab"]),
    }  # fmt: skip
    assert len(digests) == 6
