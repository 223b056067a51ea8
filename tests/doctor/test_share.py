"""``--share``: a report without secrets."""

from __future__ import annotations

import hashlib
import json

import pytest
from zmq.utils import z85

from kvferry.cli.doctor.findings import DoctorSection, fault, ok
from kvferry.cli.doctor.share import Scrubber, report
from kvferry.transport.control.keys import Keys, new_secret

SECRET = new_secret()
PUBLIC = Keys(SECRET).public
ENVIRON = {
    "HOME": "/data/people/marie", "KVFERRY_SECRET_KEY": SECRET, "KVFERRY_KEY_FILE": "/data/people/marie/kvferry.key",
    "KVFERRY_PEER_KEYS": f"{PUBLIC},short", "KVFERRY_SIDE_CHANNEL_HOST": "10.20.30.40",
    "HF_TOKEN": "hf_AbCdEfGh0123456789", "VLLM_API_KEY": "tiger-7", "DATABASE_PASSWORD": "hunter22",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY99", "UCX_TLS": "tcp",
    "UNRELATED": "not in the file",
}  # fmt: skip
OTHER_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"  # of the ZMQ reference; no variable has it
PLANTED = [
    SECRET, PUBLIC, OTHER_KEY, OTHER_KEY[-4:], "ghp_1234567890abcdefABCDEF1234567890abcd", "hf_AbCdEfGh", "tiger-7",
    "wJalrXUtn", "hunter22", "marie", "10.20.30.40", "10.20.30.41",
    "gpu-node-17", "corp.example", "fd00:12::34", "not in the file", "short",
]  # fmt: skip
FINDINGS = [
    ok("settings", f"secret_key set, HF_TOKEN={ENVIRON['HF_TOKEN']}, in /home/marie/venv and {ENVIRON['HOME']}/x"),
    ok("peer", "gpu-node-17.corp.example:5600 at 10.20.30.41 and [fd00:12::34]:5600, and 127.0.0.1"),
    fault("KVFERRY_PEER_KEYS", f"{PUBLIC!r} for user marie; tiger-7; hunter22", f"remove {SECRET}"),
    ok("odd", f"secret_key={OTHER_KEY}; {OTHER_KEY} token ghp_1234567890abcdefABCDEF1234567890abcd"),
]
SECTIONS = [DoctorSection("Settings", FINDINGS)]


@pytest.fixture
def scrubber():
    return Scrubber(ENVIRON, hosts=["gpu-node-17.corp.example"], users=["marie"])


def test_no_planted_secret_is_in_the_file(scrubber):
    """Without the scrubber they are."""

    class Idle(Scrubber):
        def text(self, text: str) -> str:
            return text

    text = report(SECTIONS, ENVIRON, scrubber)
    assert [planted for planted in PLANTED if planted in text] == []
    text = report(SECTIONS, ENVIRON, Idle({}))
    assert len([planted for planted in PLANTED if planted in text]) >= 10


def test_what_a_reader_needs_is_left(scrubber):
    content = json.loads(report(SECTIONS, ENVIRON, scrubber))
    assert content["fit"] is False and content["environment"]["UCX_TLS"] == "tcp"
    settings, peer, keys, _ = content["sections"][0]["findings"]
    assert settings["value"].endswith("in ~/venv and ~/x")
    assert peer["value"].startswith("<host>:5600 at <address") and peer["value"].endswith("and 127.0.0.1")
    assert keys["level"] == "fault" and "<user>" in keys["value"]
    plain = "torch 2.13.0+cpu, libzmq 4.3.5, 1.74 GB/s; process_vm_readv, KVFERRY_SIDE_CHANNEL_HOST"
    assert scrubber.text(plain) == plain


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("10.0.0.1 10.0.0.2 10.0.0.1:80", "<address 1> <address 2> <address 1>:80"),
        ("12.9.300.4 and 1.21.0", "12.9.300.4 and 1.21.0"),
        ("process_vm_readv on vm:5600, vm.corp.example by ai", "process_vm_readv on <host>:5600, <host> by <user>"),
    ],
    ids=["equal addresses stay equal", "versions are no addresses", "a host name inside a word is none"],
)
def test_what_is_replaced(text, left):
    assert Scrubber({}, hosts=["vm.corp.example"], users=["ai"]).text(text) == left


def test_every_key_is_found(scrubber):
    for number in range(1000):
        key = z85.encode(hashlib.blake2b(number.to_bytes(2), digest_size=32).digest()).decode()
        assert key[:20] not in scrubber.text(f"peer_keys[0]: {key!r}, its own"), key
