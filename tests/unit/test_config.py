"""Settings: where they come from, and that every mistake is one line that names setting, value and expectation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import ENVIRONMENT, Settings, load_keys, load_settings, unknown_variables
from kvferry.transport.control.key_file import make_key_file
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.errors import ConfigError

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
