"""D's time to first token where its store has half of the prompt, and where it has nothing of it.

    sudo .venv/bin/python benchmarks/engines/store_beside.py [--json FILE] [--rate 0.125]

Two engines on the CPU in two network namespaces, so that P is on another host, which sends at most ``--rate`` GB/s
(tc's token bucket filter; no delay is added). D has KVFerryConnector and OffloadingConnector below MultiConnector. vLLM
refuses to copy for an engine on the CPU; ``tests/support/host_store.py`` does, in D's steps.

In a turn D computes as many tokens as half of the prompt has, its store keeps them, and its prefix cache is emptied.
They are the first half of the prompt, or others. Then P computes the prompt and the client asks D, from when the time
counts. Both turns of a pair are made in alternating order. D's counters must say that each has loaded what it should.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines import shaped_link
from benchmarks.engines.engine_pair import EXECUTOR, OURS, Words, body, prefill_leg
from benchmarks.harness import pages, report
from examples.two_node.run_netns import enter, two_hosts
from tests.support.engines import transfer_config
from tests.support.pd_client import METRICS, stream
from tests.support.served import ForkedServerGroup
from tests.support.server import EngineError, Server, metric_sum
from tests.support.tiny_model import ModelSpec, build_model

BLOCK, TOKENS, WARM_UPS, PAIRS, KEEP_SECONDS = 32, 2048, 2, 10, 60.0
HOST_STORE = {"spec_name": "HostStoreSpec", "spec_module_path": "tests.support.host_store", "cpu_bytes_to_use": 2 << 30}
COUNTERS = {
    "p": METRICS[OURS].bytes_sum, "failed": METRICS[OURS].failed,
    "store": "vllm:kv_offload_load_bytes_total", "kept": "vllm:kv_offload_store_bytes_total",
}  # fmt: skip
"""Of D: loads that failed, and bytes that P sent, that the store loaded, and that it keeps."""


def counts(decode: Server) -> dict[str, float]:
    decode.post("/v1/completions", body([7]))  # with a step, what earlier ones counted reaches the front end
    samples = decode.metrics()
    return {name: metric_sum(samples, metric) or 0.0 for name, metric in COUNTERS.items()}


def grown(decode: Server, before: dict[str, float], kept: int) -> dict[str, float]:
    """What they grew by when the store had kept so many bytes; D's prefix cache is empty then. Raises EngineError."""
    deadline = time.monotonic() + KEEP_SECONDS
    while time.monotonic() < deadline:
        more = {name: value - before[name] for name, value in counts(decode).items()}
        if more["kept"] >= kept and decode.post("/reset_prefix_cache")["success"]:
            return more
        time.sleep(0.05)
    raise EngineError(f"after {KEEP_SECONDS:g} s D's store has not kept {kept} bytes, or blocks are held: {more}")


def turn(prefill: Server, decode: Server, prompt: list[int], beginning: list[int], weight: int) -> dict[str, float]:
    """``beginning``: what the store has. ``weight``: bytes of KV per token. Raises EngineError: other loads."""
    before, whole = counts(decode), len(prompt) * weight
    decode.post("/v1/completions", body(beginning))
    grown(decode, before, len(beginning) * weight)
    request = body(prompt)
    handed = request | {"kv_transfer_params": prefill_leg(prefill, request)}
    before, link = counts(decode), shaped_link.received_bytes()
    sample = {"ttft_ms": stream(decode.url, handed).ttft * 1e3}
    sample["link_mib"] = (shaped_link.received_bytes() - link) / 2**20
    stored = len(beginning) * weight if prompt[: len(beginning)] == beginning else 0
    more = grown(decode, before, whole - stored)
    if more["failed"] or more["store"] != stored or not 0 <= whole - stored - more["p"] <= BLOCK * weight:
        raise EngineError(f"the store should load {stored} of {whole} bytes, and P the rest: {more}")
    return sample | {"store_mib": more["store"] / 2**20, "p_mib": more["p"] / 2**20}


def measured(prefill: Server, decode: Server, rate: float, weight: int) -> dict[str, Any]:
    words, half = Words(1, ModelSpec.vocabulary), TOKENS // 2
    found: dict[str, list[dict[str, float]]] = {"nothing": [], "half": []}
    for number in range(-WARM_UPS, PAIRS):
        for has in found if number % 2 else reversed(found):
            prompt = words(TOKENS)
            sample = turn(prefill, decode, prompt, prompt[:half] if has == "half" else words(half), weight)
            report.line({"pair": number, "has": has, **sample})
            found[has] += [sample] * (number >= 0)
    rows = [
        {"has": has, "each_ms": [round(sample["ttft_ms"], 1) for sample in samples]}
        | {name: round(statistics.median(sample[name] for sample in samples), 1) for name in samples[0]}
        for has, samples in found.items()
    ]
    ratios = [b["ttft_ms"] / a["ttft_ms"] for a, b in zip(found["nothing"], found["half"], strict=True)]
    figures = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    report.line(figures)
    shape = {"pairs": PAIRS, "tokens": TOKENS, "gb_per_s": rate, "kv_kib_per_token": weight / 1024}
    return {"rows": rows, "figures": figures, **shape}


def run(folder: Path, rate: float) -> dict[str, Any]:
    """Raises EngineError."""
    model = build_model(folder / "model")
    with two_hosts() as (p_name, p_address, d_name, d_address), ForkedServerGroup(folder / "logs") as group:
        enter(d_name)
        shaped_link.shape(p_name, rate)
        options: dict[str, Any] = {
            "block_size": BLOCK, "max_model_len": TOKENS + 64, "kv_bytes": False,
            "arguments": ["--distributed-executor-backend", EXECUTOR],
            "environment": {"KVFERRY_ALLOWED_PEERS": f"{p_address},{d_address}"},
        }  # fmt: skip
        of_p, of_d = ({"plane": "tcp", "side_channel_host": address} for address in (p_address, d_address))
        prefill = group.engine("prefill", model, extra=of_p, host=p_address, netns=p_name, **options)
        children = [transfer_config(OURS, of_d), transfer_config("OffloadingConnector", HOST_STORE)]
        options |= {"connector": "MultiConnector", "extra": {"connectors": children}}
        decode = group.engine("decode", model, host=d_address, netns=d_name, **options)
        group.wait_ready()
        return measured(prefill, decode, rate, ModelSpec().kv_bytes_per_token)


def main() -> int:
    parser = report.options(__doc__)
    parser.add_argument("--rate", type=float, default=0.125, help="GB/s of the link")
    args = parser.parse_args()
    if reason := shaped_link.why_not():
        print(f"store_beside.py {reason}")
        return 2
    columns, folder = pages.OF["store-beside"].columns, report.ROOT / ".bench" / "store_beside"
    return report.finish(args.json, lambda: run(folder, args.rate), lambda it: print(pages.table(it["rows"], columns)))


if __name__ == "__main__":
    sys.exit(main())
