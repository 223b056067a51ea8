"""What a client waits for behind a prefill/decode pair on two hosts whose link is slow, with KVFerry and with NIXL.

    sudo .venv/bin/python benchmarks/streaming.py [--json FILE] [--plot PNG] [--cells 2000@1.25 2000@3]
    sudo .venv/bin/python benchmarks/streaming.py --small                                   # for CI: no figure holds

Two network namespaces joined by a veth pair whose ends send at most so many GB/s (tc's token bucket filter; no delay is
added): ``TOKENS@RATE`` is a cell. P is in one namespace; D, the router and the client are in the other. The model is
small and its KV is not, so that P computes a prompt in longer than the faster links take, by ``--chunk`` tokens in a
step. Both are vLLM engines on the CPU of this machine.

P's forward runs on its engine's thread, which stands for a device here. A device shares nothing with the threads that
move bytes, so that thread gets a core of its own, and all else shares the others: P's transfer thread, D, the routers
and the client. With ``--no-pin`` all share all cores. The executor is ``uni``: with ``mp``, vLLM's default on the CPU,
an engine core and its worker spin while they wait for each other (``SpinCondition.wait`` of ``shm_broadcast.py``, for
1 s after the last message), so a D that waits takes a core from P.

Ways, in turn, each with a prompt of its own: P alone (the client asks P, and P decodes); both legs one after the other;
both legs at once, where P offers it. ``--variant NAME=JSON`` adds an engine pair with these settings of KVFerry, for
both engines.

Columns, medians over the turns: the client's time to the first token, how much later than that of P alone in the same
turn, and to the second; P's time from the begin of the prompt's first step to the end of its last one, and the median
over the turns of its ratio to that of P alone: by the clock, and by the time of P's engine thread on its core, which
others on the machine change less; the share of the bytes that had come over the link when P's last step ended, from the
counters of D's end of it; for how long bytes came, of which 0.5 % at each end do not count. A second table has the
steps that computed nothing, and the time on a core by thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import httpx
import report
import shaped_link
import streaming_figures
import streaming_tables
from streaming_pair import (
    OURS,
    OURS_NAME,
    PULL,
    PULL_NAME,
    PUSH,
    PUSH_NAME,
    Engines,
    Patience,
    open_ways,
    own_cores,
    turns,
)

from examples.two_node.run_netns import enter, two_hosts
from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec, build_model

Hosts = tuple[str, str, str, str]
Cell = tuple[int, float]
"""Tokens of a prompt, GB/s of the link."""
CELLS: list[Cell] = [(128, 1.25), (2000, 0.125), (2000, 1.25), (2000, 3.0), (8000, 1.25)]
"""At 0.125 GB/s, 2000 tokens take longer over the link than to compute."""
TIMELINE: Cell = (2000, 1.25)
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""``uni``, which vLLM has by default for one GPU, named so that vLLM does not take ``mp`` for it on the CPU."""


def cell_of(text: str) -> Cell:
    tokens, _, rate = text.partition("@")
    try:
        cell = int(tokens), float(rate)
    except ValueError:
        cell = 0, 0.0
    if min(cell) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no cell, expected TOKENS@RATE with GB/s, such as 2000@1.25")
    return cell


@contextmanager
def started(
    args: argparse.Namespace, hosts: Hosts, connector: str, name: str, extra: dict[str, Any]
) -> Iterator[tuple[Engines, str]]:
    """A pair and its routers, up, warm and on their cores; and which these are."""
    p_name, p_address, d_name, d_address = hosts
    spec = model_spec(args)
    kv_gib = -(-2 * spec.max_tokens * spec.kv_bytes_per_token // 2**30)  # for two prompts
    model = build_model(args.folder / f"model-{args.layers}", spec)
    with ServerGroup(args.folder / "logs" / name.replace(" ", "-")) as group:

        def engine(role: str, address: str, netns: str) -> Server:
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
                "PYTHONPATH": python_path(Path(__file__).resolve().parent),
            }
            settings = dict(extra)
            if connector == OURS:
                environment["KVFERRY_ALLOWED_PEERS"] = f"{p_address},{d_address}"
                settings = {"plane": args.plane, "side_channel_host": address} | settings
            else:  # shared memory would go round the link
                environment |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": shaped_link.DEVICE}
            arguments = ["--max-num-batched-tokens", str(args.chunk), "--worker-extension-cls", "step_probe.StepProbe"]
            arguments += ["--distributed-executor-backend", args.executor]
            return group.engine(
                role, model, connector=connector, extra=settings, arguments=arguments, environment=environment,
                host=address, dtype=spec.dtype, max_model_len=spec.max_tokens, kv_bytes=False, netns=netns,
            )  # fmt: skip

        # D in its namespace by name, although this process is there: UCX finds network devices by a /sys of its own.
        prefill, decode = engine("prefill", p_address, p_name), engine("decode", d_address, d_name)
        group.wait_ready(args.start_seconds)
        engines = Engines(name, prefill, decode, shaped_link.LinkBytes)
        open_ways(group, engines, d_address)
        (engine_thread,) = prefill.rpc("probe_watch")
        shared = nullcontext("all share all cores")
        with own_cores(int(engine_thread), group.servers) if args.pin else shared as cores:
            yield engines, cores


