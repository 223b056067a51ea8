"""A pair of ranks, P's and D's, with a key made for them."""

from __future__ import annotations

import base64
import secrets
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from kvferry.cli.rank_pair.form import CacheForm
from kvferry.cli.rank_pair.process import PairError, RankProcess
from kvferry.transport.control.keys import new_secret

RANK_PROGRAM = (sys.executable, "-m", "kvferry.cli.rank_pair.rank")


class Moved(NamedTuple):
    """One hand-over. ``seconds``: from the request to D's report."""

    nbytes: int
    seconds: float


class RankPair:
    """Two processes that hand prompts over from the first to the second. Each method may raise PairError: a process has
    ended, or does not answer in time; ``close`` is then the only call that may follow, or ``start`` with new processes.

    Args:
        host: the address that control ports and planes listen on.
        program: the command of a rank's process.
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
        sides = zip(self._ranks, ("p", "d"), (p_form, d_form), strict=True)
        for seed, (rank, side, form) in enumerate(sides):
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
        names = {
            "request": f"pair {self._serial}", "token": base64.b64encode(secrets.token_bytes(16)).decode(),
            "tokens": tokens,
        }  # fmt: skip
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
