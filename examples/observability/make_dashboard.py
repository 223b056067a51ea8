"""Writes ``grafana/dashboards/kvferry.json``: the questions of an operator, each with panels that answer it.

python examples/observability/make_dashboard.py
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "grafana" / "dashboards" / "kvferry.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'model_name=~"$model", instance=~"$instance"'
"""Of which engines. ``instance`` is Prometheus' label for the address of a server."""
DONE = 'result="done"'
PANELS_IN_ROW, PANEL_HEIGHT, WIDTH = 3, 8, 24


class Panel(NamedTuple):
    """``queries``: by legend. In them ``name{...}`` stands for a series of KVFerry with the labels of ``WHERE``."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def series(name: str, more: str = "") -> str:
    """A series of the chosen engines."""
    return f"vllm:{name}{{{WHERE}{', ' + more if more else ''}}}"


def rate(name: str, more: str = "") -> str:
    return f"rate({series(name, more)}[$__rate_interval])"


def quantile(part: float) -> str:
    return f"histogram_quantile({part}, sum by (le, plane) ({rate('kvferry_handover_time_seconds_bucket')}))"


NO_FAULT = 'reason!~"cached|whole_prompt|other_connector|ended"'
"""D had these prompts, had to compute them, or their requests ended before."""
LOADED, NEEDED = 'result="loaded"', f'result=~"loaded|local|failed", {NO_FAULT}'
NOT_LOADED = 'result!="loaded"'
FROM_P = 'source="external_kv_transfer"'


def by_instance(name: str, more: str = "") -> str:
    return f"sum by (instance) ({rate(name, more)})"


ROWS: dict[str, list[Panel]] = {
    "Is it handed over?": [
        Panel(
            "Share of prompts from P", "percentunit",
            {"{{instance}}": f"{by_instance('kvferry_prompts_total', LOADED)} / "
             f"{by_instance('kvferry_prompts_total', NEEDED)}"},
            "Of the prompts of which the request names a P, less those that D had in its prefix cache.",
        ),
        Panel(
            "Share of prompt tokens from P", "percentunit",
            {"{{instance}}": f"{by_instance('prompt_tokens_by_source_total', FROM_P)} / "
             f"{by_instance('prompt_tokens_by_source_total')} and on (instance) "
             f"{by_instance('kvferry_prompts_total', NEEDED)} > 0"},
            "Of all prompt tokens of an engine to which prompts are handed over.",
        ),
        Panel(
            "Prompts that were not loaded", "ops",
            {"{{instance}} {{result}}: {{reason}}": "sum by (instance, result, reason) "
             f"({rate('kvferry_prompts_total', NOT_LOADED)}) > 0"},
            "docs/troubleshooting.md says what to do about each reason.",
        ),
    ],
    "Are prompts handed over, and how fast?": [
        Panel(
            "Hand-overs", "ops",
            {"{{plane}}": f"sum by (plane) ({rate('kvferry_handover_time_seconds_count')})"},
            "Each rank of D counts.",
        ),
        Panel("Time of a hand-over", "s", {"{{plane}} median": quantile(0.5), "{{plane}} 95 %": quantile(0.95)}),
        Panel("Bytes", "Bps", {"{{plane}}": f"sum by (plane) ({rate('kvferry_bytes_transferred_sum')})"}),
        Panel(
            "Failed and retried", "ops",
            {
                "failed: {{reason}}": f"sum by (reason) ({rate('kvferry_num_failed_handovers_total')}) > 0",
                "retried: {{reason}}": f"sum by (reason) ({rate('kvferry_num_retries_total')}) > 0",
            },
            "D prefills the prompt of a failed hand-over, or its request fails: kv_load_failure_policy.",
        ),
        Panel("Tokens loaded", "ops", {"{{plane}}": f"sum by (plane) ({rate('kvferry_tokens_total')})"}),
        Panel(
            "Prefixes of prompts", "ops",
            {"{{result}} {{reason}}": f"sum by (result, reason) ({rate('kvferry_prefix_reads_total')}) > 0"},
            "Of requests that name engines which have one, and of those that other engines read here (lent).",
        ),
        Panel(
            "Tokens of prefixes", "ops",
            {
                "read": f"sum({rate('kvferry_prefix_tokens_read_total')})",
                "read in vain": f"sum({rate('kvferry_prefix_tokens_wasted_total')})",
            },
        ),
        Panel(
            "Requests that wait for a source", "short",
            {"{{instance}}": f"sum by (instance) ({rate('kvferry_prefix_wait_seconds_total')}) > 0"},
        ),
        Panel(
            "Plane changes and stale reads", "ops",
            {
                "left {{plane}}": f"sum by (plane) ({rate('kvferry_num_plane_changes_total')})",
                "stale reads": f"sum({rate('kvferry_num_stale_reads_total')})",
            },
        ),
    ],
    "Do leases hold P's blocks for too long?": [
        Panel("Leases held", "short", {"{{instance}}": f"sum by (instance) ({series('kvferry_leases')})"}),
        Panel(
            "Blocks held by leases", "short",
            {
                "{{instance}} now": f"sum by (instance) ({series('kvferry_lease_blocks')})",
                "{{instance}} mean": f"sum by (instance) ({rate('kvferry_lease_block_seconds_total')})",
            },
            "Block-seconds in each second are the mean number of blocks that were held.",
        ),
        Panel(
            "Leases that ended", "ops",
            {
                "released": f"sum({rate('kvferry_num_released_leases_total')})",
                "{{reason}}": f"sum by (reason) ({rate('kvferry_num_expired_leases_total')})",
            },
        ),
        Panel(
            "Bytes sent", "Bps", {"while P {{when}}": f"sum by (when) ({rate('kvferry_bytes_sent_total')})"},
            "None where D reads P's memory itself.",
        ),
        Panel(
            "Reads that P sends", "short", {"{{instance}}": f"sum by (instance) ({series('kvferry_reads_sending')})"}
        ),
    ],
    "What do requests wait for?": [
        Panel("Requests on D by stage", "short", {"{{stage}}": f"sum by (stage) ({series('kvferry_requests')})"}),
        Panel(
            "Requests of vLLM", "short",
            {
                "{{instance}} running": f"sum by (instance) ({series('num_requests_running')})",
                "{{instance}} waiting": f"sum by (instance) ({series('num_requests_waiting')})",
            },
        ),
        Panel(
            "Steps that wait for loads", "percentunit",
            {"{{instance}}": f"sum by (instance) ({rate('kvferry_step_wait_seconds_total')})"},
            "Share of the time for which the engine's thread waits for loads inside steps.",
        ),
        Panel(
            "Transfer threads that cannot run", "percentunit",
            {"{{instance}}": f"sum by (instance) ({rate('kvferry_thread_delay_seconds_total')})"},
        ),
        Panel(
            "Blocks of D held for prompts under way", "short",
            {"{{instance}} mean": f"sum by (instance) ({rate('kvferry_streamed_block_seconds_total')})"},
        ),
    ],
    "Which peer?": [
        Panel(
            "Hand-overs by P engine", "ops",
            {
                "{{instance}} from {{peer}}: {{result}}": "sum by (instance, peer, result) "
                f"({rate('kvferry_peer_handovers_total')}) > 0"
            },
        ),
        Panel(
            "Mean time by P engine", "s",
            {
                "{{instance}} from {{peer}}": f"sum by (instance, peer) ({rate('kvferry_peer_seconds_total')}) / "
                f"sum by (instance, peer) ({rate('kvferry_peer_handovers_total', DONE)})"
            },
        ),
        Panel(
            "Refused messages and connections", "ops",
            {"{{instance}}: {{reason}}": f"sum by (instance, reason) ({rate('kvferry_num_dropped_messages_total')})"},
        ),
    ],
}  # fmt: skip


def panel(made: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel of Grafana that shows time series."""
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for place, (legend, query) in enumerate(made.queries.items())
    ]
    return {
        "id": number, "type": "timeseries", "title": made.title, "description": made.description, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH // PANELS_IN_ROW, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": made.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }  # fmt: skip


def variable(name: str, label: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    query = f"label_values(vllm:kvferry_leases, {label})"
    return {
        "name": name, "type": "query", "datasource": SOURCE,
        "query": {"query": query, "refId": name}, "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    numbers, y, panels = count(1), 0, []
    for title, made in ROWS.items():
        panels.append(
            {"id": next(numbers), "type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )  # fmt: skip
        y += 1
        for place, each in enumerate(made):
            row, column = divmod(place, PANELS_IN_ROW)
            panels.append(panel(each, next(numbers), column * WIDTH // PANELS_IN_ROW, y + row * PANEL_HEIGHT))
        y += -(-len(made) // PANELS_IN_ROW) * PANEL_HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": "kvferry", "title": "KVFerry", "tags": ["kvferry", "vllm"], "schemaVersion": 39, "version": 1,
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, variable("model", "model_name"), variable("instance", "instance")]},
        "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