def model_spec(args: argparse.Namespace) -> ModelSpec:
    return ModelSpec(layers=args.layers, max_tokens=max(tokens for tokens, _ in args.cells) + 64, text_tokens=True)


def pairs_of(args: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Connector, name and settings of each pair."""
    pairs: list[tuple[str, str, dict[str, Any]]] = [(OURS, OURS_NAME, {})]
    for name, _, settings in (variant.partition("=") for variant in args.variant):
        pairs.append((OURS, f"{OURS_NAME}, {name}", json.loads(settings)))
    if args.nixl:
        pairs += [(PULL, PULL_NAME, {"num_threads": 1}), (PUSH, PUSH_NAME, {"num_threads": 1})]
    return pairs


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all of it. Raises EngineError."""
    rng = random.Random(1)
    result: dict[str, Any] = {"rows": [], "timelines": [], "left_out": [], "chunk": args.chunk}
    result["load_before"] = round(os.getloadavg()[0], 1)
    result["kv_kib_per_token"] = model_spec(args).kv_bytes_per_token / 1024
    with two_hosts() as hosts:
        enter(hosts[2])
        for connector, name, extra in pairs_of(args):
            try:
                with started(args, hosts, connector, name, extra) as (engines, result["cores"]):
                    for number, (tokens, rate) in enumerate(args.cells):
                        for host in (hosts[0], hosts[2]):
                            shaped_link.shape(host, rate)
                        found = turns(engines, tokens, rng, args.patience if number == 0 else args.patience.warm)
                        cell = {"name": name, "tokens": tokens, "gb_per_s": rate}
                        result["rows"] += streaming_figures.rows_of(found, **cell)
                        if (tokens, rate) == (TIMELINE if TIMELINE in args.cells else args.cells[0]):
                            samples = [streaming_figures.middle(found, way) for way in found[0]]
                            result["timelines"] += [streaming_figures.timeline(one, **cell) for one in samples]
                        print(f"{name}, {tokens} tokens, {rate:g} GB/s: {len(found)} turns", flush=True)
                        result["targets"] = streaming_figures.targets(result["rows"])
                        report.save(args.json, result)  # the others take as long again
            except (EngineError, httpx.HTTPError) as error:
                if connector == OURS:
                    raise
                result["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
                print(f"left out: {result['left_out'][-1]}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    parser.add_argument("--cells", type=cell_of, nargs="+", default=CELLS, metavar="TOKENS@RATE", help="GB/s")
    parser.add_argument("--chunk", type=int, default=256, help="tokens that an engine computes in one step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=Patience.seconds, help="of a cell and a pair, 3 turns at least"
    )
    parser.add_argument("--plane", default="tcp")
    parser.add_argument("--executor", default=EXECUTOR, help="--distributed-executor-backend of both engines")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=JSON", help="settings of KVFerry")
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="all threads share all cores")
    parser.add_argument("--small", action="store_true", help="few short prompts, one rate, no NIXL")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--start-seconds", type=float, default=400)
    args = parser.parse_args()
    args.patience = Patience(seconds=args.seconds)
    if args.small:
        args.cells, args.chunk, args.layers, args.nixl = [(400, 1.25)], 128, 4, False
        args.patience = Patience(least=2, most=2)
    reason = shaped_link.why_not()
    if reason is not None:
        print(f"streaming.py {reason}")
        return 2
    try:
        result = run(args)
    except (EngineError, httpx.HTTPError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    print(streaming_tables.table(result["rows"]))
    print(streaming_tables.core_table(result["rows"]))
    print(streaming_tables.target_table(result["targets"]))
    report.write(args.json, result)
    if args.plot is not None:
        streaming_figures.plot(result["timelines"], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
