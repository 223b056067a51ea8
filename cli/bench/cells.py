"""Hand-overs of a pair of ranks over one data plane after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvferry.cli.rank_pair.form import CacheForm
from kvferry.cli.rank_pair.pair import RankPair
from kvferry.cli.rank_pair.process import PairError

PLANE_SECONDS, HANDOVER_SECONDS = 120.0, 60.0
"""Bounds on the start of two ranks, and on one hand-over with the check of its bytes."""


class Cell(NamedTuple):
    """Hand-overs of one prompt length over one plane. ``seconds``: of each, in the order in which they were made.
    ``wrong``: how many bytes of the first one were not P's."""

    plane: str
    tokens: int
    nbytes: int
    seconds: list[float]
    wrong: int = 0


class PlaneFailedError(Exception):
    """A plane could not be measured; the message names it and gives the reason in one line."""


def measure(
    pair: RankPair, plane: str, device: torch.device, forms: tuple[CacheForm, CacheForm], prompts: Sequence[int],
    rounds: int, advance: Callable[[], None],
) -> list[Cell]:  # fmt: skip
    """The cells of one plane, each after one hand-over that is not counted and whose bytes are compared.

    Args:
        forms: of P's and D's caches.
        prompts: lengths in tokens, at most those of the forms.
        advance: called after each hand-over.

    Raises:
        PlaneFailedError: it cannot be measured. The pair is closed then.
    """

    def deadline() -> float:
        return time.monotonic() + HANDOVER_SECONDS

    try:
        pair.start(plane, device, *forms, time.monotonic() + PLANE_SECONDS)
        cells = []
        for tokens in prompts:
            nbytes = pair.hand_over(tokens, deadline()).nbytes
            cell = Cell(plane, tokens, nbytes, [], pair.differing(tokens, deadline()))
            advance()
            for _ in range(rounds):
                cell.seconds.append(pair.hand_over(tokens, deadline()).seconds)
                advance()
            cells.append(cell)
        pair.stop(deadline())
        return cells
    except PairError as error:
        pair.close()
        raise PlaneFailedError(f"{plane}: {error}") from None
