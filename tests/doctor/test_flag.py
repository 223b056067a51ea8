"""``doctor --config`` on the whole ``--kv-transfer-config``: each mistake is one finding that says what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.flag import EXAMPLE, EXTRA, is_flag, judge
from kvferry.connector.config import Settings
from tests.doctor.planted import is_bad

GOOD: dict[str, Any] = json.loads(EXAMPLE)


def without(*names: str, **others: Any) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name not in names} | others


def below_multi(*children: object, **others: Any) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return without(kv_connector="MultiConnector", kv_connector_extra_config=extra, **others)


CHILD = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"plane": "tcp"}}
STORE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "flag",
    [
        GOOD, without(kv_role="kv_producer"), without(engine_id="p0", kv_port=1, kv_buffer_device="cpu"),
        without(kv_connector_module_path="kvferry.connector.vllm.adapter"),
        without(kv_connector="NixlConnector", kv_connector_module_path="kvferry.connector.vllm.as_nixl"),
        below_multi(CHILD, STORE),
        {"kv_connector": "KVFerryConnector", "kv_role": "kv_producer"},
    ],
)  # fmt: skip
def test_a_right_flag_is_one_line(flag):
    assert is_flag(flag)
    (found,), _ = judge(flag)
    assert found.level is Level.OK, found


@pytest.mark.parametrize(
    ("flag", "what", "words"),
    [
        ({}, "kv_connector", ["is not set: the engine starts without KVFerry"]),
        (without(kv_connector="KvFerryConnector"), "kv_connector", ["did you mean 'KVFerryConnector'"]),
        (without(kv_connector="NixlConnector"), "kv_connector", ["is not KVFerry's connector"]),
        (without(kv_connector_module_path="kvferry.adapter"), "kv_connector", ["of the module 'kvferry.adapter'"]),
        (without("kv_load_failure_policy"), "kv_load_failure_policy", ["ends its request with an error", "recompute"]),
        (without(kv_connector=["x"]), "kv_connector", ["is not KVFerry's connector"]),
        (below_multi(), "kv_connector_extra_config", ["connectors is []", "JSON objects"]),
        (without(kv_connector="MultiConnector", kv_connector_extra_config="x"), EXTRA, ["connectors is None"]),
        (below_multi("KVFerryConnector"), "kv_connector_extra_config", ["connectors is ['KVFerryConnector']"]),
        (below_multi(STORE), "kv_connector", ["'OffloadingConnector' is not KVFerry's"]),
        (below_multi(CHILD, CHILD), "connectors", ["listed 2 times"]),
    ],
)  # fmt: skip
def test_a_mistake_is_a_fault_that_says_what_to_do(flag, what, words):
    assert is_flag(flag)
    found, _ = judge(flag)
    is_bad(next(finding for finding in found if finding.what == what), Level.FAULT, *words)


def test_what_works_and_surprises_is_a_warning():
    (found,), extra = judge(below_multi(STORE, CHILD))
    is_bad(found, Level.WARNING, "KVFerry is number 2", "list it first")
    assert extra == {"plane": "tcp"}, "the settings of KVFerry's connector are the ones that are checked"
    (found,), _ = judge(without(kv_load_failure_policy="fail"))
    assert found.level is Level.NOTE


def test_settings_alone_are_no_flag():
    for name in Settings.__struct_fields__:
        assert not is_flag({name: 1}) and not is_flag({name[:-1]: 1}), name
