"""What a client waits for behind a prefill/decode pair on two hosts whose link is slow, with KVFerry and with NIXL.

    sudo .venv/bin/python benchmarks/streaming.py [--json FILE] [--plot PNG] [--rates 1.25 3] [--tokens 2000]
    sudo .venv/bin/python benchmarks/streaming.py --small                                   # for CI: no figure holds

Two network namespaces joined by a veth pair whose ends send at most ``--rates`` GB/s (tc's token bucket filter; no
delay is added). P is in one; D, the router and the client are in the other. The model is small and its KV is not, so
that P computes a prompt in longer than the link takes, chunk by chunk of ``--chunk`` tokens. Both are vLLM engines on
the CPU of this machine, with one thread each; all share its cores.

Ways, in turn, each with a prompt of its own: P alone (the client asks P, and P decodes); both legs one after the other;
both legs at once, where P offers it; each without and with the relay of P's first token. ``--variant NAME=JSON`` adds
an engine pair with these settings of KVFerry, for both engines.

Columns, medians over ``--samples``: the client's time to the first, second and last token, and to the first since P's
last step of the prompt, which what slows P down does not move; P's time from the begin of
the prompt's first step to the end of its last one, noted in P's worker; the share of the prompt's bytes that had come
over the link when that step ended, from the counters of D's end of it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import httpx
import report
import shaped_link
import tables

from examples.two_node.run_netns import enter, two_hosts
from kvferry.router.identities import identity_of
from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec, build_model

OURS, PULL, PUSH = "KVFerryConnector", "NixlPullConnector", "NixlPushConnector"
WAYS = {
    "P alone": None,
    "serial": ("--serial", "--no-relay"),
    "serial, relay": ("--serial",),
    "at once": ("--no-relay",),
    "at once, relay": (),
}
"""The arguments of the router; None: without one."""
ANSWER_TOKENS = 6
SETTLE_SECONDS = 0.3
"""After an answer, before the next one: what engines do when a request has ended."""


@dataclass
class Sample:
    """Of one request, in seconds from its sending. ``arrived``: when each token came. ``steps``: those of P.
    ``link``: (time, bytes of the prompt that have come)."""

    way: str
    arrived: list[float]
    steps: list[dict[str, Any]]
    link: list[tuple[float, int]]
    before_end: float

    @property
    def prefill(self) -> float:
        return float(self.steps[-1]["end"] - self.steps[0]["begin"])


@dataclass
class Engines:
    """A pair, with a router for each way that it offers."""

    name: str
    prefill: Server
    decode: Server
    urls: dict[str, str] = field(default_factory=dict)


def stream(url: str, prompt: list[int]) -> list[float]:
    """When each token came, of which a chunk may hold several: time.monotonic. Raises EngineError."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    arrived: list[float] = []
    with (
        httpx.Client(trust_env=False, timeout=300) as client,
        client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response,
    ):
        if response.status_code != 200:
            raise EngineError(f"{url}: HTTP {response.status_code}: {response.read()[:500]!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise EngineError(f"{url}: {event['error']}")
                arrived += [time.monotonic()] * (event["usage"]["completion_tokens"] - len(arrived))
    if len(arrived) != ANSWER_TOKENS:
        raise EngineError(f"{url}: {len(arrived)} of {ANSWER_TOKENS} tokens came")
    return arrived


def measure(engines: Engines, way: str, prompt: list[int]) -> Sample:
    """One request."""
    engines.prefill.rpc("steps_take")
    with shaped_link.LinkBytes() as link:
        began = time.monotonic()
        arrived = stream(engines.urls[way], prompt)
    (steps,) = engines.prefill.rpc("steps_take")
    computed, of_prompt = 0, []
    for step in steps:  # P may decode after that
        if computed < len(prompt):
            of_prompt.append(step)
        computed += step["tokens"]
    if computed < len(prompt):
        raise EngineError(f"P computed {computed} of {len(prompt)} tokens")
    end = of_prompt[-1]["end"]
    share = link.by(end) / max(1, link.total)
    since = [
        {"tokens": step["tokens"], "begin": step["begin"] - began, "end": step["end"] - began,
         "layers": [at - began for at in step["layers"]]}
        for step in of_prompt
    ]  # fmt: skip
    curve = [(at - began, count - link.counts[0]) for at, count in zip(link.times, link.counts, strict=True)]
    return Sample(way, [at - began for at in arrived], since, curve, share)


@contextmanager
def started(
    args: argparse.Namespace, hosts: tuple[str, str, str, str], connector: str, name: str, extra: dict[str, Any]
) -> Iterator[Engines]:
    """A pair and its routers, up and warm."""
    p_name, p_address, _, d_address = hosts
    spec = model_spec(args)
    model = build_model(args.folder / f"model-{args.layers}", spec)
    with ServerGroup(args.folder / "logs" / name.replace(" ", "-")) as group:

        def engine(role: str, address: str, netns: str | None) -> Server:
            environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": python_path(Path(__file__).resolve().parent)}
            settings = dict(extra)
            if connector == OURS:
                environment["KVFERRY_ALLOWED_PEERS"] = f"{p_address},{d_address}"
                settings = {"plane": args.plane, "side_channel_host": address} | settings
            else:  # shared memory would go round the link
                environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "UCX_TLS": "tcp,self"}
                environment["UCX_NET_DEVICES"] = shaped_link.DEVICE
            arguments = ["--max-num-batched-tokens", str(args.chunk), "--worker-extension-cls", "step_probe.StepProbe"]
            return group.engine(
                role, model, connector=connector, extra=settings, arguments=arguments, environment=environment,
                host=address, dtype=spec.dtype, max_model_len=args.tokens + 64, kv_bytes=False, netns=netns,
            )  # fmt: skip

        prefill, decode = engine("prefill", p_address, p_name), engine("decode", d_address, None)
        group.wait_ready(args.start_seconds)
        prefill.rpc("steps_watch")
        engines = Engines(name, prefill, decode, {"P alone": prefill.url})
        for way, options in WAYS.items():
            if options is None:
                continue
            if not way.startswith("serial") and not offers_at_once(prefill):
                print(f"{engines.name}: '{way}' is left out: P does not answer transfer_mode push", flush=True)
                continue
            name = f"router-{way.replace(', ', '-').replace(' ', '-')}"
            engines.urls[way] = group.router(prefill, decode, host=d_address, arguments=options, name=name).url
        yield engines


