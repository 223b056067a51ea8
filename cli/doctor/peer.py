"""``--peer HOST:PORT``: whether a running engine answers this machine, and what it says of itself.

The Hello names no model that exists, so P refuses it before it makes a session: nothing changes on P. A refusal names
the first field of the model identity that differs, with P's value. The next Hello has this value, and so P's refusals
tell the model identity field by field. The geometry is not asked for: P tells it only to a D that fits.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator

from kvferry.cli.doctor.findings import Finding, fault, note, ok
from kvferry.connector.config import Settings
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.wire.messages import (
    DOCTORS_FIELD,
    MAX_REPLY_BYTES,
    PROTOCOL_VERSION,
    Closing,
    Hello,
    Refused,
    VersionError,
    decode_reply,
    encode,
)
from kvferry.transport.control.dialer import Connection, Dialer
from kvferry.transport.control.keys import FINGERPRINT_BYTES, WHO_LISTENS, Keys
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.errors import ProtocolError, shortened
from kvferry.transport.host import AllowedPeers, numeric_address

PEER_SECONDS = 5.0
"""How long each step may take: the TCP connection, the handshake of keys, and each answer."""
MAX_FIELDS = 64
SHOWN_FIELDS = (
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "num_key_value_heads",
    "model_tag",
    "weights digest",
)
_ADDRESS = "peer"


def findings(
    host: str, port: int, settings: Settings, keys: Keys | None, seconds: float = PEER_SECONDS
) -> Iterator[Finding]:
    """Connect to a control port as D does. ``keys``: of this machine, ``None`` where it has none. ``seconds``: bound on
    each step."""
    reached, address = _reach(host, port, seconds)
    yield reached
    if not address:
        return
    forbidden = AllowedPeers(settings.allowed_peers).refusal(address)
    if forbidden:
        yield fault(_ADDRESS, forbidden, "add the network of this peer to KVFERRY_ALLOWED_PEERS")
        return
    if keys is None:
        do = "copy the key file of the peer's host, and set KVFERRY_KEY_FILE"
        yield fault("key of the peer", "cannot be checked: this machine has no key yet", do)
        return
    fingerprint, where = listening(address, port, seconds), f"{address}:{port}"
    if fingerprint not in keys.admitted:
        yield _no_peer(where, keys, fingerprint)
        return
    admitted = ok("key of the peer", f"{fingerprint} is admitted on both sides")
    try:
        model, times = _ask(keys, address, port, fingerprint, seconds)
    except VersionError as error:
        yield admitted
        value, do = f"the peer's is {error.theirs}", "run the same KVFerry release on both sides"
        yield fault("protocol version", value, do, expected=f"{PROTOCOL_VERSION}, ours")
        return
    except ProtocolError as error:
        yield _refused(where, keys, str(error))
        return
    yield admitted
    yield ok("protocol version", f"{PROTOCOL_VERSION} on both sides")
    shown = [f"{name}={shortened(model[name], 200)}" for name in SHOWN_FIELDS if name in model]
    yield note("model of the peer", f"{len(model)} facts: {', '.join(shown)}" if model else "no facts")
    yield ok("round trip", f"{statistics.median(times) * 1e3:.2f} ms, the median of {len(times)} control messages")


def _reach(host: str, port: int, seconds: float) -> tuple[Finding, str]:
    """A finding about the TCP connection, and the numeric address; empty where there is no connection."""
    where = f"{host}:{port}"
    try:
        address = numeric_address(host, port)
    except OSError as error:
        return fault(_ADDRESS, str(error), "correct the name, or give the address"), ""
    begin = time.monotonic()
    try:
        with socket.create_connection((address, port), seconds) as sock:
            sock.sendall(WHO_LISTENS)  # who hangs up without a word is a warning in P's log
    except ConnectionRefusedError:
        value = f"{where} refuses the connection: nothing listens there"
        do = (
            "is the engine up, its control port this one (side_channel_port, in its log after `serves`), and its "
            "side_channel_host not loopback?"
        )
    except TimeoutError:
        value = f"{where} did not answer within {seconds:g} s"
        do = "is the address right, and does a firewall between the hosts allow this port?"
    except OSError as error:
        value, do = f"{where} cannot be reached: {error.strerror}", "look at the routes between the hosts"
    else:
        return ok(_ADDRESS, f"{where} is reached in {(time.monotonic() - begin) * 1e3:.2f} ms"), address
    return fault(_ADDRESS, value, do), ""


def _hello(model: dict[str, str]) -> Hello:
    region = RegionGeometry(
        kind="full", layers=("kvferry doctor",), block_size=1, head_start=0, num_heads=1, total_heads=1,
        content_bytes=1, dtype="uint8",
    )  # fmt: skip
    geometry = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(1,), regions=(region,))
    return Hello(
        engine_id="doctor", incarnation=secrets.token_bytes(16), geometry=geometry,
        model={**model, DOCTORS_FIELD: "1"},
    )  # fmt: skip


def _ask(keys: Keys, address: str, port: int, fingerprint: str, seconds: float) -> tuple[dict[str, str], list[float]]:
    """Say Hello until P has refused the field that no engine has. Returns the model identity, and the seconds of each
    answer. Raises VersionError; ProtocolError: another answer or none, and why."""
    model: dict[str, str] = {}
    times: list[float] = []
    dialer = Dialer(keys, max_message_bytes=MAX_REPLY_BYTES)
    try:
        connection = dialer.connect(address, port, key=fingerprint, timeout=seconds)
        _until(dialer, lambda: connection.connected or connection.lost, seconds + 1)
        while len(times) < MAX_FIELDS:
            begin = time.monotonic()
            connection.send(encode(_hello(model)))
            refused = _reply(dialer, connection, seconds)
            times.append(time.monotonic() - begin)
            if refused.field == DOCTORS_FIELD or refused.field in model:
                break  # all fields are known, or this one is longer than a refusal tells
            model[refused.field] = refused.ours
        return model, times
    finally:
        dialer.close()


def _reply(dialer: Dialer, connection: Connection, seconds: float) -> Refused:
    """P's next refusal. Raises as ``_ask``."""
    while _until(dialer, lambda: connection.news or connection.lost, seconds):
        for frames in connection.receive():
            reply = decode_reply(frames)
            if isinstance(reply, Refused):
                return reply
            ending = f"the engine ends its leases: {reply.reason}" if isinstance(reply, Closing) else ""
            raise ProtocolError(ending or "an unexpected answer")
        if connection.lost:
            raise ProtocolError(connection.reason)
        # else the news was that the connection is established
    raise ProtocolError(f"no answer to a Hello within {seconds:g} s")


