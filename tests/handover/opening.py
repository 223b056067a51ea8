"""How a hand-over of one rank to another begins: a prompt in scattered blocks, a lease on P, a load on D."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.ranks import Rank, grant, load_plan, peer, wait
from tests.transport.plane_list import PULL, PUSH, host_planes

TOKENS, THEIRS, OURS = 100, [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
"""A prompt, and its blocks on P and on D."""
PLANES = host_planes(PUSH, PULL)
"""Those of caches in host memory."""


def begin(
    p: Rank, d: Rank, name: str = "req",
    tokens: int = TOKENS, theirs: Sequence[int] = THEIRS, ours: Sequence[int] = OURS,
) -> bytes:  # fmt: skip
    """Lease a prompt on P as ``name-p`` and load it on D as ``name-d``; the token."""
    token = grant([p], f"{name}-p", theirs, tokens)
    d.worker.post(load_plan(f"{name}-d", token, peer([p]), ours, 0, tokens))
    return token


def another_works(p: Rank, d: Rank) -> None:
    """One more hand-over of what P was filled with: every byte arrives, and the lease ends."""
    begin(p, d, "again")
    assert wait(lambda: "again-d" in d.received and "again-p" in p.sent, [p, d])
    assert "again-d" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
