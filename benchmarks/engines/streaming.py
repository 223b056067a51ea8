"""What a client waits for behind a prefill/decode pair, with both legs one after the other and at once; and with NIXL.

    python benchmarks/engines/streaming.py [--json FILE] [--planes tcp ucx cuda_ipc] [--cells 2000 8000]
    sudo .venv/bin/python benchmarks/engines/streaming.py --device cpu [--json FILE] [--cells 2000@1.25 2000@3]
    sudo .venv/bin/python benchmarks/engines/streaming.py --device cpu --small        # for CI: no figure holds

On two GPUs of one host (``--gpus 0 0``: both on one, which they share in time): CUDA graphs, asynchronous scheduling,
the form of Llama-8B with made-up weights. ``tcp`` goes over loopback. Over ``cuda_ipc`` D reads P's pages when the
prompt is computed, so nothing leaves before. P's steps are timed by CUDA events; the bytes at D are those in its pages,
noted by KVFerry's transfer thread on D; of NIXL they are not known.

On the CPU: two network namespaces joined by a veth pair whose ends send at most so many GB/s (tc's token bucket filter;
no delay is added): ``TOKENS@RATE`` is a cell. P is in one namespace; D, the router and the client are in the other. The
model is small and its KV is not, so that P computes a prompt in longer than the faster links take. The executor is
``uni``: with ``mp`` a D that waits takes a core from P. The bytes at D are those that had come over the link. Where
there are two cores, the thread of P's engine, which stands for a device, has one of its own.

Ways, in turn, each with a prompt of its own: P alone (the client asks P, and P decodes); both legs one after the other;
both legs at once, where P offers it. ``--variant NAME=JSON`` adds an engine pair with these settings of KVFerry.

Columns, medians over the turns: the client's time to the first and to the second token; P's time from the begin of the
prompt's first step to the end of its last one, and its ratio to that of P alone in the same turn, by the clock and by
the time of P's engine thread on its core; the share of the bytes at D when P's last step ended; for how long bytes
came, of which 0.5 % at each end do not count. ``curves``: of the longest prompt, the bytes at D in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import httpx

from benchmarks.engines import shaped_link, streaming_pair
from benchmarks.engines.engine_pair import EXECUTOR, LLAMA_8B, OURS, servers
from benchmarks.engines.streaming_pair import OURS_NAME, PULL_NAME, PUSH_NAME, Engines
from benchmarks.harness import pages, report
from examples.two_node.run_netns import enter, two_hosts
from tests.support.engines import ServerGroup
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec, build_model

Hosts = tuple[str, str, str, str]
Cell = tuple[int, float | None]
"""Tokens of a prompt, GB/s of the link where there is one."""
PLANS: dict[str, dict[str, Any]] = {
    "cuda": {
        "planes": ["tcp", "ucx", "cuda_ipc"], "cells": [(128, None), (2000, None), (8000, None)], "chunk": 2048,
        "kv_gib": 24, "seconds": 60.0, "least": 3, "most": 15,
    },
    "cpu": {
        "planes": ["tcp"], "cells": [(128, 1.25), (2000, 0.125), (2000, 1.25), (2000, 3.0), (8000, 1.25)],
        "chunk": 256, "layers": 8, "seconds": 60.0, "least": 3, "most": 15,
    },
}  # fmt: skip
"""At 0.125 GB/s, 2000 tokens take longer over the link than to compute."""
SMALL = {"cells": [(400, 1.25)], "chunk": 128, "layers": 4, "least": 2, "most": 2}


def cell(text: str) -> Cell:
    tokens, at, rate = text.partition("@")
    found = int(tokens), float(rate) if at else None
    if found[0] <= 0 or (found[1] is not None and found[1] <= 0):
        raise ValueError
    return found


def model_spec(args: argparse.Namespace) -> ModelSpec:
    """P's first token must be one of the made-up tokenizer, so a model has its vocabulary."""
    if args.device == "cuda":
        return replace(LLAMA_8B, text_tokens=True)
    return ModelSpec(layers=args.layers, max_tokens=max(tokens for tokens, _ in args.cells) + 64, text_tokens=True)


