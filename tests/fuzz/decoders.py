"""Every decoder of bytes that a peer, a router or a file chooses, as a function of bytes, with valid inputs."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import zmq

from kvferry.connector.config import Settings
from kvferry.connector.geometry.byte_ranges import check_layouts
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.geometry.spans import check_spans
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.connector.pages.rank_context import check_model
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire import messages
from kvferry.connector.wire.params import (
    RemotePrompt,
    check_reachable,
    from_transfer_params,
    lookup_of,
    prompt_of_answer,
    to_transfer_params,
)
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    LeftAnswer,
    Load,
    PeerEngine,
    Prefill,
    PrefillChunk,
    PrefillStop,
    PromptLookup,
    RankAddress,
    StepPlan,
    UnneededLease,
    by_region,
    pack_ids,
    unpack_ids,
)
from kvferry.transport import grant_board
from kvferry.transport.control.key_file import read_key_file
from kvferry.transport.control.keys import Keys, new_secret, raw_key
from kvferry.transport.control.stream import Shared, Stream, StreamEndedError
from kvferry.transport.errors import (
    ConfigError,
    GeometryError,
    IncompatiblePeerError,
    PlaneUnavailableError,
    ProtocolError,
    TransportError,
)
from kvferry.transport.host import AllowedPeers
from kvferry.transport.plane import MAX_PAYLOAD_BYTES, PlaneContext, decode_payload
from kvferry.transport.planes import cma, cuda_ipc, nixl, shm, tcp, ucx
from kvferry.transport.planes import zmq as zmq_plane
from kvferry.transport.planes.lent_files import NAME_PREFIX
from kvferry.transport.planes.pull import MAX_FILE_BYTES, MemoryFileAddress, PullOffer
from kvferry.transport.planes.push import PushReceiver
from kvferry.transport.planes.shm import Arena
from kvferry.transport.planes.socket_plane import SocketAttach
from kvferry.transport.planes.tcp import TcpRecvChannel
from kvferry.transport.planes.tcp_flows import HEADER
from kvferry.transport.wake import Waker
from tests.fuzz.attackers import packed
from tests.fuzz.honest import Decoder, Honest, encode


@contextmanager
def of_live_planes() -> Iterator[list[Decoder]]:
    """The other end of a channel: answers to offers, and what comes over the channel's connection."""
    context = PlaneContext("127.0.0.1", 64 << 10, 1 << 20)
    planes: list[Any] = [tcp.TcpPlane(context), shm.ShmPlane(context), zmq_plane.ZmqPlane(context)]
    for plane in planes:
        plane.offer()
    tcp_plane, shm_plane, zmq_ = planes
    attach = {
        "tcp": encode(SocketAttach(b"k" * 16, 1 << 20)), "shm": encode(SocketAttach(b"k" * 16, 1 << 20)),
        "zmq": encode(zmq_plane.ZmqAttach(1 << 20, 8)),
    }  # fmt: skip

    def accept(plane: Any, data: bytes) -> None:
        channel, _ = plane.accept(data)
        channel.close()

    def received(data: bytes) -> None:
        """D's end of a TCP channel: headers and bytes."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        channel = TcpRecvChannel(tcp_plane, ours, b"", ("", 0), 1)
        channel.connected(ours)
        channel.finish((), [None])
        with theirs:
            for tag in (1, 2, 3):
                channel.expect(tag, 100)
            theirs.send(data[: 64 << 10] or b"\0")
            channel.flows[0].run()
            for message in channel.poll():
                message.release()
            channel.close()

    def records(data: bytes) -> None:
        """Both ends of a shm channel: records of slots."""
        pair = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(2)]
        arena, fd = Arena.create(4096, 2)
        sender, receiver = shm.ShmSendChannel(shm_plane, pair[0][0], arena), shm.ShmRecvChannel(shm_plane, pair[1][0])
        shm_plane.left_bytes -= 2 * 4096
        socket.send_fds(pair[1][1], [shm.GEOMETRY.pack(4096, 2)], [fd])
        os.close(fd)
        receiver.on_readable()
        slot = sender.acquire()
        assert slot is not None
        sender.send(slot, 100, 1)
        receiver.expect(1, 100)
        for peer, end in ((pair[0][1], sender), (pair[1][1], receiver)):
            for at in range(0, min(len(data), 320), 16):
                peer.send(data[at : at + 16])
            end.on_readable()
        for message in receiver.poll():
            message.release()
        for end in (sender, receiver):
            end.close()
        for _, peer in pair:
            peer.close()

    class Silent:
        """A socket that no peer reads."""

        def send(self, *_: Any) -> None:
            return None

    pool = SimpleNamespace(put=lambda slot: None)
    stub = SimpleNamespace(send_pool=pool, recv_pool=pool, copies_frames=False, busy=deque(maxlen=1))

    def credits(data: bytes) -> None:
        """P's end of a zmq channel: hellos and credits."""
        channel = object.__new__(zmq_plane.ZmqSendChannel)
        slot = SimpleNamespace(index=0)
        channel.__dict__.update(_plane=stub, pool=pool, sent={0: slot}, _by_tag={5: (slot, None)}, _fd=None)
        frame: Any = SimpleNamespace(bytes=data, get=lambda name: 7)
        channel.on_message(frame)

    def chunks(data: bytes) -> None:
        """D's end of a zmq channel: heads and bytes, in one to three frames."""
        channel = object.__new__(zmq_plane.ZmqRecvChannel)
        PushReceiver.__init__(channel)
        end = SimpleNamespace(socket=Silent())
        channel.__dict__.update(_plane=stub, window=8, _held=0, _where="", end=end, _waiting=deque())
        channel.expect(1, 3)
        cut = data[0] % 4 if data else 0
        frames = [data[1:18], data[18:21], data[21:]][: max(1, cut)]
        channel.on_message([zmq.Frame(frame) for frame in frames])

    heads = [HEADER.pack(1, 100) + bytes(100) + b"\x01", HEADER.pack(3, 100) + bytes(100) + b"\0"]
    filled = [shm.FILLED.pack(1, 0, 100), shm.FREED.pack(0).ljust(16, b"\0")]
    head = zmq_plane.HEADER
    zmq_messages = [b"\x02" + head.pack(b"m", 1, 3) + b"abc", b"\x01b"]
    plane_errors = (ProtocolError, TransportError, PlaneUnavailableError)
    try:
        yield [
            *(
                Decoder(f"{p.name} attach at P", [attach[p.name]], partial(accept, p), plane_errors, share=share)
                for p, share in ((tcp_plane, 0.2), (shm_plane, 0.2), (zmq_, 0.3))
            ),
            Decoder("tcp messages", [heads[0], heads[1] + heads[0]], received, (), "", 0.15),
            Decoder("shm records", [filled[0], filled[1], b"".join(filled)], records, (), "", 0.05),
            Decoder("zmq credits", [b"h", zmq_plane.CREDIT.pack(b"c", 5)], credits, (), "", 1.0),
            Decoder("zmq messages", zmq_messages, chunks, (ProtocolError,), "", 0.6),
        ]  # fmt: skip
    finally:
        for plane in planes:
            plane.close()


