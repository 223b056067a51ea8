"""D's half of plane ``nixl``: its slots, the Ps that it reads from, and its READs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvferry.transport.channels import Channel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.planes.nixl_agent import NixlAgent, NixlRead
from kvferry.transport.planes.nixl_channels import NixlRecvChannel, Ready
from kvferry.transport.planes.nixl_messages import NixlReply
from kvferry.transport.planes.nixl_source import NixlSource, SourcePhase

if TYPE_CHECKING:
    from kvferry.transport.staging import SlotPool

_LOOK_SECONDS = (50e-6, 2e-3)
"""D looks at its READs after a part of the time since the last one ended, within these bounds."""
_LOOK_PART = 1 / 2
_MOST_PEERS = 256
"""Peers without a channel whose connections D keeps."""
_USE_BYTES = 8


@dataclass(slots=True)
class Fetch:
    """A message that D reads: first its bytes into ``slot``, then, once they are there, the number of the use of P's
    slot. The bytes are the message only if P has not begun a new use of the slot before they had been read."""

    read: NixlRead
    slot: Slot
    channel: NixlRecvChannel
    source: NixlSource
    ready: Ready
    checking: bool = False
    retired: bool = False


class NixlReads:
    """``channels`` are those of the plane, in the order in which they are served; ``pool`` are D's slots."""

    def __init__(self, agent: NixlAgent, pool: SlotPool, channels: dict[Channel, None]) -> None:
        self._pool = pool
        self.sources: dict[str, NixlSource] = {}
        self.fetches: list[Fetch] = []
        """READs under way, in the order in which they began."""
        self._agent, self._channels = agent, channels
        self._uses_seen = torch.zeros(pool.capacity, dtype=torch.int64)
        self._prepared = False
        self._moved_at = 0.0

    def prepare(self) -> None:
        """Allocate and register the slots.

        Raises:
            TransportError: there is no memory, or NIXL refused.
        """
        if not self._prepared:
            self._pool.prepare()
            assert self._pool.slab is not None
            self._agent.start()
            self._agent.register(self._pool.slab)
            self._agent.register(self._uses_seen.view(torch.uint8))
            self._prepared = True

    # --- the Ps -----------------------------------------------------------------------------------------------------

    def join(self, channel: NixlRecvChannel, reply: NixlReply) -> None:
        """P has replied: the channel reads from that P.

        Raises:
            PlaneUnavailableError: this P cannot be read from now.
            ProtocolError: the reply is damaged.
        """
        if zlib.crc32(b"".join(reply.metadata)) != reply.checksum:
            raise ProtocolError("nixl reply: the metadata is damaged")
        source = self.sources.get(reply.agent)
        if source is not None and source.phase is SourcePhase.BROKEN:
            raise PlaneUnavailableError("nixl: the last connection to this P is not closed yet")
        if source is not None and (source.slots, source.checksum) != (reply.slots, reply.checksum):
            raise PlaneUnavailableError("nixl: another P has the agent name of this one")
        if source is None:
            try:
                for metadata in reply.metadata:
                    self._agent.load(reply.agent, metadata)
            except TransportError as error:
                self._agent.forget(reply.agent)
                raise PlaneUnavailableError(str(error)) from None
            self._agent.connect(reply.agent)
            source = self.sources[reply.agent] = NixlSource(reply.agent, reply.slots, reply.checksum)
        source.join()
        channel.source = source

    def leave(self, channel: NixlRecvChannel, *, lives_on: bool) -> None:
        """A channel has ended: its READs under way keep their slots until they end. ``lives_on``: P's process has not
        ended."""
        for fetch in self.fetches:
            if fetch.channel is channel and not fetch.retired:
                fetch.retired = True
                self._pool.retire(fetch.slot)
        if channel.source is not None:
            channel.source.leave(lives_on=lives_on)
            self._tidy(channel.source)

    def _break(self, source: NixlSource, reason: str) -> None:
        """The connection to a P has broken: all of its channels fail."""
        source.break_off()
        for channel in [c for c in self._receivers() if c.source is source]:
            channel.fail(reason)

    def _tidy(self, source: NixlSource) -> None:
        """Close the connection to a P that is to be closed; or the oldest that is unused, if there are many."""
        if self.sources.get(source.agent) is not source:
            return
        if source.phase is not SourcePhase.CLOSED and source.unused:
            self.sources[source.agent] = self.sources.pop(source.agent)
            unused = [found for found in self.sources.values() if found.unused]
            if len(unused) > _MOST_PEERS:
                source = unused[0]
                source.discard()
        if source.phase is SourcePhase.CLOSED:
            self._agent.forget(source.agent)
            del self.sources[source.agent]

    # --- READs ------------------------------------------------------------------------------------------------------

    def _receivers(self) -> Iterable[NixlRecvChannel]:
        return (channel for channel in self._channels if isinstance(channel, NixlRecvChannel))

    @property
    def may_begin(self) -> bool:
        """Whether a message waits that could be read now."""
        return bool(self._pool.free) and any(channel.may_fetch for channel in self._receivers())

    def begin(self) -> bool:
        """Begin to READ as many messages as there are slots for; the channels take turns."""
        began = False
        for channel in [c for c in self._receivers() if c.may_fetch]:
            while self._pool.free and (ready := channel.next_ready()) is not None:
                began = True
                source, slot = channel.source, self._pool.take()
                assert source is not None and slot is not None
                address = source.slots.address + ready.slot * source.slots.slot_bytes
                try:
                    read = self._agent.read(slot.tensor[: ready.nbytes], source.agent, address, source.slots.device)
                except TransportError as error:
                    self._pool.put(slot)
                    self._break(source, str(error))
                    break
                source.begin_read()
                self.fetches.append(Fetch(read, slot, channel, source, ready))
                self._moved_at = time.monotonic()
            if channel in self._channels:
                self._channels[channel] = self._channels.pop(channel)
        return began

    def look(self) -> bool:
        """Take the READs that have ended a step further. READs from one P end nearly in the order in which they began,
        and each look costs a call of UCX: those behind one that is under way are not looked at."""
        moved = False
        waiting: set[NixlSource] = set()
        for fetch in list(self.fetches):
            ended = None if fetch.source in waiting else fetch.read.ended()
            if ended is None:
                if not fetch.retired:  # which may never end, while P serves other channels
                    waiting.add(fetch.source)
                continue
            moved = True
            self.fetches.remove(fetch)
            if ended and self._goes_on(fetch):
                self.fetches.append(fetch)
            else:
                self._finish(fetch, ok=ended)
        if moved:
            self._moved_at = time.monotonic()
        return moved

    def look_in(self) -> float:
        """Seconds until the next look; 0 while no READ is under way."""
        if not self.fetches:
            return 0.0
        least, most = _LOOK_SECONDS
        return min(most, max(least, (time.monotonic() - self._moved_at) * _LOOK_PART))

    def _goes_on(self, fetch: Fetch) -> bool:
        """The bytes are here: begin to READ the number of the slot's use. ``False``: that is not needed, or done."""
        if fetch.checking or fetch.retired or fetch.channel.error is not None:
            return False
        seen = self._uses_seen[fetch.slot.index :][:1].view(torch.uint8)
        source = fetch.source
        try:
            fetch.read = self._agent.read(seen, source.agent, source.slots.uses + _USE_BYTES * fetch.ready.slot, None)
        except TransportError as error:
            self._break(source, str(error))
            return False
        fetch.checking = True
        return True

    def _finish(self, fetch: Fetch, *, ok: bool) -> None:
        """No READ of this message is under way any more."""
        channel, source = fetch.channel, fetch.source
        if ok and fetch.checking and channel.error is None and not channel.closed:
            if int(self._uses_seen[fetch.slot.index]) == fetch.ready.use:
                source.end_read()
                channel.fetched(fetch.slot, fetch.ready)
                return
            channel.fail("nixl: the producer gave the slot of a message to another one")
        (self._pool.revive if fetch.retired else self._pool.put)(fetch.slot)
        if not ok:
            self._break(source, "nixl: a READ failed: the producer is gone")
        source.end_read()
        self._tidy(source)

    def end_all(self) -> None:
        """NIXL has ended all READs."""
        for fetch in self.fetches:
            self._pool.revive(fetch.slot)
        self.fetches.clear()
        self.sources.clear()
