"""What a client waits for behind a prefill/decode pair on two GPUs of one host, with each data plane and with NIXL.

    python benchmarks/gpu_streaming.py [--json FILE] [--plot FILE.png] [--planes tcp ucx cuda_ipc] [--tokens 2000 8000]
    python benchmarks/gpu_streaming.py --cpu --tokens 400 --seconds 5       # a tiny model on the CPU, to try it out

As ``streaming.py``, without its link: P on the first GPU, D on the second (``--gpus 0 0``: both on one, which they
then share in time), with CUDA graphs and asynchronous scheduling, and the form of Llama-8B with made-up weights.
``tcp`` goes over loopback. Over ``cuda_ipc`` D reads P's pages when the prompt is computed, so nothing leaves before;
it is here to compare with. NixlConnector moves bytes as its UCX chooses, over NVLink as a rule.

P's steps are timed by CUDA events. The share of the bytes that were at D when P's last step ended is that of the bytes
in D's pages, noted by KVFerry's transfer thread on D; of NIXL it is not known. The thread of P's engine has a core of
its own where there are two.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import httpx
import report
import streaming_figures
import streaming_tables
from gpu_e2e import CPU, Setup
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

from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError
from tests.support.tiny_model import ModelSpec, build_model

HERE = Path(__file__).resolve().parent
GPU = Setup(
    ModelSpec(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, max_tokens=32768,
        dtype="bfloat16", text_tokens=True,
    ),
    block=16, gpus=((0,), (1,)), lengths=(128, 2000, 8000), beside=16,
)  # fmt: skip
"""Llama-8B but for its vocabulary: the made-up tokenizer has 1024 tokens, and P's first token must be one of them."""


def pairs_of(args: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Connector, name and settings of each pair."""
    pairs: list[tuple[str, str, dict[str, Any]]] = [
        (OURS, f"{OURS_NAME}, {plane}" + ", discarded" * args.discard, {"plane": plane}) for plane in args.planes
    ]
    nixl = CPU.nixl if args.cpu else {}
    return pairs + ([(PULL, PULL_NAME, nixl), (PUSH, PUSH_NAME, nixl)] if args.nixl else [])


def measured(
    args: argparse.Namespace, setup: Setup, connector: str, name: str, extra: dict[str, Any], result: dict[str, Any]
) -> None:
    """Add a pair's rows and timelines to the result. Raises EngineError."""
    model = build_model(args.folder / "model", setup.spec, weights=False)
    rng = random.Random(name)
    with ServerGroup(args.folder / "logs" / name.replace(", ", "-")) as group:
        prefill, decode = (
            group.engine(
                role, model, connector=connector, extra=extra, dtype=setup.spec.dtype, block_size=setup.block,
                max_model_len=max(args.tokens) + 64, gpus=gpus, kv_cache_bytes=args.kv_gib << 30, kv_bytes=False,
                arguments=["--load-format", "dummy", "--max-num-batched-tokens", str(args.chunk),
                           "--worker-extension-cls", "step_probe.StepProbe"],
                environment={"PYTHONPATH": python_path(HERE)}
                | ({} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)}),
            )
            for role, gpus in zip(("prefill", "decode"), setup.gpus, strict=True)
        )  # fmt: skip
        group.wait_ready(args.start_seconds)
        engines = Engines(name, prefill, decode)
        open_ways(group, engines)
        if args.discard and connector == OURS:
            decode.rpc("probe_discard")
        (engine_thread,) = prefill.rpc("probe_watch")
        with own_cores(int(engine_thread), group.servers) as result["cores"]:
            for tokens in args.tokens:  # a GPU engine compiles and tunes for each
                found = turns(engines, tokens, rng, Patience(seconds=args.seconds))
                cell = {"name": name, "tokens": tokens, "gb_per_s": None}
                result["rows"] += streaming_figures.rows_of(found, **cell)
                if tokens == max(args.tokens):
                    samples = [streaming_figures.middle(found, way) for way in found[0]]
                    result["timelines"] += [streaming_figures.timeline(one, **cell) for one in samples]
                print(f"{name}, {tokens} tokens: {len(found)} turns", flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all pairs that start; which do not is in ``left_out``."""
    p, d = args.gpus
    cpu = replace(CPU, spec=replace(CPU.spec, text_tokens=True))
    setup = cpu if args.cpu else replace(GPU, gpus=((p,), (d,)))
    args.tokens = args.tokens or list(setup.lengths)
    result: dict[str, Any] = {"rows": [], "timelines": [], "left_out": [], "chunk": args.chunk}
    result["gpus_of_p_and_d"] = list(args.gpus)
    result["load_before"] = round(os.getloadavg()[0], 1)
    result["kv_kib_per_token"] = setup.spec.kv_bytes_per_token / 1024
    for connector, name, extra in pairs_of(args):
        try:
            measured(args, setup, connector, name, extra, result)
        except (EngineError, httpx.HTTPError) as error:  # a plane that this machine does not have
            result["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
            print(f"left out: {result['left_out'][-1]}", flush=True)
    return result | {"targets": streaming_figures.targets(result["rows"])}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    parser.add_argument("--planes", nargs="+", help="of KVFerry: tcp, ucx and cuda_ipc, on the CPU tcp")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a prompt")
    parser.add_argument("--chunk", type=int, help="tokens that an engine computes in one step: 2048, on the CPU 128")
    parser.add_argument("--seconds", type=float, default=Patience.seconds, help="of a cell, 3 turns at least")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), metavar=("P", "D"), help="0 0: both on one GPU")
    parser.add_argument("--kv-gib", type=int, help="KV cache of each engine, 24 on a GPU")
    parser.add_argument(
        "--discard", action="store_true",
        help="D throws away what KVFerry sends; tokens are wrong. Shows what P loses to D on one GPU",
    )  # fmt: skip
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU")
    parser.add_argument(
        "--folder", type=Path, default=HERE.parent / ".bench" / "gpu_streaming", help="for model and logs"
    )
    parser.add_argument("--start-seconds", type=float, default=400, help="after which engines must be up")
    return parser


def main() -> int:
    args = arguments().parse_args()
    args.planes = args.planes or (["tcp"] if args.cpu else ["tcp", "ucx", "cuda_ipc"])
    args.chunk = args.chunk or (128 if args.cpu else 2048)
    args.kv_gib = args.kv_gib or (1 if args.cpu else 24)
    result = run(args)
    if not result["rows"]:
        print("FAILED  no pair could be measured", file=sys.stderr)
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
