"""The self-test's rank with a small cache, and on demand with a fault: ``python odd_rank.py FAULT SIDE PLANE``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from kvferry.connector.doctor import self_test_rank as rank

rank.BLOCKS = 8
rank.TOKENS = rank.BLOCKS * rank.BLOCK_TOKENS
FAULT = sys.argv[1]


class OddRank(rank.SelfTestRank):
    """A rank that does one thing wrong, over the plane ``shm``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fault = FAULT if options["plane"] == "shm" else ""

    def do_fill(self, salt: int) -> None:
        super().do_fill(salt)
        if self.fault == "flip":
            self.caches[rank.NAMES[-1]].view(torch.uint8).view(-1)[12345] ^= 1

    def do_grant(self, request: str, token: str) -> None:
        if self.fault == "die":
            os._exit(3)
        if self.fault != "no lease":
            super().do_grant(request, token)

    def do_differing(self, salt: int) -> int:
        if self.fault == "hang":
            time.sleep(600)
        return super().do_differing(salt)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank.SelfTestRank = OddRank  # type: ignore[misc]
    rank.main()
