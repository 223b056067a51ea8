"""Settings and what travels through the router: there and back, every mistake one line; whom D may ask beside P."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import ENVIRONMENT, Settings, load_keys, load_settings, unknown_variables
from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.wire.params import (
    MAX_ALTERNATIVES,
    RemotePrompt,
    alternatives,
    check_reachable,
    from_transfer_params,
    prompt_digest,
    to_transfer_params,
    wants_prefill,
)
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, RemoteLease
from kvferry.transport.control.key_file import make_key_file
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.errors import ConfigError, ProtocolError
from kvferry.transport.host import AllowedPeers

SECRET = new_secret()
PUBLIC = Keys(SECRET).public


def test_defaults():
    assert load_settings({}, {}) == load_settings({}, dict.fromkeys(ENVIRONMENT.values(), " ")) == Settings()
    assert Settings().side_channel_host == "127.0.0.1", "a default never listens beyond this host"


def test_extra_config_over_environment_over_defaults(monkeypatch):
    environ = {"KVFERRY_SIDE_CHANNEL_HOST": "10.0.0.1", "KVFERRY_SIDE_CHANNEL_PORT": "5600", "KVFERRY_PLANE": "zmq"}
    settings = load_settings({"plane": "ucx"}, environ)
    assert (settings.side_channel_host, settings.side_channel_port, settings.plane) == ("10.0.0.1", 5600, "ucx")
    monkeypatch.setenv("KVFERRY_SIDE_CHANNEL_PORT", "5601")
    assert load_settings({}).side_channel_port == 5601


def test_variables_that_nothing_reads_but_for_links_of_kubernetes():
    known = dict.fromkeys((*ENVIRONMENT.values(), "KVFERRY_TRITON_LAUNCHER", "PATH"), "1")
    address = "tcp://10.96.0.7:8000"
    links = {"_SERVICE_HOST": "10.96.0.7", "_SERVICE_PORT": "8000", "_SERVICE_PORT_HTTP": "8000", "_PORT": address}
    links |= {"_PORT_8000_TCP": address, "_PORT_8000_TCP_PROTO": "tcp", "_PORT_8000_TCP_ADDR": "10.96.0.7"}
    services = {f"{name}{end}": value for name in ("KVFERRY", "KVFERRY_PREFILL") for end, value in links.items()}
    wrong = {
        "KVFERRY_KEYFILE": "did you mean 'KVFERRY_KEY_FILE'?", "KVFERRY_PLAN": "did you mean 'KVFERRY_PLANE'?",
        "KVFERRY_SIDECHANNEL_PORT": "did you mean 'KVFERRY_SIDE_CHANNEL_PORT'?",
        "KVFERRY_LEASE_SECONDS": "lease_seconds is given in kv_connector_extra_config", "KVFERRY_X": "variable",
    }  # fmt: skip
    found = unknown_variables(known | services | dict.fromkeys(wrong, "5600"))
    assert found.keys() == wrong.keys() and all(wrong[name] in why for name, why in found.items())


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("false", False), ("", False)])
def test_encrypt_from_the_environment(text, value):
    assert load_settings({}, {"KVFERRY_ENCRYPT": text}).encrypt is value
    assert load_settings({"encrypt": not value}, {"KVFERRY_ENCRYPT": text}).encrypt is not value


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0", "node-7.example.org", "localhost"])
def test_hosts_that_are_fine(host):
    assert load_settings({"side_channel_host": host}, {}).advertised_host == host
    assert load_settings({"side_channel_host": "10.0.0.1", "advertise_host": host}, {}).advertised_host == host


BAD = [
    ({"palne": "ucx"}, {}, ["palne", "did you mean 'plane'", "slot_bytes"]),
    ({5: "ucx"}, {}, ["5", "plane"]),
    ({"bootstrap_port": 0}, {}, ["'bootstrap_port' is gone; have the router send P's remote_host"]),
    ({"checksum": False}, {}, ["'checksum' is gone; set encrypt in its place"]),
    ({"plane": "ucx\n"}, {}, ["plane", "'ucx\\n'", "did you mean 'ucx'"]),
    ({"plane": "x" * 5000}, {}, ["plane", "xxx ...", "auto, cma, cuda_ipc, nixl, shm, tcp, ucx, zmq"]),
    ({"side_channel_port": 70000}, {}, ["side_channel_port", "70000", "65535"]),
    ({"side_channel_port": "5600"}, {}, ["side_channel_port", "'5600'", "int"]),
    ({"side_channel_port": True}, {}, ["side_channel_port", "True", "int"]),
    ({"slot_bytes": 1}, {}, ["slot_bytes", "1 ", "65536"]),
    ({"slot_bytes": 257 << 20, "staging_bytes": 8 << 30}, {}, ["slot_bytes", str(257 << 20), str(256 << 20)]),
    ({"staging_bytes": 4 << 20}, {}, ["staging_bytes", str(4 << 20), "slot_bytes", str(16 << 20)]),
    ({"lease_seconds": float("nan")}, {}, ["lease_seconds", "nan", "> 0"]),
    ({"lease_seconds": float("inf")}, {}, ["lease_seconds", "inf", "604800"]),
    ({"lease_cap_seconds": 30}, {}, ["'lease_cap_seconds' is gone; it is 20 times lease_seconds"]),
    ({"side_channel_host": "0.0.0.0"}, {}, ["side_channel_host", "'0.0.0.0'", "all interfaces", "name the one"]),
    ({"side_channel_host": "::"}, {}, ["side_channel_host", "'::'", "all interfaces"]),
    ({"side_channel_host": "*"}, {}, ["side_channel_host", "'*'", "all interfaces"]),
    ({"side_channel_host": ""}, {}, ["side_channel_host", "''", "all interfaces"]),
    ({"advertise_host": "0.0.0.0"}, {}, ["advertise_host", "'0.0.0.0'", "name the one"]),
    ({"advertise_host": "tcp://10.0.0.1"}, {}, ["advertise_host", "'tcp://10.0.0.1'", "bare host"]),
    ({"advertise_host": "10.0.0.1:5600"}, {}, ["advertise_host", "'10.0.0.1:5600'", "the port apart"]),
    ({"advertise_host": "a\nb"}, {}, ["advertise_host", "'a\\nb'", "bare host"]),
    (
        {},
        {"KVFERRY_SIDE_CHANNEL_PORT": "tcp://10.0.0.1:80"},
        ["number from 0 to 65535; Kubernetes sets it for a Service"],
    ),
    ({}, {"KVFERRY_ENCRYPT": "yes"}, ["KVFERRY_ENCRYPT: 'yes'", "expected 1 or 0"]),
    ({"secret_key": SECRET}, {}, ["'secret_key' is gone; give a file of it, in key_file"]),
    ({}, {"KVFERRY_SECRET_KEY": SECRET}, ["KVFERRY_SECRET_KEY: the setting is gone; give a file of it, in key_file"]),
    ({"peer_keys": PUBLIC}, {}, ["peer_keys", "array"]),
    ({"peer_keys": [PUBLIC, "short"]}, {}, ["peer_keys[1]", "5 characters", "64"]),
    ({"require_plane": ["shm"]}, {}, ["'require_plane' is gone; name the one in plane"]),
    ({}, {"KVFERRY_PEER_KEYS": f"{PUBLIC},"}, ["peer_keys[1]", "0 characters"]),
    ({}, {"KVFERRY_SIDE_CHANNEL_PORT": "²"}, ["KVFERRY_SIDE_CHANNEL_PORT", "'²'", "from 0 to 65535"]),
]


@pytest.mark.parametrize(("extra", "environ", "words"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_mistake_is_one_line(extra, environ, words):
    with pytest.raises(ConfigError) as error:
        load_settings(extra, environ)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    for word in words:
        assert word in text
    assert SECRET not in text


def test_no_secret_is_shown(tmp_path):
    (file := tmp_path / "key").write_text(SECRET)
    file.chmod(0o600)
    settings = load_settings({}, {"KVFERRY_KEY_FILE": str(file), "KVFERRY_PEER_KEYS": f"{PUBLIC}, {PUBLIC}"})
    assert settings.peer_keys == (PUBLIC, PUBLIC) and load_keys(settings).public == PUBLIC
    assert SECRET not in repr(load_keys(settings))


def test_where_the_keys_come_from(tmp_path):
    def keys(**given: Any) -> Keys:
        return load_keys(Settings(**given))

    assert keys(peer_keys=(PUBLIC,)).fingerprint == keys().fingerprint, "one key for a user on a host"
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=f"key_file: .*does not exist; make it with `kvferry keygen {file}`"):
        load_keys(Settings(key_file=str(file)))
    secret = make_key_file(file)
    assert keys(key_file=str(file)).secret == secret


def test_the_documentation_has_every_setting_with_its_bounds():
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = {cells[1].strip(" `"): cells for line in text.splitlines() if len(cells := line.split("|")) == 7}
    bounds = {name: cells[3].strip() for name, cells in rows.items() if name in Settings.__struct_fields__}
    assert bounds.keys() == set(Settings.__struct_fields__)
    assert all(
        rows[name][4].strip(" `") == variable and rows[name][5].strip() for name, variable in ENVIRONMENT.items()
    )
    assert bounds["slot_bytes"] == "65536 to 268435456" and bounds["lease_seconds"] == "over 0 to 604800"
    fields = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    numbers = {name for name, default in fields.items() if type(default) in (int, float)}
    numbers |= {"slot_bytes", "staging_bytes"}
    assert {name for name, text in bounds.items() if text} == numbers
    for name in numbers:
        least, most = bounds[name].removeprefix("over ").split(" to ")
        for beyond in (float(least) - 1, float(most) + 1):
            with pytest.raises(ConfigError, match=name):
                load_settings({name: beyond}, {})


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