VERSION = messages.PROTOCOL_VERSION.to_bytes(2, "big")


def of_protocol(honest: Honest) -> Iterator[Decoder]:
    """Messages of the control plane, and what P and D check of them."""

    def frames(data: bytes) -> list[bytes]:
        return [messages.MAGIC, VERSION, data]

    def request(data: bytes) -> None:
        match messages.decode_request(frames(data)):
            case messages.Hello() as hello:
                check_model(honest.model, hello.model)
                compatible(honest.geometry, hello.geometry, consumer=False, convert=hello.converts)
            case messages.Ask() as ask:
                check_spans(ask.spans, honest.geometry, 100)

    def reply(data: bytes) -> None:
        match messages.decode_reply(frames(data)):
            case messages.Welcome() as welcome:
                check_model(honest.model, welcome.model)
                compatible(honest.geometry, welcome.geometry, convert=True)
                TpKVTopology.between(honest.geometry, welcome.geometry).describe(16)
            case messages.Attached() as attached:
                check_layouts(attached.pages, honest.geometry)
            case messages.Grant() as grant:
                for packed in grant.block_ids:
                    if len(packed) % 4 == 0:
                        unpack_ids(packed)
            case messages.Resolved() as resolved:
                prompt_of_answer(resolved.params)

    checked = (ProtocolError, IncompatiblePeerError, GeometryError)
    yield Decoder("requests of D", [m[2] for m in map(messages.encode, honest.requests)], request, checked, share=6)
    yield Decoder("replies of P", [m[2] for m in map(messages.encode, honest.replies)], reply, checked, share=6)
    yield Decoder("posted grants", [messages.encode_grant(honest.grant)], messages.decode_grant, share=4)


