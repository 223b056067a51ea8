"""The decoders under mutated inputs: only documented errors, at most 50 ms for each, at most 64 MiB in all."""

from __future__ import annotations

import gc
import random
import resource
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.fuzz.decoders import every_decoder
from tests.fuzz.honest import FOUND, Decoder, Mutator
from tests.support.turns import MOST_BYTES, MOST_TURN_SECONDS

ROUND = 2000
"""Inputs that a decoder of share 1 gets before the next one has its turn."""
TIMES = 5
"""What takes too long so often in sequence is slow."""


@dataclass(slots=True)
class Outcome:
    """What became of the inputs of one decoder or port. ``worst_s``: processor time of one input, or of a turn of the
    engine's transfer thread; ``worst_bytes``: growth of the process at its peak, over all inputs; ``descriptors``: more
    than before, at the end; ``failures``: one line for each kind, with the input."""

    inputs: int = 0
    accepted: int = 0
    worst_s: float = 0.0
    worst_bytes: int = 0
    descriptors: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.worst_s = max(self.worst_s, other.worst_s)
        self.worst_bytes = max(self.worst_bytes, other.worst_bytes)
        self.failures |= other.failures


def begin_peak() -> int:
    """Let ``peak_bytes`` begin anew: an earlier peak of this process must not hide a later one. Returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most memory that this process has had in use since ``begin_peak``."""
    return _bytes_of("VmHWM")


def _bytes_of(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


@contextmanager
def at_most(growth: int) -> Iterator[None]:
    """Within this, an allocation by which the process would have more than ``growth`` bytes more fails. The peak in use
    does not show all: under pressure the kernel takes back pages of this process meanwhile, and a peak hides behind it.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_bytes_of("VmData") + growth, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def timed(decoder: Decoder, data: bytes) -> tuple[float, BaseException | None]:
    """Processor time that a decoder takes for one input, and what it raises."""
    begun, raised = time.thread_time(), None
    try:
        decoder.run(data)
    except BaseException as error:
        raised = error
    return time.thread_time() - begun, raised


def judge(decoder: Decoder, data: bytes, outcome: Outcome) -> None:
    """Give a decoder one input; again while it takes too long, because a shared host can make it slow by chance."""
    seconds, error = timed(decoder, data)
    for _ in range(TIMES - 1):
        if seconds > MOST_TURN_SECONDS:
            seconds = min(seconds, timed(decoder, data)[0])
    outcome.inputs += 1
    outcome.accepted += error is None
    if error is not None and not isinstance(error, decoder.may_raise):
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
        if isinstance(error, MemoryError):
            kind = f"memory: over {MOST_BYTES >> 20} MiB in {Path(where.filename).name}"
        outcome.failures.setdefault(kind, f"{kind}: {str(error)[:200]}; input {data[:400].hex()}")
    outcome.worst_s = max(outcome.worst_s, seconds)
    if seconds > MOST_TURN_SECONDS:
        outcome.failures.setdefault(
            "slow", f"slow: {seconds * 1e3:.0f} ms; input {data[:200].hex()} of {len(data)} bytes"
        )


def rounds(decoders: Sequence[Decoder], seed: int, size: float = ROUND) -> Iterator[tuple[Decoder, Outcome]]:
    """Give the decoders inputs in turn, without end: a round is ``size`` inputs times the decoder's share."""
    mutators = {
        decoder.name: Mutator(
            random.Random(f"{seed} {decoder.name}"), [*decoder.corpus, *FOUND.get(decoder.name, ())], decoder.codec
        )
        for decoder in decoders
    }
    gc.collect()
    gc.freeze()  # a search for garbage is no time of the decoder
    while True:
        for decoder in decoders:
            outcome, mutator, before = Outcome(), mutators[decoder.name], begin_peak()
            with at_most(MOST_BYTES):
                for _ in range(max(1, int(size * decoder.share))):
                    judge(decoder, mutator.next(), outcome)
            outcome.worst_bytes = peak_bytes() - before
            yield decoder, outcome


def fuzz(seed: int, count: int, seconds: float, only: str = "") -> dict[str, Outcome]:
    """Until ``count`` inputs or ``seconds`` are over. By decoder."""
    torch.set_num_threads(1)
    total: dict[str, Outcome] = {}
    end, done = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder, every_decoder(Path(folder)) as decoders:
        chosen = [decoder for decoder in decoders if only in decoder.name]
        least, size = sum(d.share for d in chosen), float(ROUND)
        size = min(size, max(1.0, count / least))
        for decoder, outcome in rounds(chosen, seed, size):
            total.setdefault(decoder.name, Outcome()).add(outcome)
            done += outcome.inputs
            if (done >= count or time.monotonic() >= end) and len(total) == len(chosen):
                break
    return total
