"""A hand-over without vLLM: a small Llama of our own prefills in one process and decodes in another.

    python examples/engine_neutral.py

Shows what an engine does to use KVFerry as a library: the KV-binding utilities make its cache, the scheduler half says
what to hand over and what to fetch, the worker half moves it. The two processes keep their caches with different block
sizes and layouts. Every decoded token must equal that of a third process that prefilled by itself, and every KV byte on
D must equal P's before D computes anything; one line per prompt, exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

HERE = Path(__file__).resolve()
SECONDS = 60.0
FORMS = {
    "prefill": {"block_size": 48, "layout": "LBNHC", "kernel_blocks": 16},
    "decode": {"block_size": 20, "layout": "BHLNC", "kernel_blocks": 20},
    "alone": {"block_size": 16, "layout": "LHBNC", "kernel_blocks": 16},
}
"""Each process's cache. P's attention takes blocks of 16 tokens and its block table numbers blocks of 48."""


# --- one process --------------------------------------------------------------------------------------------------


class Node:
    """One engine with KVFerry's two halves; methods are what the parent may ask for."""

    def __init__(self, role: str, plane: str) -> None:
        import torch

        sys.path.insert(0, str(HERE.parent / "lib"))
        from paged_llama import CacheForm, Llama, PagedEngine

        from kvferry.connector.config import load_settings
        from kvferry.connector.engine.scheduler import SchedulerHalf
        from kvferry.connector.engine.worker import WorkerHalf
        from kvferry.connector.geometry.engine_types import BlockTable, LayerGroup, RankInfo
        from kvferry.transport.host import host_id

        torch.set_num_threads(1)
        model, form = Llama(), CacheForm(**FORMS[role])
        self.engine = PagedEngine(model, form)
        self.held: dict[str, list[int]] = {}
        self.worker: WorkerHalf | None = None
        if role == "alone":
            return
        settings = load_settings({"plane": plane})
        info = RankInfo(
            engine_id=role, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1,
            model={"architectures": "ExampleLlama", "seed": str(model.seed)},
        )  # fmt: skip
        self.worker = WorkerHalf(
            settings, info, [LayerGroup("full", tuple(self.engine.layers), form.block_size, model.kv_heads)]
        )
        self.worker.register(self.engine.kv_caches, form.num_blocks)
        self.scheduler = SchedulerHalf(
            settings, role, [BlockTable("full", form.block_size)], tp_size=1, pp_size=1,
            produces=role == "prefill", consumes=role == "decode", host_id=host_id(),
        )  # fmt: skip
        assert self.worker.address is not None
        self.scheduler.set_ranks([self.worker.address])

    @staticmethod
    def _view(request: str, tokens: list[int], params: dict[str, Any], computed: int) -> Any:
        from kvferry.connector.geometry.engine_types import RequestView

        return RequestView(request, params, tokens, len(tokens), computed)

    def prefill(self, request: str, tokens: list[int]) -> dict[str, Any]:
        """P: compute a prompt and lease its blocks; the parameters tell D where to fetch them."""
        blocks = self.engine.allocate(len(tokens))
        self.engine.forward(tokens, 0, blocks)
        view = self._view(request, tokens, {"do_remote_decode": True}, len(tokens))
        held, params = self.scheduler.request_finished(view, (blocks,), completed=True)
        if not held:
            raise RuntimeError(f"{request} was not leased")
        self.held[request] = blocks
        self.worker.post(self.scheduler.take_plan())
        return {"params": params, "digests": self.engine.kv_digests(blocks, len(tokens))}

    def corrupt(self, request: str) -> dict[str, Any]:
        """P: flip the sign of one number of a leased prompt, which the comparison must find."""
        first = int(self.engine.kernel_table(self.held[request])[0])
        list(self.engine.layers.values())[1].kv_cache[first, 0, 0, 0] *= -1
        return {}

    def free_blocks(self) -> dict[str, Any]:
        """P: take back the blocks of leases that ended."""
        for request in self.worker.take_results().sent:
            self.engine.free += self.held.pop(request)
        return {"free": len(self.engine.free), "of": self.engine.form.num_blocks}

    def decode(self, request: str, tokens: list[int], params: dict[str, Any], count: int) -> dict[str, Any]:
        """D: fetch a prompt's KV, then decode. A load that fails is an error here, never a recomputation."""
        view = self._view(request, tokens, params, 0)
        self.scheduler.on_new_request(view)
        loaded, _ = self.scheduler.num_new_matched_tokens(view, 0)
        blocks = self.engine.allocate(len(tokens) + count)
        self.scheduler.after_alloc(view, (blocks,), loaded)
        started = time.perf_counter()
        self.worker.post(self.scheduler.take_plan(idle=True))
        while not (results := self.worker.take_results()).received:
            if time.perf_counter() - started > SECONDS / 2:
                raise TimeoutError(f"{request} was not loaded within {SECONDS / 2:g} s")
        milliseconds = (time.perf_counter() - started) * 1e3
        self.scheduler.loads_finished(results.received)
        if results.failed:
            raise RuntimeError(f"the load of {request} failed")
        digests = self.engine.kv_digests(blocks, loaded)
        made = self.engine.decode(tokens, blocks, count)
        self.scheduler.request_finished(view, (blocks,), completed=True)
        self.engine.free += blocks
        plane = "+".join((self.worker.rank_context.stats.take() or {"finished": ["none"]})["finished"])
        return {"digests": digests, "tokens": made, "loaded": loaded, "plane": plane, "ms": milliseconds}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Alone: prefill and decode, nothing handed over."""
        blocks = self.engine.allocate(len(tokens) + count)
        first = self.engine.forward(tokens, 0, blocks)
        made = [first, *self.engine.decode([*tokens, first], blocks, count - 1)]
        self.engine.free += blocks
        return {"tokens": made}


def serve(role: str, plane: str) -> None:
    """Answer the parent's orders, a JSON line each, until it closes the pipe."""
    node = Node(role, plane)
    print(json.dumps({"ready": role}), flush=True)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(node, order.pop("order"))(**order)), flush=True)
    finally:
        if node.worker is not None:
            node.worker.close()