def of_streams(honest: Honest) -> Iterator[Decoder]:
    """The control port behind TLS: a stream of bytes that is cut into messages."""
    shared, watched = Shared(1 << 20), Waker()

    class Arrived:
        """A TLS connection on which these bytes have arrived."""

        def __init__(self, data: bytes) -> None:
            self.rest = data
            self.fileno, self.close = watched.fileno, bool

        def recv(self, size: int) -> bytes:
            if not self.rest:
                raise ssl.SSLWantReadError
            read, self.rest = self.rest[:size], self.rest[size:]
            return read

    def stream(data: bytes) -> None:
        tls = Arrived(data)
        peer = Stream(cast(ssl.SSLSocket, tls), "127.0.0.1", shared, lambda stream: None)
        try:
            while tls.rest:
                for frames in peer.receive():
                    messages.decode_request(frames)
        finally:
            peer.close()

    whole = [packed(messages.encode(m)) for m in honest.requests]
    yield Decoder("bytes of the control port", [*whole, whole[1] * 3], stream, (StreamEndedError, ProtocolError), "", 4)


def of_planes(honest: Honest) -> Iterator[Decoder]:
    """Offers, answers and files of each plane, by kind; and what P does with an answer."""
    secret = bytes(range(32))
    kinds: list[tuple[str, msgspec.Struct]] = [
        ("tcp offer", tcp.TcpOffer(5, secret)),
        ("tcp attach", tcp.TcpAttach(b"k" * 16, 1 << 20, True, 4)),
        ("tcp reply", tcp.TcpFlows((secret + b"c" * 16,) * 3, (secret,) * 4)),
        ("shm offer", shm.ShmOffer(NAME_PREFIX + b"0" * 32, secret, 0)),
        ("zmq attach", zmq_plane.ZmqAttach(1 << 20, 8)),
        ("zmq reply", zmq_plane.ZmqReply(5, secret)),
        ("socket attach", SocketAttach(b"k" * 16, 1 << 20)),
        ("cma offer", PullOffer("host", 77, 4)),
        ("cma memory", cma.CmaMemory(4096, bytes(16), ((1, 2), (3, 4)))),
        ("memory file", MemoryFileAddress(7)),
        ("cuda_ipc offer", cuda_ipc.IpcOffer("host", 77, 4, "", NAME_PREFIX + b"0" * 32, secret)),
        ("nixl offer", nixl.NixlOffer(5600, secret, "1.5.1", "rdma")),
        ("nixl reply", nixl.NixlReply("a", [secret] * 2, 1, nixl.NixlSlots(4096, 4096, 1, 8, None))),
        ("ucx offer", ucx.UcxOffer("host")),
        ("ucx attach", ucx.UcxAttach(secret, 1, 1 << 20, b"c" * 8, True)),
        ("ucx reply", ucx.UcxReply(secret, 1)),
    ]
    for name, item in kinds:
        limit = MAX_FILE_BYTES if name == "cma memory" else MAX_PAYLOAD_BYTES
        yield Decoder(name, [encode(item)], partial(decode_payload, kind=type(item), what=name, limit=limit))


def of_boards(honest: Honest) -> Iterator[Decoder]:
    """A slot of a grant board that P's process fills as it likes."""
    key = bytes(range(16))
    text = messages.encode_grant(honest.grant)
    at = grant_board.slots_of(key)[0]
    memory = bytearray(grant_board.FIRST + grant_board.SLOTS * grant_board.SLOT_BYTES)
    reader = object.__new__(grant_board.BoardReader)
    reader.__dict__.update(memory=memory, counters=np.frombuffer(memory, dtype=np.int64))

    def slot(counter: int, content: bytes) -> bytes:
        digest = grant_board.digest_of(counter, key, content)
        return grant_board.HEADER.pack(counter, key, digest, len(content)) + content

    def find(data: bytes) -> None:
        """As it is, and with a digest that fits."""
        for content in (data, slot(2, data[: grant_board.SLOT_BYTES - grant_board.HEADER.size])):
            part = content[: grant_board.SLOT_BYTES]
            memory[at : at + len(part)] = part
            found = reader.find(key)
            if found is not None:
                messages.decode_grant(bytes(found.text))

    yield Decoder("slots of a grant board", [slot(2, text), text], find, (ProtocolError,), "", 1.5)


