"""``--kv-transfer-config``: whether an engine that has it hands over. What vLLM refuses by itself is not looked for.
Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.cli.doctor.findings import Finding, fault, note, ok, warning
from kvferry.connector.config import Settings
from kvferry.transport.errors import did_you_mean, quoted

EXTRA = "kv_connector_extra_config"
EXAMPLE = '{"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
OURS = {
    ("KVFerryConnector", None), ("KVFerryConnector", "kvferry.connector.vllm.adapter"),
    ("NixlConnector", "kvferry.connector.vllm.as_nixl"),
}  # fmt: skip
"""Names of KVFerry's connector, each with the value of ``kv_connector_module_path``."""


def is_flag(config: Mapping[str, Any]) -> bool:
    """Whether it is the whole flag, or empty, and not ``kv_connector_extra_config`` alone."""
    settings = Settings.__struct_fields__
    return not config or any(name.startswith("kv_") for name in config if name not in settings)


def judge(flag: Mapping[str, Any]) -> tuple[list[Finding], Mapping[str, Any]]:
    """What is wrong with the flag; and KVFerry's ``kv_connector_extra_config`` in it, empty where there is none."""
    found, ours = list[Finding](), flag
    if flag.get("kv_connector") == "MultiConnector":
        children = _extra(flag).get("connectors")
        if not isinstance(children, list) or not children or not all(isinstance(child, dict) for child in children):
            value = f"connectors is {quoted(children)}"
            found.append(
                fault(EXTRA, value, f"list the connectors, KVFerry's first: {EXAMPLE}", expected="JSON objects")
            )
            return found, {}
        places = [number for number, child in enumerate(children) if _is_ours(child)]
        ours = children[places[0]] if places else children[0]
        if len(places) > 1:
            value = f"KVFerry is listed {len(places)} times: both would take the same requests"
            found.append(fault("connectors", value, "list it once"))
        elif places and places[0]:
            do = "list it first: vLLM passes on only what the first connector tells of its ranks"
            found.append(warning("connectors", f"KVFerry is number {places[0] + 1}", do))
    if not _is_ours(ours):
        found.append(_not_ours(ours))
        return found, {}
    if "kv_load_failure_policy" not in flag and flag.get("kv_role") != "kv_producer":
        value = 'is "fail" where it is not set: a failed hand-over ends its request with an error'
        do = 'set "recompute", and the decode engine prefills the prompt; or "fail", where errors are wanted'
        found.append(fault("kv_load_failure_policy", value, do))
    elif flag.get("kv_load_failure_policy") == "fail":
        found.append(note("kv_load_failure_policy", "fail: a failed hand-over ends its request with an error"))
    return found or [ok("--kv-transfer-config", f"{flag['kv_connector']}, {flag.get('kv_role')}")], _extra(ours)


def _extra(flag: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = flag.get(EXTRA, {})
    return extra if isinstance(extra, dict) else {}


def _is_ours(flag: Mapping[str, Any]) -> bool:
    named = flag.get("kv_connector"), flag.get("kv_connector_module_path")
    return any(named == each for each in OURS)  # a value may have no hash


def _not_ours(flag: Mapping[str, Any]) -> Finding:
    name, path = flag.get("kv_connector"), flag.get("kv_connector_module_path")
    if name is None:
        return fault("kv_connector", "is not set: the engine starts without KVFerry", f"set it: {EXAMPLE}")
    near = did_you_mean(str(name), ("KVFerryConnector", "MultiConnector")) if path is None else ""
    value = quoted(name) + ("" if path is None else f" of the module {quoted(path)}")
    return fault("kv_connector", f"{value} is not KVFerry's connector{near}", f"name KVFerry's: {EXAMPLE}")