def pairs_of(args: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Connector, name and settings of each pair."""
    pairs: list[tuple[str, str, dict[str, Any]]] = [
        (OURS, f"{OURS_NAME}, {plane}", {"plane": plane}) for plane in args.planes
    ]
    for name, _, settings in (variant.partition("=") for variant in args.variant):
        pairs.append((OURS, f"{OURS_NAME}, {name}", {"plane": args.planes[0]} | json.loads(settings)))
    nixl = {"num_threads": 1} if args.device == "cpu" else {}
    rivals = [("NixlPullConnector", PULL_NAME, nixl), ("NixlPushConnector", PUSH_NAME, nixl)]
    return pairs + (rivals if args.nixl else [])


def start_engine(
    group: ServerGroup, role: str, connector: str, extra: dict[str, Any], hosts: Hosts | None, args: argparse.Namespace
) -> Server:
    spec = model_spec(args)
    arguments = ["--max-num-batched-tokens", str(args.chunk)]
    arguments += ["--worker-extension-cls", "benchmarks.engines.step_probe.StepProbe"]
    environment = {}
    options: dict[str, Any] = {"max_model_len": max(tokens for tokens, _ in args.cells) + 64}
    if args.device == "cuda":
        model = build_model(args.folder / "model", spec, weights=False)
        options |= {"gpus": (args.gpus[role == "decode"],), "block_size": 16, "kv_cache_bytes": args.kv_gib << 30}
        arguments += ["--load-format", "dummy"]
    else:
        model = build_model(args.folder / f"model-{args.layers}", spec)
        arguments += ["--distributed-executor-backend", EXECUTOR]
        kv_gib = -(-2 * spec.max_tokens * spec.kv_bytes_per_token // 2**30)  # for two prompts
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
    if hosts is not None:
        p_name, p_address, d_name, d_address = hosts
        # D in its namespace by name, although this process is there: UCX finds network devices by a /sys of its own.
        netns, address = (p_name, p_address) if role == "prefill" else (d_name, d_address)
        options |= {"host": address, "netns": netns}
        if connector == OURS:
            environment["KVFERRY_ALLOWED_PEERS"] = f"{p_address},{d_address}"
            extra = {"side_channel_host": address} | extra
        else:  # shared memory would go round the link
            environment |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": shaped_link.DEVICE}
    return group.engine(
        role, model, connector=connector, extra=extra, dtype=spec.dtype, kv_bytes=False, arguments=arguments,
        environment=environment, **options,
    )  # fmt: skip


@contextmanager
def started(
    args: argparse.Namespace, hosts: Hosts | None, connector: str, name: str, extra: dict[str, Any]
) -> Iterator[Engines]:
    """A pair and its routers, up, warm and on their cores."""
    with streaming_pair.spare_core() as core, servers(args, name.replace(", ", "-").replace(" ", "-")) as group:
        prefill, decode = (start_engine(group, role, connector, extra, hosts, args) for role in ("prefill", "decode"))
        group.wait_ready(args.start_seconds)
        engines = Engines(name, prefill, decode, nullcontext if hosts is None else shaped_link.LinkBytes)
        streaming_pair.open_ways(group, engines, "127.0.0.1" if hosts is None else hosts[3])
        (engine_thread,) = prefill.rpc("probe_watch")
        if core is not None:
            os.sched_setaffinity(int(engine_thread), [core])
        yield engines


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all pairs that start; which do not is in ``left_out``. Raises EngineError: KVFerry on the CPU."""
    rng = random.Random(1)
    result: dict[str, Any] = {"rows": [], "curves": [], "left_out": [], "chunk": args.chunk}
    result["gpus_of_p_and_d"], result["load_before"] = list(args.gpus), round(os.getloadavg()[0], 1)
    result["kv_kib_per_token"] = model_spec(args).kv_bytes_per_token / 1024
    with ExitStack() as stack:
        hosts = None
        if args.device == "cpu":
            hosts = stack.enter_context(two_hosts())
            enter(hosts[2])
        for connector, name, extra in pairs_of(args):
            try:
                with started(args, hosts, connector, name, extra) as engines:
                    for number, (tokens, rate) in enumerate(args.cells):
                        if hosts is not None and rate is not None:
                            for host in (hosts[0], hosts[2]):
                                shaped_link.shape(host, rate)
                        cold = number == 0 or args.device == "cuda"  # a GPU engine compiles and tunes for each length
                        found = streaming_pair.turns(
                            engines, tokens, rng, least=args.least, most=args.most, seconds=args.seconds,
                            warm_ups=2 if cold else 0,
                        )  # fmt: skip
                        result["rows"] += streaming_pair.rows_of(found, name=name, tokens=tokens, gb_per_s=rate)
                        if tokens == max(tokens for tokens, _ in args.cells):
                            result["curves"] += streaming_pair.curves_of(found, name=name, tokens=tokens)
                        print(f"{name}, {tokens} tokens, {rate or '-'} GB/s: {len(found)} turns", flush=True)
                        report.save(args.json, result | {"versions": report.versions()})  # others take as long again
            except (EngineError, httpx.HTTPError) as error:  # such as a plane that this machine does not have
                if connector == OURS and args.device == "cpu":
                    raise EngineError(str(error)) from error
                result["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
                print(f"left out: {result['left_out'][-1]}", flush=True)
    if not result["rows"]:
        raise EngineError("no pair could be measured")
    return result


def arguments() -> argparse.ArgumentParser:
    parser = report.engine_options(__doc__, "streaming")
    parser.add_argument("--planes", nargs="+", help="of KVFerry: tcp, ucx and cuda_ipc, on the CPU tcp")
    parser.add_argument("--cells", "--tokens", type=cell, nargs="+", metavar="TOKENS[@RATE]", help="GB/s on the CPU")
    parser.add_argument("--chunk", type=int, help="tokens that an engine computes in one step: 2048, on the CPU 256")
    parser.add_argument("--layers", type=int, help="on the CPU")
    parser.add_argument("--seconds", type=float, help="of a cell and a pair, 3 turns at least")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=JSON", help="settings of KVFerry")
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--small", action="store_true", help="on the CPU: few short prompts, one rate, no NIXL")
    return parser


def main() -> int:
    args = arguments().parse_args()
    if args.small:
        args.nixl = False
        report.fill_in(args, SMALL)
    report.fill_in(args, PLANS[args.device])
    if args.device == "cpu" and (reason := shaped_link.why_not()):
        print(f"streaming.py {reason}")
        return 2
    return report.finish(args.json, lambda: run(args), show)


def show(result: dict[str, Any]) -> None:
    print(pages.table(pages.streamed(result["rows"]), pages.OF["gpu-streaming"].columns))


if __name__ == "__main__":
    sys.exit(main())
