"""The Grafana dashboard and what provisions it: made by its script, and of series that engines export."""

from __future__ import annotations

import json
import re
import runpy

import pytest
import yaml

from kvferry.cli.top.figures import samples
from kvferry.connector.wire.series import PREFIX, SERIES
from tests.support.monitored import DASHBOARD, EXAMPLES, queries
from tests.top.pages import recorded

SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
OURS = {PREFIX + series.name + suffix: series for series in SERIES for suffix in SUFFIXES[series.kind]}
LABELS = {"model_name", "instance", "le"}
"""Those that every series has, and that of the buckets of a histogram."""
NAME = re.compile(r"vllm:\w+")


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


def test_the_file_is_what_its_script_makes(dashboard):
    script = runpy.run_path(str(EXAMPLES / "make_dashboard.py"))
    assert script["dashboard"]() == dashboard, "run python examples/observability/make_dashboard.py"


def test_every_series_of_a_query_exists():
    of_vllm = {sample.name for page in ("prefill_2", "decode_2") for sample in samples(recorded(page))}
    asked = {name for _, text in queries() for name in NAME.findall(text)}
    assert asked <= OURS.keys() | of_vllm and len(asked & OURS.keys()) > 20


def test_every_series_of_ours_is_in_a_panel():
    asked = {name for _, text in queries() for name in NAME.findall(text)}
    shown = {series.name for name, series in OURS.items() if name in asked}
    assert {series.name for series in SERIES} - shown == {"num_streamed_handovers", "peer_bytes", "num_missing_hooks"}


def test_labels_of_a_query_are_those_of_its_series():
    for title, text in queries():
        labels = set(re.findall(r'(\w+)=~?"', text))
        labels |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", text) for name in group.split(",")}
        known = {label for name in NAME.findall(text) for label in (OURS[name].labels if name in OURS else ())}
        assert labels <= known | LABELS, title


def test_counters_are_asked_for_their_rate_and_gauges_are_not():
    for title, text in queries():
        for name in set(NAME.findall(text)) & OURS.keys():
            counts = OURS[name].kind != "gauge"
            assert (f"rate({name}" in text) == counts, title


def test_panels_have_numbers_of_their_own_places_and_legends(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in panels:
        targets = panel.get("targets", [])
        assert panel["type"] == "row" or targets, panel["title"]
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"]


def test_variables_of_the_queries_are_declared(dashboard):
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == declared


def test_what_provisions_grafana_fits_together():
    provisioning = EXAMPLES / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvferry.yml").read_text())["providers"]
    assert (source["type"], provider["type"]) == ("prometheus", "file") and provider["options"]["path"].startswith("/")
    scraped = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert [each["labels"]["role"] for each in scraped[0]["static_configs"]] == ["prefill", "decode"]
