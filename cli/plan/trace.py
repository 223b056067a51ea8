"""Traces of requests: the form of Mooncake's open traces, and a generator of conversations. Pure.

One JSON object per line: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
``hash_ids``: one number for each 512 tokens of the prompt, equal where everything up to there is equal. Source: the
traces of the paper "Mooncake: Trading More Storage for Less Computation" (FAST 2025),
https://github.com/kvcache-ai/Mooncake, folder ``FAST25-release/traces``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.transport.errors import ConfigError, UsageError, check_positive

BLOCK_TOKENS = 512
"""Prompt tokens of one of ``hash_ids``."""
MAX_TOKENS = 1 << 24
"""Bound on the tokens of a prompt and of an answer."""
MAX_REQUESTS = 1 << 22

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TracedRequest(msgspec.Struct, frozen=True):
    """One request. ``timestamp``: milliseconds. ``hash_ids``: of each block of ``BLOCK_TOKENS`` tokens, the last one
    perhaps not full."""

    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...]


def parsed_trace(lines: Iterable[bytes]) -> list[TracedRequest]:
    """The requests of a trace, in order of time. Raises ConfigError: names the first line that is not of the form."""
    decoder, found = msgspec.json.Decoder(TracedRequest), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = error if isinstance(error, msgspec.ValidationError) else "no JSON"
            raise ConfigError(f"line {number} is no request of a trace: {why}") from None
        if len(request.hash_ids) != -(-request.input_length // BLOCK_TOKENS):
            raise ConfigError(
                f"line {number}: {len(request.hash_ids)} hash_ids for {request.input_length} tokens, expected one for "
                f"each {BLOCK_TOKENS}"
            )
        found.append(request)
        if len(found) > MAX_REQUESTS:
            raise ConfigError(f"line {number}: a trace of more than {MAX_REQUESTS} requests; give a part of it")
    if not found:
        raise ConfigError("the trace has no requests")
    return sorted(found, key=lambda request: request.timestamp)


def synthetic_trace(count: int, seconds: float, seed: int) -> list[TracedRequest]:
    """``count`` requests of conversations within ``seconds``: each turn has the prompt and the answer of the turns
    before it, all prompts begin with one of a few system prompts, lengths have a long tail. The same for the same seed.

    No measurement backs its numbers: it has the form of a load, not the size of yours.
    """
    rng, hashes = random.Random(seed), iter(range(count * (MAX_TOKENS // BLOCK_TOKENS)))
    systems = [[next(hashes) for _ in range(rng.randint(1, 4))] for _ in range(4)]
    open_ones: list[tuple[float, int, list[int]]] = []
    found = []
    for at in sorted(rng.uniform(0, seconds * 1e3) for _ in range(count)):
        ready = [place for place, (since, _, _) in enumerate(open_ones) if since <= at]
        if ready and rng.random() < 0.6:
            _, tokens, known = open_ones.pop(rng.choice(ready))
        else:
            known = list(rng.choice(systems))
            tokens = len(known) * BLOCK_TOKENS
        tokens = min(tokens + 1 + int(rng.lognormvariate(7, 1.2)), 128 << 10)
        output = 1 + min(int(rng.lognormvariate(5, 1)), 4096)
        full, needed = tokens // BLOCK_TOKENS, -(-tokens // BLOCK_TOKENS)
        blocks = known[:full] + [next(hashes) for _ in range(needed - len(known[:full]))]
        found.append(TracedRequest(at, tokens, output, tuple(blocks)))
        open_ones.append((at + rng.expovariate(1 / 30e3), tokens + output, blocks[:full]))
        del open_ones[:-1000]
    return found


def trace_lines(requests: Iterable[TracedRequest]) -> Iterator[bytes]:
    return (msgspec.json.encode(request) + b"\n" for request in requests)


def main() -> None:
    """Print a synthetic trace."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.cli.plan.trace", description=main.__doc__)
    parser.add_argument("--count", type=int, default=1000, help="requests")
    parser.add_argument("--seconds", type=float, default=600.0, help="from the first one to the last one, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        check_positive("--count", args.count)
        check_positive("--seconds", args.seconds)
    except UsageError as error:
        parser.exit(2, f"kvferry: {error}\n")
    for line in trace_lines(synthetic_trace(args.count, args.seconds, args.seed)):
        print(line.decode(), end="")


if __name__ == "__main__":
    main()
