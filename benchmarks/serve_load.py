"""One run of vLLM's own `vllm bench serve` in this process: importing vLLM once is most of what a run takes."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser


@dataclass(frozen=True)
class Load:
    """``requests`` random prompts of ``tokens`` tokens with ``output`` tokens each, ``beside`` of them at a time."""

    tokens: int
    output: int
    requests: int
    beside: int


@dataclass(frozen=True)
class Served:
    """Milliseconds to the first token and per further token, as clients of the router see them; requests a second."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    per_second: float


def bench_serve(url: str, tokenizer: Path, load: Load, seed: int, said: Path) -> Served:
    """``seed`` chooses the prompts; what the tool prints goes to the file ``said``.

    Raises:
        RuntimeError: a request failed.
    """
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    command = ["--backend", "openai", "--base-url", url, "--model", "model", "--tokenizer", str(tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", str(load.tokens)]
    command += ["--random-output-len", str(load.output), "--num-prompts", str(load.requests), "--temperature", "0"]
    command += ["--max-concurrency", str(load.beside), "--seed", str(seed), "--disable-tqdm"]
    with said.open("a") as file, redirect_stdout(file):
        result = serve.main(parser.parse_args(command))
    if result["completed"] != load.requests:
        raise RuntimeError(f"{result['completed']} of {load.requests} requests were served; {said} says more")
    return Served(
        result["median_ttft_ms"], result["p99_ttft_ms"], result["median_tpot_ms"], result["p99_tpot_ms"],
        result["request_throughput"],
    )  # fmt: skip
