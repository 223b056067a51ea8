"""Hand-over with vLLM's ``LLM`` class, no server and no router: one process prefills, another one decodes.

    python examples/offline_handover.py [MODEL]

P's answer carries ``kv_transfer_params``; given to D with the same prompt, D loads the KV cache instead of computing
it. P must live until D has loaded. Without MODEL a small one is built on the spot.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import CPU_ENVIRONMENT, transfer_config
from tests.support.tiny_model import build_model, prompt_of

PATIENT = {"lease_seconds": 300, "handover_timeout_seconds": 1440}
"""Two engines on the cores of one small machine keep each other waiting."""


def make_llm(model: str) -> Any:
    os.environ.update({k: v for k, v in CPU_ENVIRONMENT.items() if k not in os.environ})
    from vllm import LLM

    config = transfer_config("KVFerryConnector", PATIENT)
    return LLM(
        model,
        dtype="float32",
        block_size=32,
        max_model_len=4096,
        enforce_eager=True,
        kv_transfer_config=config,
        disable_log_stats=False,  # for loaded_tokens
    )


def loaded_tokens(llm: Any) -> int:
    """Prompt tokens that were not computed here; ``num_cached_tokens`` of an output leaves handed-over ones out."""
    return sum(
        int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_by_source" and metric.labels["source"] == "external_kv_transfer"
    )


def in_own_group(role: Callable[[str, str, Connection], None], model: str, prompt: str, pipe: Connection) -> None:
    """Run a role as a process group of its own and end all of it: vLLM's engine processes outlive their parent."""
    os.setsid()
    try:
        role(model, prompt, pipe)
    except (EOFError, BrokenPipeError):
        print(f"{role.__name__}: the other end is gone", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        pipe.close()
        sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)


def prefill(model: str, prompt: str, pipe: Connection) -> None:
    """P: compute the prompt once D is up, send where to fetch it, and stay until told to go."""
    from vllm import SamplingParams

    llm = make_llm(model)
    pipe.recv()
    sampling = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": dict(PREFILL_TAG)})
    output = llm.generate([prompt], sampling, use_tqdm=False)[0]
    pipe.send(output.kv_transfer_params)
    pipe.recv()


def decode(model: str, prompt: str, pipe: Connection) -> None:
    """D: the same prompt with P's parameters, and once more without, its prefix cache set aside."""
    from vllm import SamplingParams

    llm = make_llm(model)
    pipe.send("up")
    params = pipe.recv()
    answers = []
    for extra in ({"kv_transfer_params": params}, {}):
        llm.reset_prefix_cache()
        before = loaded_tokens(llm)
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, extra_args=extra)
        output = llm.generate([prompt], sampling, use_tqdm=False)[0]
        answers.append((list(output.outputs[0].token_ids), loaded_tokens(llm) - before))
    pipe.send(answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=500, help="length of the prompt")
    args = parser.parse_args()
    model = args.model or build_model(Path(__file__).resolve().parent.parent / ".demo" / "model")
    prompt = prompt_of(model, args.tokens, seed=1)
    context = mp.get_context("spawn")
    ends = {}
    workers: list[SpawnProcess] = []
    for role in (prefill, decode):
        ours, theirs = context.Pipe()
        worker = context.Process(target=in_own_group, args=(role, str(model), prompt, theirs), name=role.__name__)
        worker.start()
        theirs.close()  # so that its death is an EOFError here
        ends[role], workers = ours, [*workers, worker]
    try:
        ends[decode].recv()
        ends[prefill].send("D is up")  # P holds the blocks for lease_seconds only
        params = ends[prefill].recv()
        print(f"P handed out: {params}", flush=True)
        ends[decode].send(params)
        (tokens, loaded), (alone, loaded_alone) = ends[decode].recv()
        ends[prefill].send("done")
    except (EOFError, BrokenPipeError):
        print("a process ended early; its messages are above", file=sys.stderr)
        return 1
    finally:
        for end in ends.values():
            end.close()  # whoever still waits for us ends
        for worker in workers:
            worker.join(5)
            with suppress(ProcessLookupError):
                assert worker.pid is not None
                os.killpg(worker.pid, signal.SIGKILL)
    same = tokens == alone and not loaded_alone
    print(f"D loaded {loaded} of {args.tokens} tokens; {'the same' if same else 'OTHER'} tokens as without: {tokens}")
    return 0 if same and loaded >= args.tokens - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
