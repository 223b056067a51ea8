"""A rank of a pair with a fault on some planes."""

from __future__ import annotations

import os
import signal

import torch

from kvferry.cli.rank_pair import CacheForm, PairRank


class OddRank(PairRank):
    """P has a flipped bit over ``shm``, and ends when it is to lease over ``tcp``."""

    def __init__(self, side: str, plane: str, device: str, host: str, secret: str, seed: int, form: CacheForm) -> None:
        super().__init__(side, plane, device, host, secret, seed, form)
        self.plane = plane

    def fill(self, salt: int) -> None:
        super().fill(salt)
        if self.plane == "shm":
            list(self.caches.values())[-1].transpose(1, 2).view(torch.uint8).view(-1)[12345] ^= 1

    def grant(self, request: str, token: bytes, tokens: int) -> None:
        if self.plane == "tcp":
            os.kill(os.getpid(), signal.SIGKILL)
        super().grant(request, token, tokens)
