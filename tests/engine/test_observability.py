"""Metrics and traces of real engines: in a real Prometheus, and at a real OTLP receiver."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvferry.transport.tracing import open_tracer
from tests.support.engines import ServerGroup
from tests.support.monitored import PROMETHEUS, Prometheus, queries
from tests.support.served import complete, eventually, prefill_leg, prompt
from tests.support.server import Server, metric_sum
from tests.support.spans import Receiver, receiver

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
"""Also for engines of a server of processes, which has the environment of an earlier test."""
EMPTY = {
    "Prompts that were not loaded",
    "Failed and retried",
    "Plane changes and stale reads",
    "Refused messages and connections",
}
"""Panels of which a query may have no result, because nothing of the kind has happened."""


def level(server: Server, name: str, **labels: str) -> float | None:
    return metric_sum(server.metrics(), f"vllm:kvferry_{name}", **labels)


def traced(otlp: Receiver, router: Server, ids: list[int]) -> str:
    """A request whose client begins its trace; the id of the trace."""
    tracer = open_tracer(otlp.url)
    assert tracer is not None
    span = tracer.begin("request")
    body = {"model": "model", "prompt": ids, "max_tokens": 4, "temperature": 0}
    router.post("/v1/completions", body, headers=span.headers)
    span.end()
    tracer.close()
    return span.headers["traceparent"].split("-")[1]


def by_name(otlp: Receiver, trace: str) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for span in otlp.spans():
        if span["trace"] == trace:
            found[span["name"]].append(span)
    return found


def test_levels_traces_and_the_dashboard(
    group: ServerGroup, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (HTTP | {"OTEL_SERVICE_NAME": "client"}).items():
        monkeypatch.setenv(name, value)
    with receiver() as otlp:
        prefill, decode = (
            group.engine(
                name, model, arguments=["--otlp-traces-endpoint", otlp.url],
                environment=HTTP | {"OTEL_SERVICE_NAME": name, "OTEL_BSP_SCHEDULE_DELAY": "200"},
            )
            for name in ("prefill", "decode")
        )  # fmt: skip
        group.wait_ready()
        router = group.router(
            prefill, decode, arguments=["--otlp-traces-endpoint", otlp.url],
            environment=HTTP | {"OTEL_SERVICE_NAME": "router", "OTEL_BSP_SCHEDULE_DELAY": "200"},
        )  # fmt: skip
        prometheus = None
        if PROMETHEUS is not None:
            prometheus = Prometheus(group, tmp_path, {"prefill": prefill, "decode": decode})
            eventually(prometheus.ready, "Prometheus is ready")

        levels_follow_a_lease(prefill, decode)
        one_trace_of_client_router_and_engines(otlp, router)
        if prometheus is not None:
            every_query_of_the_dashboard_has_a_result(prometheus, router, prefill)


def levels_follow_a_lease(prefill: Server, decode: Server) -> None:
    ids = prompt(200, 1)
    params = prefill_leg(prefill, ids)
    eventually(lambda: level(prefill, "leases") == 1, "the lease is shown")
    assert level(prefill, "lease_blocks") == -(-200 // 32)
    complete(decode, ids, kv_transfer_params=params)
    eventually(lambda: level(prefill, "leases") == 0, "an idle P shows no lease")
    assert level(prefill, "lease_blocks") == 0 and level(decode, "requests", stage="loading") == 0
    held = level(prefill, "lease_block_seconds_total")
    assert held is not None and held > 0
    eventually(
        lambda: level(decode, "peer_handovers_total", result="done") == 1 or not complete(decode, [7], max_tokens=1),
        "D counts the hand-over, with a step",
    )
    complete(decode, prompt(200, 21), kv_transfer_params=prefill_leg(prefill, prompt(200, 22)))
    counts = {reason: level(decode, "prompts_total", reason=reason) for reason in ("", "other_prompt", "cached")}
    assert counts == {"": 1, "other_prompt": 1, "cached": 0}, "on the page once the answers have ended"


def one_trace_of_client_router_and_engines(otlp: Receiver, router: Server) -> None:
    first, second = (traced(otlp, router, prompt(200, seed)) for seed in (2, 3))
    whole = {"kvferry.lease", "kvferry.handover", "llm_request", "request", "kvferry.request"}

    def complete_trace(trace: str) -> bool:
        spans = by_name(otlp, trace)
        return whole <= spans.keys() and len(spans["llm_request"]) == 2

    eventually(lambda: complete_trace(first) and complete_trace(second), "all spans have arrived")
    spans = by_name(otlp, first)
    (client,), (request,) = spans["request"], spans["kvferry.request"]
    (lease,), (handover,) = spans["kvferry.lease"], spans["kvferry.handover"]
    parents = [span["parent"] for span in (request, lease, handover)]
    assert parents == [client["id"], request["id"], request["id"]]
    assert [span["service"] for span in (client, request, lease, handover)] == ["client", "router", "prefill", "decode"]
    engines = {span["service"]: span["parent"] for span in spans["llm_request"]}
    assert engines == dict.fromkeys(("prefill", "decode"), request["id"])
    assert not (lease["error"] or handover["error"]) and handover["attributes"]["kvferry.tokens"] in ("199", "200")
    assert client["begin"] < request["begin"] < lease["begin"] < handover["begin"] < handover["end"] < client["end"]


def every_query_of_the_dashboard_has_a_result(prometheus: Prometheus, router: Server, prefill: Server) -> None:
    for seed in range(4, 10):
        complete(router, prompt(150, seed))
    eventually(lambda: prometheus.value('vllm:kvferry_tokens_total{role="decode"}') > 800, "the tokens are scraped")
    eventually(lambda: prometheus.value("vllm:kvferry_leases") == 0, "no lease is held")
    assert len(list(queries())) > 20

    seeds = itertools.count(100)

    def empty() -> set[str]:
        """After one more hand-over: a rate is above 0 only if a series grows between two scrapes."""
        complete(router, prompt(150, next(seeds)))
        return {title for title, text in queries() if not prometheus.query(text)}

    eventually(lambda: empty() <= EMPTY, "every query has a result")
    eventually(lambda: prometheus.value("vllm:kvferry_leases") == 0, "no lease is held")
    prefill_leg(prefill, prompt(100, 20))
    eventually(lambda: prometheus.value("vllm:kvferry_leases") == 1, "the lease is scraped")
    before = prometheus.value("vllm:kvferry_lease_block_seconds_total")
    grown = lambda: prometheus.value("vllm:kvferry_lease_block_seconds_total") > before  # noqa: E731
    eventually(grown, "a held lease counts as time goes on")