# --- the parent ---------------------------------------------------------------------------------------------------


class Process:
    """The parent's end of one process."""

    def __init__(self, role: str, plane: str) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--role", role, "--plane", plane],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=SECONDS)
        except Empty:
            raise RuntimeError(f"the {self.role} process said nothing for {SECONDS:g} s") from None
        if not line:
            raise RuntimeError(f"the {self.role} process ended early; its message is above")
        return dict(json.loads(line))

    def ask(self, order: str, **values: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **values}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def hand_over(args: argparse.Namespace, nodes: dict[str, Process]) -> list[str]:
    """Every prompt through P and D, and through the process alone; what differs."""
    for node in nodes.values():
        node.answer()
    draw = random.Random(args.seed)
    prompts = {f"prompt-{n}": [draw.randrange(512) for _ in range(length)] for n, length in enumerate(args.prompts)}
    leased = {name: nodes["prefill"].ask("prefill", request=name, tokens=tokens) for name, tokens in prompts.items()}
    if args.plant_corruption:
        nodes["prefill"].ask("corrupt", request="prompt-0")
    problems = []
    for name, tokens in prompts.items():
        got = nodes["decode"].ask(
            "decode", request=name, tokens=tokens, params=leased[name]["params"], count=args.tokens
        )
        wanted = nodes["alone"].ask("generate", tokens=tokens, count=args.tokens)["tokens"]
        layers = [
            n for n, pair in enumerate(zip(leased[name]["digests"], got["digests"], strict=True)) if len({*pair}) > 1
        ]
        if layers:
            problems.append(f"{name}: KV bytes differ in layers {layers}")
        if got["tokens"] != wanted:
            problems.append(f"{name}: D decoded {got['tokens']}, alone it is {wanted}")
        if got["loaded"] != len(tokens):
            problems.append(f"{name}: {got['loaded']} of {len(tokens)} tokens loaded")
        print(
            f"{name}: {got['loaded']} of {len(tokens)} tokens loaded by {got['plane']} in {got['ms']:.1f} ms, "
            f"KV bytes {'DIFFER' if layers else 'equal'}, "
            f"{args.tokens} tokens {'equal' if got['tokens'] == wanted else 'DIFFER'}",
            flush=True,
        )
    end = time.monotonic() + SECONDS / 4
    while (blocks := nodes["prefill"].ask("free_blocks"))["free"] != blocks["of"]:
        if time.monotonic() > end:
            problems.append(f"P has {blocks['free']} of {blocks['of']} blocks free after the last prompt")
            break
        time.sleep(0.02)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 47, 100, 333], help="their lengths in tokens")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to decode of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plane", default="auto", help="data plane")
    parser.add_argument("--plant-corruption", action="store_true", help="change a number on P; must be found")
    parser.add_argument("--role", choices=list(FORMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        from kvferry.transport.errors import KVFerryError

        try:
            serve(args.role, args.plane)
        except KVFerryError as error:
            print(f"{args.role}: {error}", file=sys.stderr)
            return 1
        return 0
    if min(args.prompts) < 2:
        parser.error("--prompts: a prompt of one token has nothing to hand over, expected at least 2")
    nodes: dict[str, Process] = {}
    try:
        for role in FORMS:
            nodes[role] = Process(role, args.plane)
        problems = hand_over(args, nodes)
    except (RuntimeError, OSError) as error:
        problems = [str(error)]
    finally:
        for node in reversed(nodes.values()):  # D before P, whose end it would report as a lost peer
            node.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
