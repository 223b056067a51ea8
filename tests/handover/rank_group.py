"""The ranks and processes of one test."""

from __future__ import annotations

from typing import Any

from tests.support.rank_process import RemoteRank
from tests.support.ranks import Rank


class RankGroup:
    """Makes ranks for one test."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.processes: list[RemoteRank] = []

    def rank(self, **options: Any) -> Rank:
        rank = Rank(**options)
        self.ranks.append(rank)
        return rank

    def process(self, **options: Any) -> RemoteRank:
        process = RemoteRank(**options)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.close()
        for rank in self.ranks:
            rank.close()
