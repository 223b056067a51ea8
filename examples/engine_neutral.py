"""A hand-over without vLLM: a small Llama of our own prefills on some tensor-parallel ranks and decodes on others.

    python examples/engine_neutral.py --prefill-tp 2 --decode-tp 1

Shows what an engine does to use KVFerry as a library. On each rank (``lib/tp_rank.py``), a process of its own, the
KV-binding utilities make the cache (``lib/paged_llama.py``) and the worker half moves it. In front of the ranks
(``lib/tp_engine.py``) the scheduler half says what to hand over and what to fetch, and ``KVOutputAggregator`` makes one
report of all ranks' reports. The two engines may have any number of ranks; they keep their caches with different block
sizes and layouts.

Every decoded token must equal the token of a third engine, of one rank, that prefills by itself. Every KV byte on D
must equal P's byte before D computes anything. One line is printed per prompt; the exit status is 1 where something
differs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tp_engine import SECONDS, Digests, Engine
from tp_step import CacheForm

from kvferry.transport.errors import KVFerryError

FORMS = {
    "prefill": CacheForm(block_size=48, layout="LBNHC", kernel_blocks=16),
    "decode": CacheForm(block_size=20, layout="BHLNC", kernel_blocks=20),
    "alone": CacheForm(block_size=16, layout="LHBNC", kernel_blocks=16),
}
"""Each engine's cache. P's attention takes blocks of 16 tokens, and its block table numbers blocks of 48."""


def layers_that_differ(ours: Digests, theirs: Digests) -> list[int]:
    """The layers in which a KV head has other bytes on some rank of D than on P, or than on another rank."""
    pairs = list(zip(ours, theirs, strict=True))
    for mine, other in pairs:
        assert mine.keys() == other.keys(), "both engines hold all KV heads"
    return [n for n, (mine, other) in enumerate(pairs) if any(len(mine[head] | other[head]) > 1 for head in mine)]


def hand_over(args: argparse.Namespace, engines: dict[str, Engine]) -> list[str]:
    """Every prompt through P and D, and through the engine alone. Returns a line for each difference."""
    p, d, alone = engines["prefill"], engines["decode"], engines["alone"]
    draw = random.Random(args.seed)
    prompts = {f"prompt-{n}": [draw.randrange(512) for _ in range(length)] for n, length in enumerate(args.prompts)}
    leased = {name: p.prefill(name, tokens) for name, tokens in prompts.items()}
    if args.plant_corruption:
        p.corrupt("prompt-0")
    problems = []
    for name, tokens in prompts.items():
        params, before = leased[name]
        after, made, loaded = d.fetch_and_decode(name, tokens, params, args.tokens)
        wanted = alone.generate(tokens, args.tokens)
        layers = layers_that_differ(after, before)
        if layers:
            problems.append(f"{name}: KV bytes differ in layers {layers}")
        if made != wanted:
            problems.append(f"{name}: D decoded {made}, alone it is {wanted}")
        if not loaded.startswith(f"{len(tokens)} of"):
            problems.append(f"{name}: {loaded}")
        kv, same = ("DIFFER" if layers else "equal"), ("equal" if made == wanted else "DIFFER")
        print(f"{name}: {loaded}, KV bytes {kv}, {args.tokens} tokens {same}", flush=True)
    end = time.monotonic() + SECONDS / 4
    while len(p.free) < p.form.num_blocks:  # P's blocks are free once all of its ranks have reported each prompt
        if time.monotonic() > end:
            problems.append(f"P has {len(p.free)} of {p.form.num_blocks} blocks free after the last prompt")
            break
        p.step()
        time.sleep(0.005)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill-tp", type=int, default=2, help="P's tensor-parallel ranks")
    parser.add_argument("--decode-tp", type=int, default=1, help="D's tensor-parallel ranks")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 47, 100, 333], help="their lengths in tokens")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to decode of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plane", default="auto", help="data plane")
    parser.add_argument("--plant-corruption", action="store_true", help="change numbers on P; must be found")
    args = parser.parse_args()
    if min(args.prompts) < 2:
        parser.error("--prompts: a prompt of one token has nothing to hand over, expected at least 2")
    sizes = {"prefill": args.prefill_tp, "decode": args.decode_tp, "alone": 1}
    if min(sizes.values()) < 1:
        parser.error("--prefill-tp and --decode-tp: expected at least 1 rank")
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for role, form in FORMS.items():
                engines[role] = Engine(role, form, sizes[role], args.plane, Path(folder))
            for engine in engines.values():
                engine.start()
            problems = hand_over(args, engines)
        except (RuntimeError, OSError, KVFerryError) as error:
            problems = [str(error)]
        finally:
            for engine in reversed(engines.values()):  # D before P, whose end it would report as a lost peer
                engine.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
