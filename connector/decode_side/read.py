"""All reads of a rank of D: asks P, announces chunks to the channels, unpacks them, and copies P's pages.

P sends the bytes, or D copies P's pages by itself. Of a read that was stopped the channel drops what still arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from kvferry.connector.decode_side.fetch import Fetch, FetchState, PageWrite, RankRead, ReadPhase
from kvferry.connector.decode_side.link import Link, LinkPhase, Reason
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.span_read import Side, SpanRead
from kvferry.connector.geometry.byte_ranges import pages_of
from kvferry.connector.geometry.rank_geometry import KEEPS_ALL, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.geometry.spans import Span, check_spans
from kvferry.connector.pages.caches import PageBox
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.step_plan import RankAddress, unpack_ids
from kvferry.transport.channels import Copy, Received
from kvferry.transport.errors import GeometryError, ProtocolError, shortened

UNPACKS_PER_TURN = 4
"""Messages that the thread unpacks before it looks at control messages again."""
_DENIED: dict[messages.DenyReason, FailureKind] = {
    "expired": "expired",
    "unknown": "expired",
    "bounds": "denied",
    "detached": "peer_lost",
    "failed": "data",
}
ReadReply = messages.Grant | messages.Deny | messages.Committed


class Reads:
    """The reads of this rank, until the end of their attempt, or of their link. Where something has happened to a
    read, the caller tells its load. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, renewals: LeaseRenewals) -> None:
        self._rank_context, self._caches, self._log = rank_context, rank_context.caches, rank_context.log
        self._renewals = renewals
        self.by_number: dict[int, RankRead] = {}
        self._by_link: dict[Link, dict[RankRead, None]] = {}
        self._last = 0
        self.arrived: deque[tuple[Link, Received]] = deque()
        """Messages that wait to be unpacked."""
        self.writes: dict[PageWrite, None] = {}
        """The copies into D's pages that are under way, or whose end is not handled yet."""
        self._moving = False  # a copy by a plane has just begun or moved bytes
        self._moves = 0  # how often bytes of any read came into D's pages

    def new(self, fetch: Fetch, link: Link, address: RankAddress, now: float) -> None:
        """A new read of a load, from the P rank at ``address``."""
        self._last = number = (self._last + 1) % (1 << 32)
        read = RankRead(number, fetch, link, address, [(now, ReadPhase.WAITING)])
        self.by_number[number] = read
        self._by_link.setdefault(link, {})[read] = None
        link.users += 1
        fetch.reads.append(read)

    def through(self, link: Link) -> list[RankRead]:
        """All reads over a link."""
        return list(self._by_link.get(link, ()))

    def forget(self, read: RankRead) -> None:
        """The attempt or the link has ended."""
        if self.by_number.pop(read.number, None) is None:
            return
        read.link.users -= 1
        reads = self._by_link[read.link]
        del reads[read]
        if not reads:
            del self._by_link[read.link]

    def others_move(self, read: RankRead) -> bool:
        """Whether another read over the link of a read goes on, and has made progress since this one did."""
        others = self._by_link.get(read.link, ())
        return any(other.moved > read.moved and not other.stopped and not other.landed for other in others)

    # --- ask and grant ------------------------------------------------------------------------------------------

    def ask(self, read: RankRead, now: float) -> None:
        """Begin with the grant that P has posted for the planned spans, or ask P for them."""
        grant = self._posted_grant(read)
        if grant is not None:
            read.asked(now)
            self.take_grant(read, grant, now)
            return
        load = read.fetch.load
        read.link.send(
            messages.Ask(
                read=read.number,
                token=load.token,
                decode_engine=self._renewals.decode_engine,
                decode_rank=self._renewals.rank,
                expected=self._renewals.expected(load.peer, read.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.chunk_bytes,
                prefix=load.prefix,
            )
        )
        try:
            self.expect(read)
        except GeometryError as error:
            read.fail(Reason("incompatible", str(error)))
        except Exception as error:  # some chunks may be announced: the read must be cancelled, not forgotten
            self._log.exception("announce", "kvferry: chunks of %s could not be announced", load.request_id)
            read.fail(Reason("internal", repr(error)))
        read.asked(now)

    def _posted_grant(self, read: RankRead) -> messages.Grant | None:
        """The grant on P's grant board, where P has posted it. Then D needs no ask, nor a commit of P."""
        board = read.link.board
        note = None if board is None else board.find(read.fetch.load.token)
        if note is None:
            return None
        try:
            grant = messages.decode_grant(note.text)
            spans, theirs = [item.span for item in read.planned], read.link.theirs
            check_spans(spans, theirs, grant.num_tokens)
            for span in spans:
                region = theirs.regions[span.region]
                if region.kind not in KEEPS_ALL:
                    _check_held(span, region, grant.block_ids)
        except (ProtocolError, GeometryError):
            return None  # P's answer to an ask will contain the reason
        read.note = note
        return grant

    def expect(self, read: RankRead) -> None:
        """Where P sends the bytes: announce the chunks that D has just asked for.

        D does not cut them before the ask, because cutting takes as long as the ask takes to reach P. D does not cut
        them later, because the first chunk may arrive before the grant, which comes by another socket.

        Raises:
            GeometryError: a chunk of one token does not fit into a slot.
        """
        channel = read.link.channel
        if channel is None or channel.pulls:
            return
        regions = read.link.theirs.regions
        stop = max(item.span.token + item.span.num_tokens for item in read.planned)
        for item in read.planned:
            theirs, whole = regions[item.span.region], self._box(read, item)
            convert = (item.region, item.span.region) in read.link.converted
            read.boxes.extend(self._caches.cut(whole, item.span, read.chunk_bytes, theirs, convert=convert))
            if item.span.token + item.span.num_tokens < stop:
                read.last_step = len(read.boxes)
        for chunk, box in enumerate(read.boxes):
            tag = read.tag(chunk)
            read.tags.add(tag)
            into = partial(self._caches.pieces, box) if self._caches.in_pieces(box) else None
            channel.expect(tag, self._caches.nbytes(box), into)

    def take_grant(self, read: RankRead, grant: messages.Grant, now: float) -> bool:
        """Check a grant, and begin to copy P's pages where D reads them by itself. Returns whether it means anything to
        the load."""
        pulls, load = read.link.pulls, read.fetch.load
        if not read.awaits_grant:  # where P computes the prompt, this is a sign of life
            return read.phase is ReadPhase.MOVING and not pulls
        try:
            if load.digest and grant.digest != load.digest:
                self._renewals.disown(load.token, load.request_id)
                says = "the prefill engine's lease is of another prompt than the request's parameters name"
                read.fail(Reason("other_prompt", says))
                return True
            self.check_grant(read, grant)
            read.take_grant(now)
            if pulls:
                self.begin_pull(read, grant, now)
        except GeometryError as error:
            read.fail(Reason("data", str(error)))
        except Exception as error:  # an error of one copy fails one request
            self._log.exception(
                "pull", "kvferry: %s could not be read from the prefill engine's pages", load.request_id
            )
            read.fail(Reason("internal", repr(error)))
        return True

    def check_grant(self, read: RankRead, grant: messages.Grant) -> None:
        """Check that a grant fits D's ask.

        Raises:
            GeometryError: it does not.
        """
        if grant.chunks != len(read.boxes):
            raise GeometryError(
                f"the prefill engine grants {grant.chunks} chunks, the decode engine asked for {len(read.boxes)}"
            )
        if read.link.pulls and (highest := max(item.span.region for item in read.planned)) >= len(grant.block_ids):
            raise GeometryError(
                f"the prefill engine grants blocks of {len(grant.block_ids)} regions, the decode engine asked "
                f"for region {highest}"
            )

    def begin_pull(self, read: RankRead, grant: messages.Grant, now: float) -> None:
        """Begin to copy the pages of a grant.

        Raises:
            GeometryError: the granted blocks do not cover the spans.
        """
        channel = read.link.channel
        assert channel is not None and channel.pulls
        sides = [self._sides(read, planned, grant) for planned in read.planned]
        copy = channel.read(SpanRead(self._caches, sides, alone=self._alone(read)))
        self._begin_write(PageWrite(read, copy, sum([self._caches.nbytes(box) for box, _ in sides])), now)

    def _sides(self, read: RankRead, planned: PlannedSpan, grant: messages.Grant) -> Side:
        """A span as a box of D's pages and as P's pages."""
        span = planned.span
        theirs = pages_of(read.link.pages[span.region], unpack_ids(grant.block_ids[span.region]), span, planned.shard)
        return self._box(read, planned), theirs

    def _box(self, read: RankRead, item: PlannedSpan) -> PageBox:
        ids = read.fetch.ids[item.region]
        return self._caches.box(item.span, item.region, item.layer, item.head, ids, item.shard)

    def _alone(self, read: RankRead) -> bool:
        """Whether this is the only read, and the engine is not about to compute."""
        return read.fetch.alone and len(self.by_number) == 1 and not read.fetch.load.now

    def _begin_write(self, write: PageWrite, now: float) -> None:
        """A copy into D's pages has begun."""
        self.writes[write] = None
        write.read.write_began(write, now)

    # --- messages of P ------------------------------------------------------------------------------------------

    def reply(self, link: Link, reply: ReadReply, now: float) -> RankRead | None:
        """Handle a message of P about a read. Returns the read where it means anything to its load."""
        read = self.by_number.get(reply.read)
        if read is None or read.link is not link:
            return None  # a message for a read that has ended
        match reply:
            case messages.Grant():
                if link.pulls and read.awaits_grant and (grant := self._posted_grant(read)) is not None:
                    read.fetch.granted_at = self._rank_context.clock()  # posted since D has asked
                    reply = grant
                if not self.take_grant(read, reply, now):
                    return None
            case messages.Deny():
                detail = f": {shortened(reply.detail)!r}" if reply.detail else ""
                if reply.reason == "detached":
                    link.lose_session(shortened(reply.detail))
                says = f"the prefill engine denied the read, {reply.reason}{detail}"
                read.fail(Reason(_DENIED[reply.reason], says))
            case messages.Committed():
                if read.fetch.state is not FetchState.COMMITTING or not read.granted:
                    return None  # D has not asked
                self._answered(read, reply.ok, now)
        return read

    # --- commit and stop ----------------------------------------------------------------------------------------

    def commit(self, read: RankRead, now: float) -> None:
        """Find out whether the lease stood until the last byte was read. Either P sent the bytes itself, and P sends
        nothing under a lease that has ended; or the grant that P posted on its grant board still stands; or P says so.
        """
        if not read.granted:  # P sent the bytes, but which prompt they are of, the grant says
            return
        if read.note is not None:
            self._answered(read, read.grant_stands, now)
        elif read.planned and read.link.pulls:
            read.link.send(messages.Commit(read=read.number, token=read.fetch.load.token))
        else:
            read.prove(now)

    def _answered(self, read: RankRead, ok: bool, now: float) -> None:
        """``ok``: the lease stood after the last byte was read."""
        if ok:
            read.prove(now)
        elif read.phase is ReadPhase.LANDED:
            self._rank_context.stats.count("num_stale_reads")
            read.fail(Reason("expired", "the lease ended before the read was committed"))

    def stop(self, read: RankRead, now: float) -> None:
        """Let no channel write D's pages for this read, and ask P to stop sending. A copy that cannot be cancelled goes
        on: ``finished_writes`` yields its read when it has ended."""
        if read.stop(now):
            try:
                self._cancel(read)
            except Exception as error:
                self._log.exception("CancelRead", "kvferry: unexpected error in CancelRead of read %d", read.number)
                self._rank_context.stats.failed("internal")
                read.link.fail("internal", repr(error))
                read.link.detach()  # a closed channel writes no page

    def _cancel(self, read: RankRead) -> None:
        channel = read.link.channel
        if channel is not None and channel.pulls:
            for write in list(read.writes):
                channel.cancel(write.copy)
                if write.copy.done:
                    del self.writes[write], read.writes[write]
        elif channel is not None:
            while read.tags:
                channel.forget(read.tags.pop())
        if read.link.phase is LinkPhase.ATTACHED:
            read.link.send(messages.Cancel(read=read.number))

    # --- bytes --------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked, or a plane is copying pages."""
        return bool(self.arrived) or self._moving

    def collect(self, now: float) -> Iterator[RankRead]:
        """Unpack some of the messages that have arrived, and check the copies under way. Yields the reads to which
        something has happened."""
        for link in self._by_link:
            channel = link.channel
            if channel is not None and not channel.pulls and link.phase is LinkPhase.ATTACHED:
                self.arrived.extend([(link, message) for message in channel.poll()])
        for _ in range(min(UNPACKS_PER_TURN, len(self.arrived))):
            link, message = self.arrived.popleft()
            read = self.by_number.get(message.tag >> 32)
            if read is None or read.link is not link or message.tag not in read.tags:
                message.release()
            else:
                self._unpack(read, message, now)
                yield read
        self._moving = False
        if not self.writes:
            return
        yield from self.finished_writes(now)
        for write in [write for write in self.writes if not write.copy.on_stream]:
            read, before, write.seen = write.read, write.seen, write.copy.moved
            if write.seen != before:
                self._moving = True
                if not read.stopped:
                    self.count(read, write.seen - (before or 0))
                    yield read

    def finished_writes(self, now: float) -> Iterator[RankRead]:
        """The reads of which copies into D's pages have ended."""
        for write in [write for write in self.writes if write.copy.done]:
            if write not in self.writes:  # an earlier event has cancelled its read
                continue
            del self.writes[write]
            if write.message is not None:
                write.message.release()
            read, failure = write.read, write.failure()
            if failure is not None and write.message is None and write.copy.peer_lost:
                read.link.lose_plane(failure.text)  # D reads P's pages by itself, and cannot any more
            fetch = read.fetch
            for other in self.writes:  # copies follow each other
                if other.read.fetch is not fetch:
                    other.read.fetch.posted.begins_again(self._rank_context.clock())
            fetch.copied_at = max(fetch.copied_at, write.copy.ended_at)
            if failure is None and not read.stopped:
                self.count(read, write.nbytes - (write.seen or 0))
            read.write_ended(write, failure, now)
            yield read

    def count(self, read: RankRead, nbytes: int) -> None:
        """Count bytes of a read that have come into D's pages."""
        if nbytes:
            self._moves += 1
            read.moved = self._moves
            read.fetch.nbytes += nbytes

    def _unpack(self, read: RankRead, message: Received, now: float) -> None:
        """Begin to copy a message into D's pages. It is released when the copy has ended, or here."""
        read.tags.discard(message.tag)
        chunk = message.tag & 0xFFFFFFFF
        if chunk >= read.last_step:
            read.last_step_at = min(read.last_step_at, now)
        box = read.boxes[chunk]
        nbytes = self._caches.nbytes(box)
        if message.nbytes != nbytes:
            message.release()
            read.fail(Reason("data", f"chunk {chunk} has {message.nbytes} bytes, expected {nbytes}"))
            return
        try:
            if message.placed:
                copy = Copy(done=True)
            else:
                copy = self._caches.unpack(message.address, box, message.device, alone=self._alone(read))
        except Exception as error:  # an error of one copy fails one request
            message.release()
            name = read.fetch.load.request_id
            self._log.exception("unpack", "kvferry: a chunk of %s could not be unpacked", name)
            read.fail(Reason("internal", repr(error)))
        else:
            self._begin_write(PageWrite(read, copy, nbytes, message), now)


def _check_held(span: Span, region: RegionGeometry, block_ids: Sequence[bytes]) -> None:
    """Check that P has freed none of the blocks of ``span``, as P checks an ask. Raises GeometryError."""
    ids = unpack_ids(block_ids[span.region]) if span.region < len(block_ids) else unpack_ids(b"")
    start, stop = region.shard.count(span.token), region.shard.count(span.token + span.num_tokens)
    last = -(-stop // region.block_size)
    if len(ids) < last or not ids[start // region.block_size : last].all():
        raise GeometryError(f"tokens from {span.token} on are needed, the peer has freed some of their blocks")
