"""vLLM worker extensions that also say in how many portions the loads inside steps came, and have them fail.

POST /collective_rpc {"method": "kv_portions", "args": ["1"]}       once; portions of so many bytes at least
POST /collective_rpc {"method": "kv_portions_seen"}                 of each read that could be cut since the last call
POST /collective_rpc {"method": "kv_fail_inside"}                   until it is called again: before a byte is copied
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support.kv_bytes import KVBytes
from tests.support.kv_heads import KVHeads


class _Portions:
    def kv_portions(self, nbytes: str = "") -> list[int]:
        """Begin to count. ``nbytes``: in place of the bounds of ``geometry.portions``."""
        from kvferry.connector.decode_side import read
        from kvferry.connector.decode_side.span_read import cut_read
        from kvferry.connector.geometry import portions

        if nbytes:
            portions.HOST_PORTION_BYTES = portions.GPU_PORTION_BYTES = int(nbytes)
        seen: list[int] = []

        def counted(*args: Any, **options: Any) -> Any:
            found = cut_read(*args, **options)
            seen.append(len(found))
            return found

        mock.patch.object(read, "cut_read", counted).start()
        self._portions_seen = seen
        return []

    def kv_portions_seen(self) -> list[int]:
        """A read that cannot be cut, because no forward has waited for layers before, is not among them."""
        found = list(self._portions_seen)
        self._portions_seen.clear()
        return found

    def kv_fail_inside(self) -> list[int]:
        """Loads beside the steps are as ever."""
        from kvferry.connector.decode_side.read import Reads

        if "_portions_planted" in self.__dict__:
            self.__dict__.pop("_portions_planted").stop()
            return []
        begin = Reads.begin_pull

        def begin_pull(reads: Any, read: Any, *args: Any) -> Any:
            if read.active_load.load.now:
                raise RuntimeError("planted")
            return begin(reads, read, *args)

        self._portions_planted = mock.patch.object(Reads, "begin_pull", begin_pull)
        self._portions_planted.start()
        return []


class KVPortions(_Portions, KVBytes):
    """With digests of whole layers."""


class KVHeadPortions(_Portions, KVHeads):
    """With digests of each head."""
