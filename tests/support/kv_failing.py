"""A vLLM worker extension that has the loads inside steps fail.

POST /collective_rpc {"method": "kv_fail_inside"}                   until it is called again: before a byte is copied
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support.kv_bytes import KVBytes


class KVFailing(KVBytes):
    def kv_fail_inside(self) -> list[int]:
        """Loads beside the steps are as ever."""
        from kvferry.connector.decode_side.read import Reads

        if "_planted" in self.__dict__:
            self.__dict__.pop("_planted").stop()
            return []
        begin = Reads.begin_pull

        def begin_pull(reads: Any, read: Any, *args: Any) -> Any:
            if read.active_load.load.now:
                raise RuntimeError("planted")
            return begin(reads, read, *args)

        self._planted = mock.patch.object(Reads, "begin_pull", begin_pull)
        self._planted.start()
        return []