def offers_at_once(prefill: Server) -> bool:
    """Whether P's answer lets a router ask D at once. Its lease of 64 tokens ends by time."""
    body = {"model": "model", "prompt": list(range(2, 66)), "max_tokens": 1, "kv_transfer_params": PREFILL_TAG}
    return identity_of(prefill.post("/v1/completions", body).get("kv_transfer_params")) is not None


def model_spec(args: argparse.Namespace) -> ModelSpec:
    return ModelSpec(layers=args.layers, max_tokens=args.tokens + 64)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all of it. Raises EngineError."""
    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    timelines: list[dict[str, Any]] = []
    pairs: list[tuple[str, str, dict[str, Any]]] = [(OURS, "KVFerry", {})]
    pairs += [
        (OURS, f"KVFerry, {name}", json.loads(text)) for name, _, text in (v.partition("=") for v in args.variant)
    ]
    if args.nixl:
        pairs += [(PULL, "NIXL, pull", {"num_threads": 1}), (PUSH, "NIXL, push", {"num_threads": 1})]
    with two_hosts() as hosts:
        enter(hosts[2])
        for connector, name, extra in pairs:
            try:
                with started(args, hosts, connector, name, extra) as engines:
                    for rate in args.rates:
                        for host in (hosts[0], hosts[2]):
                            shaped_link.shape(host, rate)
                        samples = measured(args, engines, rng)
                        rows += [row(name, rate, found) for found in samples.values()]
                        timelines += [
                            {"name": name, "gb_per_s": rate} | asdict(found[len(found) // 2])
                            for found in samples.values()
                        ]
            except (EngineError, httpx.HTTPError) as error:
                if connector == OURS:
                    raise
                print(f"{name} is left out: {str(error).splitlines()[0]}", flush=True)
    kib = model_spec(args).kv_bytes_per_token / 1024
    return {"rows": rows, "timelines": timelines, "tokens": args.tokens, "kv_kib_per_token": kib, "chunk": args.chunk}


def measured(args: argparse.Namespace, engines: Engines, rng: random.Random) -> dict[str, list[Sample]]:
    """By way; they take turns, so that a drift of the machine falls on all."""
    found: dict[str, list[Sample]] = {way: [] for way in engines.urls}
    for turn in range(-args.warm_ups, args.samples):
        ways = list(engines.urls)
        for way in ways if turn % 2 else reversed(ways):
            prompt = [rng.randrange(2, ModelSpec.vocabulary) for _ in range(args.tokens)]
            sample = measure(engines, way, prompt)
            if turn >= 0:
                found[way].append(sample)
            time.sleep(SETTLE_SECONDS)
    return found


def row(name: str, rate: float, samples: list[Sample]) -> dict[str, Any]:
    def middle(values: list[float]) -> float:
        return round(statistics.median(values) * 1e3, 1)

    return {
        "name": name,
        "gb_per_s": rate,
        "way": samples[0].way,
        "samples": len(samples),
        "first_ms": middle([sample.arrived[0] for sample in samples]),
        "after_prefill_ms": middle([sample.arrived[0] - sample.steps[-1]["end"] for sample in samples]),
        "second_ms": middle([sample.arrived[1] for sample in samples]),
        "last_ms": middle([sample.arrived[-1] for sample in samples]),
        "prefill_ms": middle([sample.prefill for sample in samples]),
        "mib": round(statistics.median(sample.link[-1][1] for sample in samples) / 2**20, 1),
        "before_end": round(statistics.median(sample.before_end for sample in samples), 3),
        "each_first_ms": [round(sample.arrived[0] * 1e3, 1) for sample in samples],
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ["engines", "GB/s", "way", "first token, ms", "since P's end, ms", "second, ms", "last, ms",
            "P's prefill, ms", "MiB", "there at its end"]  # fmt: skip
    cells = [
        [found["name"], f"{found['gb_per_s']:g}", found["way"], *(f"{found[f'{which}_ms']:.0f}" for which in
         ("first", "after_prefill", "second", "last", "prefill")), f"{found['mib']:.0f}", f"{found['before_end']:.0%}"]
        for found in rows
    ]  # fmt: skip
    return tables.table(head, cells)


def plot(result: dict[str, Any], path: Path) -> None:
    """Timelines: P's chunks and layers, the bytes over the link, the tokens at the client. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in result["timelines"] if line["way"] != "P alone"]
    figure, axes = pyplot.subplots(
        len(lines), 1, figsize=(11, 1.9 * len(lines)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, line in zip(axes[:, 0], lines, strict=True):
        for step in line["steps"]:
            axis.barh(1.25, step["end"] - step["begin"], left=step["begin"], height=0.25, color="tab:blue", alpha=0.5)
            axis.plot(step["layers"], [1.25] * len(step["layers"]), "|", color="tab:blue", markersize=6)
        total = max(1, line["link"][-1][1])
        axis.plot([at for at, _ in line["link"]], [count / total for _, count in line["link"]], color="tab:orange")
        axis.plot(line["arrived"], [1.6] * len(line["arrived"]), "v", color="tab:green")
        axis.set_ylim(-0.05, 1.8)
        axis.set_yticks([0, 1, 1.25, 1.6], ["0 bytes", "all bytes", "P's steps", "tokens"], fontsize=7)
        axis.set_title(f"{line['name']}, {line['gb_per_s']:g} GB/s, {line['way']}", fontsize=9)
    axes[-1, 0].set_xlabel("seconds since the client sent its request")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.25, 3.0], help="GB/s")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=256, help="tokens that an engine computes in one step")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--plane", default="tcp")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=JSON", help="settings of KVFerry")
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--small", action="store_true", help="few short prompts, one rate, no NIXL")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--start-seconds", type=float, default=240)
    args = parser.parse_args()
    if args.small:
        args.rates, args.tokens, args.chunk, args.layers, args.samples, args.warm_ups = [1.25], 400, 128, 4, 2, 1
        args.nixl = False
    reason = shaped_link.why_not()
    if reason is not None:
        print(f"streaming.py {reason}")
        return 2
    try:
        result = run(args)
    except (EngineError, httpx.HTTPError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    print(table(result["rows"]))
    report.write(args.json, result)
    if args.plot is not None:
        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