def _until(dialer: Dialer, condition: Callable[[], bool], seconds: float) -> bool:
    """Serve the dialer until a condition holds, or the time is over. Returns whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        left = end - time.monotonic()
        if left <= 0:
            return False
        select.select([dialer.fd], [], [], min(left, 0.1))
        dialer.progress()
    return True


def _no_peer(where: str, keys: Keys, fingerprint: str) -> Finding:
    """The port says that its key is one that this machine does not admit; or nothing that a control port says."""
    if not fingerprint:
        do = "take the address from the engine's log, in its line `kvferry: rank ... serves ... at ...`"
        return fault(_ADDRESS, f"{where} is no KVFerry control port", do)
    value = f"wrong key: the peer's is {fingerprint}, and this machine admits {keys.shown}"
    do = "give both machines one key file (KVFERRY_KEY_FILE), or add the peer's public key to KVFERRY_PEER_KEYS"
    return fault("key of the peer", value, do)


def _refused(where: str, keys: Keys, refusal: str) -> Finding:
    """Why a control port does not answer us."""
    if "does not admit our key" in refusal:
        do = "give both machines one key file (KVFERRY_KEY_FILE), or add our public key to KVFERRY_PEER_KEYS there"
        return fault("key of the peer", f"the peer does not admit our key {keys.fingerprint}", do)
    return fault(_ADDRESS, f"{where} does not answer: {refusal}", "look into its log")


def listening(address: str, port: int, seconds: float) -> str:
    """The fingerprint of the key of the control port that listens there; empty where none does, or it says nothing."""
    said, wanted = b"", len(ANSWER) + 2 * FINGERPRINT_BYTES
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError), socket.create_connection((address, port), seconds) as sock:
        sock.sendall(WHO_LISTENS)
        while len(said) < wanted and (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            more = sock.recv(wanted - len(said))
            if not more:
                break
            said += more
    answer, _, fingerprint = said.partition(ANSWER)
    named = not answer and re.fullmatch(rb"[0-9a-f]{%d}" % (2 * FINGERPRINT_BYTES), fingerprint)
    return fingerprint.decode() if named else ""
