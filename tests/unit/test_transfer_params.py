"""What travels through the router: there and back, each way of being wrong in one line; whom D may ask beside P."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import load_settings
from kvferry.connector.engine.params import (
    MAX_ALTERNATIVES,
    RemotePrompt,
    alternatives,
    check_reachable,
    from_transfer_params,
    prompt_digest,
    to_transfer_params,
    wants_prefill,
)
from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, RemoteLease
from kvferry.transport.errors import ConfigError, ProtocolError
from kvferry.transport.host import AllowedPeers

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


HOST, SIZES = "ab" * 8, (4, 4)


def prompt(number: int, host: str = "10.0.0.1", **other: Any) -> RemotePrompt:
    rank = RankAddress(0, 0, host, 5600 + number, bytes(16))
    peer = PeerEngine(f"engine-{number}", 1, 1, 30.0, (rank,), "cd" * 8)
    return RemotePrompt(**{"token": bytes([number]) * 16, "num_tokens": 9, "digest": "digest", "peer": peer, **other})


def named(*others: object, first: RemotePrompt | None = None) -> tuple[tuple[RemoteLease, ...], list[str]]:
    first = first or prompt(0)
    params = {**to_transfer_params(first), "alternatives": list(others)}
    assert from_transfer_params(params, SIZES) == first, "D of an earlier release ignores them"
    return alternatives(params, first, SIZES, HOST)


def test_complete_parameters_are_taken_in_order() -> None:
    others = [prompt(number) for number in range(1, 1 + MAX_ALTERNATIVES)]
    usable, left_out = named(*map(to_transfer_params, others))
    assert usable == tuple(RemoteLease(other.token, other.peer) for other in others) and not left_out


def test_a_request_without_alternatives() -> None:
    assert alternatives(to_transfer_params(prompt(0)), prompt(0), SIZES, HOST) == ((), [])
    assert alternatives(None, prompt(0), SIZES, HOST) == ((), [])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, "does not say do_remote_prefill"),
        ({"do_remote_prefill": True}, "names no prefill engine"),
        ({**to_transfer_params(prompt(1)), "kvferry": {"v": 1}}, "is malformed"),
        ({**to_transfer_params(prompt(1)), "alternatives": []}, "names alternatives itself"),
        (
            to_transfer_params(prompt(1, digest="another")),
            "its prompt's digest is not that of the first",
        ),
        (
            to_transfer_params(prompt(1, kept=(("full", 4, 4),))),
            "its prompt's kept is not that of the first",
        ),
        (to_transfer_params(prompt(0)), "its lease is named twice"),
        (to_transfer_params(prompt(1, host="127.0.0.1")), "told its loopback address"),
    ],
)
def test_one_that_cannot_be_used_does_not_cost_the_others(other: object, words: str) -> None:
    usable, (why,) = named(other, to_transfer_params(prompt(2)))
    assert [lease.token for lease in usable] == [bytes([2]) * 16]
    assert why.startswith("alternatives[0]: ") and words in why and "\n" not in why and len(why) < 400


@pytest.mark.parametrize("value", [{}, "x", 7, [to_transfer_params(prompt(n)) for n in range(1, MAX_ALTERNATIVES + 2)]])
def test_no_list_or_too_long_a_list(value: object) -> None:
    usable, (why,) = alternatives({"alternatives": value}, prompt(0), SIZES, HOST)
    assert not usable and f"expected a list of at most {MAX_ALTERNATIVES}" in why


def test_no_line_has_a_token() -> None:
    ((lease,), _) = named(to_transfer_params(prompt(1)))
    assert repr(lease) == "RemoteLease('engine-1')"


LISTED = AllowedPeers(["10.1.0.0/16", "192.0.2.7", "fd00::/8"])


@pytest.mark.parametrize("address", ["10.1.0.1", "10.1.255.255", "192.0.2.7", "fd12::1", "::ffff:10.1.2.3"])
def test_addresses_of_the_list(address: str) -> None:
    assert LISTED.refusal(address) == ""


@pytest.mark.parametrize(
    "address",
    ["10.2.0.1", "192.0.2.8", "127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1%lo"],
)
def test_other_addresses(address: str) -> None:
    refusal = LISTED.refusal(address)
    assert refusal.startswith(f"{address} is not an allowed peer")
    assert "allowed_peers (KVFERRY_ALLOWED_PEERS)" in refusal and "10.1.0.0/16, 192.0.2.7/32, fd00::/8" in refusal


def test_loopback_and_all() -> None:
    loopback = AllowedPeers(("127.0.0.0/8", "::1/128"))
    assert not loopback.refusal("127.0.0.5") and not loopback.refusal("::1") and loopback.refusal("10.0.0.1")
    assert not AllowedPeers(None).refusal("10.0.0.1")
    assert "no network" in AllowedPeers(()).refusal("127.0.0.1")


def test_the_setting() -> None:
    environ = {"KVFERRY_ALLOWED_PEERS": "10.1.0.0/16, 192.0.2.7"}
    assert load_settings({}, environ).allowed_peers == ("10.1.0.0/16", "192.0.2.7")
    assert load_settings({"allowed_peers": ["10.9.0.0/16"]}, environ).allowed_peers == ("10.9.0.0/16",)
    for wrong in ("10.1.0.1/16", "p.example", "", "10.0.0.0/33"):
        with pytest.raises(ConfigError, match=r"^allowed_peers: [^\n]*expected an address or a network"):
            load_settings({"allowed_peers": [wrong]}, {})
