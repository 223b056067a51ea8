"""A rank of a pair, on demand with a fault: ``python odd_rank.py FAULT``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from kvferry.cli import rank_process as rank

FAULT = sys.argv[1]


class OddRank(rank.PairRank):
    """A rank that does one thing wrong, over the plane ``shm``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fault = FAULT if options["plane"] == "shm" else ""

    def do_fill(self, salt: int) -> None:
        super().do_fill(salt)
        if self.fault == "flip":
            self.caches[self.form.names[-1]].view(torch.uint8).view(-1)[12345] ^= 1

    def do_grant(self, request: str, token: str, tokens: int) -> None:
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault != "no lease":
            super().do_grant(request, token, tokens)

    def do_differing(self, salt: int, tokens: int) -> int:
        if self.fault == "hang":
            time.sleep(600)
        return super().do_differing(salt, tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank.PairRank = OddRank  # type: ignore[misc]
    rank.main()
