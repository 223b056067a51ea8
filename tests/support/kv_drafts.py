"""KVBytes for engines whose model has a head that drafts: its KV is computed after the step's tokens are sampled.

POST /collective_rpc {"method": "drafted"}       the drafts of each step since the last call, each for one request
"""

from __future__ import annotations

from typing import Any

from tests.support.kv_bytes import KVBytes


class KVDrafts(KVBytes):
    """Records are made when a step has drafted; also what it has drafted."""

    _kvd_drafted: list[list[int]]
    _kvd_step: Any = None

    def kv_watch(self) -> dict[str, Any]:
        told = super().kv_watch()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if "_kvd_drafted" not in self.__dict__:
            self._kvd_drafted = []
            sample, take = runner.sample_tokens, runner.take_draft_token_ids

            def sample_tokens(*args: Any, **kwargs: Any) -> Any:
                result = sample(*args, **kwargs)
                super(KVDrafts, self)._kvb_after(self._kvd_step)
                return result

            def take_draft_token_ids() -> Any:
                drafts = take()
                if drafts is not None:
                    self._kvd_drafted += [list(ids) for ids in drafts.draft_token_ids]
                return drafts

            runner.sample_tokens, runner.take_draft_token_ids = sample_tokens, take_draft_token_ids
        return told

    def drafted(self) -> list[list[int]]:
        found, self._kvd_drafted = self._kvd_drafted, []
        return found

    def _kvb_after(self, step: Any) -> None:
        self._kvd_step = step
