"""Settings with bad values, the key, the control port."""

from __future__ import annotations

import os
import socket

import pytest

from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.settings import control_port, read_keys, read_settings
from kvferry.connector.config import Settings
from kvferry.transport.control.key_file import make_key_file
from tests.doctor.planted import is_bad, machine
from tests.support.engines import free_port


def found(tmp_path, environ=None, config=None):
    return read_settings(machine(tmp_path, environ=environ), config or {})


@pytest.mark.parametrize(
    ("environ", "config", "what", "words"),
    [
        ({"KVFERRY_PLANE": "tpc"}, {}, "KVFERRY_PLANE", ["did you mean 'tcp'"]),
        ({"KVFERRY_SIDE_CHANNEL_PORT": "70000"}, {}, "KVFERRY_SIDE_CHANNEL_PORT", ["70000", "65535"]),
        ({"KVFERRY_ENCRYPT": "perhaps"}, {}, "KVFERRY_ENCRYPT", ["perhaps"]),
        ({}, {"lease_seconds": -1}, "kv_connector_extra_config['lease_seconds']", ["-1"]),
        ({}, {"lease_second": 1}, "kv_connector_extra_config", ["lease_second", "did you mean 'lease_seconds'"]),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line(tmp_path, environ, config, what, words):
    (finding,), settings = found(tmp_path, environ, config)
    assert settings is None and finding.what == what
    is_bad(finding, Level.FAULT, *words)


def test_of_a_setting_that_is_gone_it_says_what_takes_its_place(tmp_path):
    for environ, config in (({"KVFERRY_CHECKSUM": "1"}, {}), ({}, {"checksum": True})):
        findings, _ = found(tmp_path, environ, config)
        assert {finding.do for finding in findings} == {"remove it; set encrypt in its place"}


def test_a_misspelt_variable(tmp_path):
    findings, settings = found(tmp_path, {"KVFERRY_KEYFILE": "/k"})
    assert settings is not None and settings.key_file is None
    is_bad(findings[0], Level.WARNING, "KVFERRY_KEYFILE", "did you mean 'KVFERRY_KEY_FILE'")


def test_a_key_file_that_others_may_read_is_missing_or_has_no_key(tmp_path):
    path = tmp_path / "key"
    secret = make_key_file(path)
    findings, keys = read_keys(Settings(key_file=str(path)))
    assert keys is not None and findings[0].level is Level.OK and keys.fingerprint in findings[0].value
    path.chmod(0o644)
    findings, keys = read_keys(Settings(key_file=str(path)))
    assert keys is None
    is_bad(findings[0], Level.FAULT, "0644", "0600")
    assert secret not in repr(findings)
    is_bad(read_keys(Settings(key_file=str(tmp_path / "none")))[0][0], Level.FAULT, "does not exist", "kvferry keygen")
    path.chmod(0o600)
    path.write_text("no key")
    is_bad(read_keys(Settings(key_file=str(path)))[0][0], Level.FAULT, "contains no key")


def test_the_shared_key_is_not_made(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    findings, keys = read_keys(Settings())
    assert keys is None and findings[0].level is Level.NOTE and not os.listdir(tmp_path)
    make_key_file(tmp_path / "kvferry.key")
    findings, keys = read_keys(Settings())
    assert keys is not None and [finding.level for finding in findings] == [Level.OK]
    findings, _ = read_keys(Settings(side_channel_host="10.0.0.1"))
    is_bad(findings[-1], Level.WARNING, "this host only", "keygen")


def test_a_port_that_is_free_and_one_in_use():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        is_bad(control_port(Settings(side_channel_port=port)), Level.WARNING, str(port), "in use")
    assert control_port(Settings(side_channel_port=port)).level is Level.NOTE  # loopback
    assert control_port(Settings()).level is Level.NOTE


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", ["is not an address of this host"]), ("no.such.host.invalid", ["the name of one"])],
)
def test_an_address_that_this_machine_has_not(host, words):
    is_bad(control_port(Settings(side_channel_host=host)), Level.FAULT, host, *words)
