"""The Grafana dashboard and the alerts, of series that engines export."""

from __future__ import annotations

import re
from typing import get_args

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvferry.connector.wire.metrics import PROMPT_ENDS, LocalReason
from kvferry.connector.wire.series import PREFIX, SERIES
from kvferry.router.engines import EnginePool
from kvferry.router.metrics import Metrics
from tests.drain.pages import recorded
from tests.support.monitored import DASHBOARD, EXAMPLES, ROOT, queries

SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
OURS = {PREFIX + series.name + suffix: series for series in SERIES for suffix in SUFFIXES[series.kind]}
LABELS = {"model_name", "instance", "le", "source"}
"""Those that every series has, that of the buckets of a histogram, and that of a series of vLLM."""


def test_series_of_queries_exist_and_all_of_ours_are_in_a_panel():
    pages = [text_string_to_metric_families(recorded(page)) for page in ("prefill", "decode")]
    of_vllm = {sample.name for page in pages for family in page for sample in family.samples}
    asked = {name for _, text in queries() for name in re.findall(r"vllm:\w+", text)}
    assert asked <= OURS.keys() | of_vllm | {"vllm:prompt_tokens_by_source_total"}  # which the recorded pages leave out
    shown = {OURS[name].name for name in asked & OURS.keys()}
    without = {"num_streamed_handovers", "peer_bytes", "num_missing_hooks"}
    assert {series.name for series in SERIES} - shown == without


def test_queries_have_labels_of_their_series_and_ask_for_the_rate_of_counters():
    for title, text in queries():
        names = set(re.findall(r"vllm:\w+", text)) & OURS.keys()
        labels = set(re.findall(r'(\w+)=~?"', text))
        labels |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", text) for name in group.split(",")}
        assert labels <= {label for name in names for label in OURS[name].labels} | LABELS, title
        for name in names:
            assert (f"rate({name}" in text) == (OURS[name].kind != "gauge"), title


NO_FAULT = ("cached", "whole_prompt", "other_connector", "ended")
"""Reasons for which nobody is to be woken: the last of the list."""


def test_alerts_ask_for_what_is_counted_and_name_what_to_do():
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    assert "alerts.yml" in yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["rule_files"]
    operators = yaml.safe_load((ROOT / "examples/kubernetes/monitoring/rules.yaml").read_text())
    assert operators["spec"] == {"groups": [group]}, "its first lines say how to bring it up to date"
    assert get_args(LocalReason)[-4:] == NO_FAULT
    results, of_router = {result for result, _ in PROMPT_ENDS}, Metrics(EnginePool(["http://p:1"], ["http://d:1"]))
    for way in ("serial", "at_once", "decode_only"):
        of_router.decode_legs.labels(way)
    page_of_router = of_router.text().decode()
    asked_for = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    floored = {name: text for name, text in asked_for.items() if ">= 10" in text}
    for name, text in floored.items():  # few prompts raise an alert, too
        assert asked_for[f"{name}ForAnHour"] == text.replace("[10m]", "[1h]").replace(">= 10", "> 0")
    assert len(floored) == 2
    for rule in group["rules"]:
        text = " ".join(rule["expr"].split())
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert f"\n### {rule['alert']}\n" in (ROOT / page).read_text() and anchor == rule["alert"].lower()
        if series := re.findall(r"kvferry_router_\w+", text):
            ways = [f'how="{way}"' for ways in re.findall(r'how=~?"(.*?)"', text) for way in ways.split("|")]
            assert "vllm:" not in text and all(name in page_of_router for name in (*series, *ways))
            continue
        assert {*re.findall(r"vllm:\w+", text)} == {"vllm:kvferry_prompts_total"} and text.count("(") == text.count(")")
        assert {*re.findall(r'(\w+)(?:=~|!~|=|!=)"', text)} == {"result", "reason"}
        assert {*re.findall(r'reason!~"(.*?)"', text)} == {"|".join(NO_FAULT)}
        asked = {each for group in re.findall(r'result=~?"(.*?)"', text) for each in group.split("|")}
        assert asked <= results - {"plain"} and "loaded" in asked
    assert "|".join(NO_FAULT) in DASHBOARD.read_text()
