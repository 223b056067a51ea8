"""Records what docs/observability.md shows, of real engines: a trace for Jaeger, and a picture of Prometheus.

    python docs/record_observability.py [--seconds 90]

Needs what ``make install`` installs, and the commands ``prometheus`` and, for the picture, ``chromium``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

from kvferry.transport.tracing import open_tracer
from tests.support.monitored import Prometheus, queries
from tests.support.served import PatientServerGroup, complete, eventually, prefill_leg, prompt
from tests.support.server import Server
from tests.support.spans import Receiver, receiver
from tests.support.tiny_model import ModelSpec, build_model

FOLDER = Path(__file__).with_name("observability")
PROTOCOL = "http/protobuf"
SHOWN = ("Hand-overs", "Time of a hand-over", "Leases held", "Blocks held by leases")
"""The panels whose first query is in the picture."""


def jaeger(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A trace in the JSON that Jaeger's page reads ("JSON File"). Times are in microseconds from the trace's begin."""
    zero = min(span["begin"] for span in spans)
    services = {service: f"p{number}" for number, service in enumerate(sorted({span["service"] for span in spans}), 1)}
    made = [
        {
            "traceID": span["trace"], "spanID": span["id"], "operationName": span["name"],
            "processID": services[span["service"]],
            "references": [{"refType": "CHILD_OF", "traceID": span["trace"], "spanID": span["parent"]}]
            if span["parent"] else [],
            "startTime": 1_700_000_000_000_000 + (span["begin"] - zero) // 1000,
            "duration": (span["end"] - span["begin"]) // 1000,
            "tags": [{"key": key, "type": "string", "value": str(value)} for key, value in span["attributes"].items()],
            "logs": [],
        }
        for span in sorted(spans, key=lambda span: span["begin"])
    ]  # fmt: skip
    processes = {number: {"serviceName": service, "tags": []} for service, number in services.items()}
    return {"data": [{"traceID": spans[0]["trace"], "spans": made, "processes": processes}]}


def traced_request(otlp: Receiver, router: Server) -> list[dict[str, Any]]:
    """The spans of one request, the second of its kind: the router asks P and D at once."""
    tracer = open_tracer(otlp.url)
    assert tracer is not None
    span = tracer.begin("request")
    body = {"model": "model", "prompt": prompt(1500, 99), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    router.post("/v1/completions", body, headers=span.headers)
    span.end()
    tracer.close()
    trace = span.headers["traceparent"].split("-")[1]

    def found() -> list[dict[str, Any]]:
        return [each for each in otlp.spans() if each["trace"] == trace]

    wanted = {"kvferry.lease", "kvferry.handover", "kvferry.request"}
    eventually(lambda: wanted <= {each["name"] for each in found()}, "its spans arrive")
    time.sleep(3)
    return found()


def work(router: Server, prefill: Server, decode: Server, seconds: float) -> None:
    """Prompts of 100 to 2000 tokens, three at a time; some leases wait for their D."""
    end, rng = time.monotonic() + seconds, random.Random(1)

    def one(seed: int) -> None:
        ids = prompt(rng.randrange(100, 2000), seed)
        if seed % 5:
            complete(router, ids, max_tokens=16)
        else:
            params = prefill_leg(prefill, ids)
            time.sleep(3)
            complete(decode, ids, kv_transfer_params=params)

    with ThreadPoolExecutor(3) as pool:
        seed = 1000
        while time.monotonic() < end:
            list(pool.map(one, range(seed, seed + 6)))
            seed += 6


def picture(prometheus: Prometheus, target: Path) -> None:
    """Prometheus' own page with the graphs of some panels, drawn by a browser."""
    browser = shutil.which("chromium")
    if browser is None:
        print("no picture: chromium is not installed")
        return
    texts = {title: text for title, text in reversed(list(queries()))}
    form: dict[str, str] = {}
    for number, title in enumerate(SHOWN):
        form |= {f"g{number}.expr": texts[title], f"g{number}.tab": "0", f"g{number}.range_input": "2m"}
    url = f"{prometheus.server.url}/graph?{urllib.parse.urlencode(form)}"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,2660"]
        options += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"--screenshot={target}"]
        subprocess.run([browser, *options, url], check=True, timeout=180, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=90.0)
    seconds = parser.parse_args().seconds
    os.environ |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": PROTOCOL, "OTEL_SERVICE_NAME": "client"}
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, receiver() as otlp, PatientServerGroup(Path(name) / "logs") as group:
        model = build_model(Path(name) / "model", ModelSpec(layers=4))
        prefill, decode = (
            group.engine(
                role, model, arguments=["--otlp-traces-endpoint", otlp.url],
                environment={"OTEL_SERVICE_NAME": role, "OTEL_BSP_SCHEDULE_DELAY": "200"},
            )
            for role in ("prefill", "decode")
        )  # fmt: skip
        group.wait_ready()
        router = group.router(
            prefill, decode, arguments=["--otlp-traces-endpoint", otlp.url],
            environment={"OTEL_SERVICE_NAME": "router", "OTEL_BSP_SCHEDULE_DELAY": "200"},
        )  # fmt: skip
        prometheus = Prometheus(group, Path(name), {"prefill": prefill, "decode": decode})
        eventually(prometheus.ready, "Prometheus is ready")
        complete(router, prompt(300, 1))
        spans = traced_request(otlp, router)
        (FOLDER / "trace.json").write_text(json.dumps(jaeger(spans), indent=1) + "\n")
        work(router, prefill, decode, seconds)
        picture(prometheus, FOLDER / "prometheus.png")


if __name__ == "__main__":
    main()