def of_files_and_keys(keys: Keys, folder: Path) -> Iterator[Decoder]:
    """Keys, key files, addresses."""
    path = folder / "fuzz.key"

    def key_file(data: bytes) -> None:
        path.write_bytes(data[:200])
        path.chmod(0o600)
        read_key_file(path)

    allowed = AllowedPeers(["127.0.0.0/8", "10.1.0.0/16", "::1"])
    secret = keys.secret.encode()
    yield Decoder("key files", [secret + b"\n", secret], key_file, (ConfigError,), "", 1.0)
    yield Decoder(
        "keys", [secret, keys.public.encode()], lambda data: raw_key("secret_key", data.decode("latin-1")),
        (ConfigError,), "", 2.0,
    )  # fmt: skip
    yield Decoder(  # kv_transfer_params bounds the name of a host
        "addresses of peers", [b"127.0.0.1", b"10.1.2.3", b"::ffff:10.1.2.3", b"fe80::1%eth0"],
        lambda data: allowed.refusal(data[:255].decode("latin-1")), (ValueError,), "", 0.2,
    )  # fmt: skip


def of_params(honest: Honest) -> Iterator[Decoder]:
    """What comes with a client's request, and what comes from the scheduler process."""

    def value_of(data: bytes) -> Any:
        with suppress(msgspec.DecodeError, RecursionError, ValueError):
            return msgspec.json.decode(data)

    def params(data: bytes) -> None:
        value = value_of(data)
        given = value if isinstance(value, dict) else None
        lookup_of("r", given)
        remote = from_transfer_params(given, (8, 4))
        if remote is not None:
            check_reachable(remote.peer, "abcdef")

    half = SchedulerHalf(
        Settings(), "engine-d", [BlockTable("full", 16)], tp_size=1, pp_size=1, produces=True, consumes=True
    )

    def scheduler(data: bytes) -> None:
        view = RequestView("r", value_of(data), list(range(100)), 100, 0)
        half.on_new_request(view)
        count, _ = half.num_new_matched_tokens(view, 0)
        if count:
            half.after_alloc(view, [list(range(7))], count)
        half.request_finished(view, [list(range(7))], completed=False)
        half.take_plan()

    other = PeerEngine("p", 2, 1, 30.0, (honest.address, RankAddress(0, 1, "10.0.0.1", 5, bytes(16), "")))
    early = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600, "remote_engine_id": "p"}
    corpus = [honest.params, to_transfer_params(RemotePrompt(bytes(16), 64, "ab" * 16, other))]
    corpus += [early | {"transfer_id": "t"}, early | {"remote_request_id": "u", "remote_key": "0123456789ab"}]
    texts = [msgspec.json.encode(item) for item in corpus]
    yield Decoder("P's answers to D", [honest.answer], prompt_of_answer)
    yield Decoder("kv_transfer_params", texts, params, (ProtocolError,), "json", 3.0)
    yield Decoder("kv_transfer_params at the scheduler half", texts, scheduler, (), "json", 0.5)
    token = bytes(16)
    plan = StepPlan(
        prefills=(Prefill("r", token, 5, "ab", ("t", "r"), honest.answer, 0, 5, True),),
        prefill_chunks=(PrefillChunk(token, 0, 5, (pack_ids([1]),)),), stops=(PrefillStop(token, False),),
        lookups=(PromptLookup("r", "10.0.0.1", 5600, "p", "t"),), left=(LeftAnswer("r", ("ab",)),),
        leases=(LeaseGrant("r", token, 5, (pack_ids([1]),)),), keeps=(KeepLease("r", token, honest.peer, False),),
        loads=(Load("r", token, honest.peer, (pack_ids([1, 2]),), ((0, 20),)),), cancels=("a",),
        releases=(UnneededLease("r", token),),
    )  # fmt: skip
    decoder = msgspec.msgpack.Decoder(StepPlan)

    def step_plan(data: bytes) -> None:
        decoded = decoder.decode(data)
        tables = [*(item.block_ids for item in decoded.leases), *(item.block_ids for item in decoded.prefill_chunks)]
        if all(len(table) == 1 for table in tables) and not decoded.loads:
            by_region(decoded, (0,))

    # From this engine's own scheduler, so the decoder's own errors will do.
    yield Decoder(
        "step plans", [encode(plan)], step_plan, (msgspec.MsgspecError, RecursionError, UnicodeDecodeError), share=2
    )


@contextmanager
def every_decoder(folder: Path) -> Iterator[list[Decoder]]:
    """All of them. ``folder``: for files. Log lines of refusals would cost more than the refusals."""
    honest, logger = Honest(), logging.getLogger("vllm.kvferry")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with of_live_planes() as live:
            yield [
                *of_protocol(honest), *of_streams(honest), *of_planes(honest), *live, *of_boards(honest),
                *of_files_and_keys(Keys(new_secret()), folder), *of_params(honest),
            ]  # fmt: skip
    finally:
        logger.setLevel(level)
