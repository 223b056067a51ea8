"""Two ranks without an engine, each in a process of its own (``rank_process.py``), that hand a known pattern over.

``kvferry doctor`` checks data planes by them, ``kvferry bench`` measures them.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta

from kvferry.cli.terminal import FailedError
from kvferry.transport.control.keys import new_secret

RANK_PROGRAM = (sys.executable, "-m", "kvferry.cli.rank_process")
ELEMENT_BYTES = 4
"""The elements are int32 whatever the model's dtype is: a hand-over moves bytes."""
MAX_LINE_BYTES = 1 << 20

Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class CacheForm(msgspec.Struct, frozen=True):
    """The caches of one rank. ``content``: int32 elements of one (head, token) of a layer, K and V together.
    ``layout``: the order of heads (H) and tokens (N) in a page. ``tokens``: of the longest prompt."""

    layers: Count = 8
    heads: Count = 8
    content: Count = 64
    tokens: Count = 4096
    block_tokens: Count = 16
    layout: Literal["HND", "NHD"] = "HND"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers."""
        return tuple(f"layer {number}" for number in range(self.layers))

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.heads * self.content * ELEMENT_BYTES

    def caches(self, device: str) -> dict[str, torch.Tensor]:
        """[B, H, N, C] int32 of zeros for each layer, in the order of ``layout`` in memory."""
        heads, tokens = (1, 2) if self.layout == "HND" else (2, 1)
        shape = [self.blocks, 0, 0, self.content]
        shape[heads], shape[tokens] = self.heads, self.block_tokens
        axes = (0, heads, tokens, 3)
        return {name: torch.zeros(shape, dtype=torch.int32, device=device).permute(axes) for name in self.names}

    def pattern(self, layer: int, salt: int) -> torch.Tensor:
        """The elements of a layer in the order of the prompt's tokens, int32 [T, H, C]: the same for each block size
        and layout. Each element is another, and each hand-over has its own ``salt``."""
        count = self.blocks * self.block_tokens
        numbers = torch.arange(count * self.heads * self.content, dtype=torch.int32)
        mixed = numbers * -1640531527 + (layer * 65536 + salt) * 40503  # times an odd number: one to one
        return mixed.reshape(count, self.heads, self.content)

    def block_ids(self, seed: int) -> list[int]:
        """The blocks of the prompt in an order that has no runs."""
        return [int(block) for block in np.random.default_rng(seed).permutation(self.blocks)]


class PairError(FailedError):
    """A hand-over was not possible; the message gives the reason in one line."""


class RankProcess:
    """The parent's end of the process of one rank."""

    def __init__(self, program: Sequence[str]) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
        )
        self._buffered = b""

    def ask(self, do: str, deadline: float, **arguments: Any) -> Any:
        """Send an order and wait for its answer until ``deadline`` (``time.monotonic``). Raises PairError: no answer in
        time, the process has ended, or it answers with an error."""
        self.order(do, **arguments)
        return self.answer(deadline)

    def order(self, do: str, **arguments: Any) -> None:
        """Send an order; ``answer`` takes its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # ``answer`` reports the end
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """The next answer. Raises PairError as ``ask`` does."""
        answer = self._line(deadline)
        if "error" in answer:
            raise PairError(answer["error"])
        return answer["ok"]

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._buffered.partition(b"\n")
            if newline:
                self._buffered = rest
                with suppress(ValueError):  # libraries may print to stdout, too
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise PairError("no answer in time: the process hangs, or the machine is overloaded")
            data = os.read(fd, 1 << 16)
            self._buffered += data
            if not data or len(self._buffered) > MAX_LINE_BYTES:
                status = self._process.wait(10) if not data else "unknown"
                raise PairError(f"its process has ended with status {status}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


class Moved(NamedTuple):
    """One hand-over. ``seconds``: from the request to D's report."""

    nbytes: int
    seconds: float


class RankPair:
    """Two processes that hand prompts over from the first to the second, with a key made for them. Each method may
    raise PairError; ``close`` is then the only call that may follow, or ``start`` with new processes.

    ``host``: the address that control ports and planes listen on. ``program``: the command of a rank's process.
    """

    def __init__(self, host: str, program: Sequence[str] = RANK_PROGRAM) -> None:
        self._host, self._program = host, program
        self._ranks: list[RankProcess] = []
        self._peer, self._serial, self._salt = "", 0, 0

    def start(self, plane: str, device: torch.device, p_form: CacheForm, d_form: CacheForm, deadline: float) -> None:
        """Make caches on both sides and fill those of P, until ``deadline`` (``time.monotonic``). The pair must be new,
        or ``stop`` must come before."""
        while len(self._ranks) < 2:
            self._ranks.append(RankProcess(self._program))
        secret = new_secret()
        for seed, (rank, side, form) in enumerate(zip(self._ranks, ("p", "d"), (p_form, d_form), strict=True)):
            rank.order(
                "start", side=side, plane=plane, device=device_of(device, side), host=self._host, secret=secret,
                seed=seed, form=msgspec.to_builtins(form),
            )  # fmt: skip
        for rank in self._ranks:
            rank.answer(deadline)
        self._peer = self._ranks[0].ask("address", deadline)
        self.fill(deadline)

    def fill(self, deadline: float) -> None:
        """Have another pattern on P, and none on D."""
        self._salt += 1
        p, d = self._ranks
        p.order("fill", salt=self._salt)
        d.ask("clear", deadline)
        p.answer(deadline)

    def hand_over(self, tokens: int, deadline: float) -> Moved:
        """Hand the first ``tokens`` of the prompt over."""
        p, d = self._ranks
        self._serial += 1
        token = base64.b64encode(secrets.token_bytes(16)).decode()
        names = {"request": f"pair {self._serial}", "token": token, "tokens": tokens}
        p.ask("grant", deadline, **names)
        seconds = max(1.0, deadline - time.monotonic() - 1.0)
        loaded = d.ask("load", deadline, peer=self._peer, seconds=seconds, **names)
        if "failed" in loaded:
            raise PairError(loaded["failed"])
        return Moved(loaded["nbytes"], max(1, loaded["microseconds"]) / 1e6)

    def differing(self, tokens: int, deadline: float) -> int:
        """How many bytes on D are not as P wrote them."""
        wrong: int = self._ranks[1].ask("differing", deadline, salt=self._salt, tokens=tokens)
        return wrong

    def stop(self, deadline: float) -> None:
        """End the ranks; their processes can start others."""
        for rank in reversed(self._ranks):
            rank.ask("close", deadline)

    def close(self) -> None:
        """End the processes."""
        while self._ranks:
            self._ranks.pop().close()


def device_of(device: torch.device, side: str) -> str:
    """P takes the first GPU, and D another one where there is one."""
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{1 if side == 'd' and torch.cuda.device_count() > 1 else 0}"
