"""``--peer HOST:PORT``: whether a running engine answers this machine, with a key that both admit, and has its model.

One handshake: the Hello has a field that no engine has, so P refuses it before it makes a session, and names the first
field that differs with both values. The geometry is not asked for.
"""

from __future__ import annotations

import re
import secrets
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvferry.cli.doctor.findings import Finding, fault, note, ok
from kvferry.connector.config import Settings
from kvferry.connector.geometry.model_identity import WEIGHTS, model_identity
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.wire.messages import (
    DOCTORS_FIELD,
    MAX_REPLY_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Refused,
    VersionError,
    decode_reply,
    encode,
)
from kvferry.transport.control.dialer import Dialer
from kvferry.transport.control.keys import FINGERPRINT_BYTES, WHO_LISTENS, Keys
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.errors import ProtocolError, shortened
from kvferry.transport.host import AllowedPeers, numeric_address

PEER_SECONDS = 5.0
"""How long each step may take: the question for the key, the handshake of keys, and the answer."""
_ADDRESS, _KEY, _MODEL = "peer", "key of the peer", "model of the peer"
_ONE_KEY_FILE = "give both machines one key file (KVFERRY_KEY_FILE), or add"


def model_facts(content: Mapping[str, Any], tag: str | None) -> dict[str, str]:
    """The model identity of an engine with this ``config.json``, without its weights. ``tag``: ``model_tag`` of the
    settings."""
    from transformers import CONFIG_MAPPING  # as vLLM reads it: with the defaults of the model's class

    config = CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    return model_identity(config, text, quantization=None, max_model_len=longest, tag=tag)


def findings(
    host: str, port: int, settings: Settings, keys: Keys | None, model: Mapping[str, Any] | None = None,
    seconds: float = PEER_SECONDS,
) -> Iterator[Finding]:  # fmt: skip
    """Ask a control port as D does. ``keys``: of this machine, ``None`` where it has none. ``model``: the
    ``config.json`` of its engine; ``None``: P's model is only named. ``seconds``: bound on each step."""
    where, begin = f"{host}:{port}", time.monotonic()
    try:
        address = numeric_address(host, port)
        where = f"{address}:{port}"
        fingerprint = listening(address, port, seconds)
    except OSError as error:
        yield fault(_ADDRESS, *_unreached(where, error, seconds))
        return
    took = time.monotonic() - begin
    if forbidden := AllowedPeers(settings.allowed_peers).refusal(address):
        yield fault(_ADDRESS, forbidden, "add the network of this peer to KVFERRY_ALLOWED_PEERS")
    elif not fingerprint:
        do = "take the address from the engine's log, in its line `kvferry: rank ... serves ... at ...`"
        yield fault(_ADDRESS, f"{where} is no KVFerry control port", do)
    elif keys is None:
        do = "copy the key file of the peer's host, and set KVFERRY_KEY_FILE"
        yield fault(_KEY, "cannot be checked: this machine has no key yet", do)
    elif fingerprint not in keys.admitted:
        value = f"wrong key: the peer's is {fingerprint}, and this machine admits {keys.shown}"
        yield fault(_KEY, value, f"{_ONE_KEY_FILE} the peer's public key to KVFERRY_PEER_KEYS")
    else:
        yield ok(_ADDRESS, f"{where} answers in {took * 1e3:.2f} ms")
        yield from _handshake(where, address, port, keys, fingerprint, model, settings, seconds)


def _unreached(where: str, error: OSError, seconds: float) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if isinstance(error, ConnectionRefusedError):
        return f"{where} refuses the connection: nothing listens there", (
            "is the engine up, its control port this one (side_channel_port, in its log after `serves`), and its "
            "side_channel_host not loopback?"
        )
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {seconds:g} s", (
            "is the address right, and does a firewall between the hosts allow this port?"
        )
    return f"{where} cannot be reached: {error.strerror or error}", "look at the name, and at the routes to its host"


def listening(address: str, port: int, seconds: float) -> str:
    """The fingerprint of the key of the control port that listens there; empty where another server does. Raises
    OSError: there is no connection."""
    said, wanted = b"", len(ANSWER) + 2 * FINGERPRINT_BYTES
    with socket.create_connection((address, port), seconds) as sock, suppress(OSError):
        sock.sendall(WHO_LISTENS)
        end = time.monotonic() + seconds
        while len(said) < wanted and (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            if not (more := sock.recv(wanted - len(said))):
                break
            said += more
    answer, _, fingerprint = said.partition(ANSWER)
    named = not answer and re.fullmatch(rb"[0-9a-f]{%d}" % (2 * FINGERPRINT_BYTES), fingerprint)
    return fingerprint.decode() if named else ""


def _handshake(
    where: str, address: str, port: int, keys: Keys, fingerprint: str,
    model: Mapping[str, Any] | None, settings: Settings, seconds: float,
) -> Iterator[Finding]:  # fmt: skip
    """Keys, protocol version and model."""
    admitted = ok(_KEY, f"{fingerprint} is admitted on both sides")
    facts = {} if model is None else model_facts(model, settings.model_tag)
    try:
        refused = _refusal(keys, address, port, fingerprint, facts, seconds)
    except VersionError as error:
        yield admitted
        value, do = f"the peer's is {error.theirs}", "run the same KVFerry release on both sides"
        yield fault("protocol version", value, do, expected=f"{PROTOCOL_VERSION}, ours")
    except ProtocolError as error:
        if "does not admit our key" in str(error):
            do = f"{_ONE_KEY_FILE} our public key to KVFERRY_PEER_KEYS there"
            yield fault(_KEY, f"the peer does not admit our key {keys.fingerprint}", do)
        else:
            yield fault(_ADDRESS, f"{where} does not answer: {error}", "look into its log")
    else:
        yield from (admitted, ok("protocol version", f"{PROTOCOL_VERSION} on both sides"))
        field, theirs = refused.field, shortened(refused.ours, 200)
        if model is None:
            yield note(_MODEL, f"{field}={theirs}", "compare it with the model of this machine: --model")
        elif field in (DOCTORS_FIELD, WEIGHTS):
            yield ok(_MODEL, f"{len(facts)} facts are the same here; the weights were not compared")
        else:
            value = f"{field}: the peer's is {theirs}, that of this machine is {shortened(refused.theirs, 200)}"
            yield fault(_MODEL, value, "serve one model on both, or give each P only D engines of its model")


def _refusal(keys: Keys, address: str, port: int, fingerprint: str, model: dict[str, str], seconds: float) -> Refused:
    """P's answer to a Hello. Raises VersionError; ProtocolError: another answer or none, and why."""
    region = RegionGeometry(
        kind="full", layers=("kvferry doctor",), block_size=1, head_start=0, num_heads=1, total_heads=1,
        content_bytes=1, dtype="uint8",
    )  # fmt: skip
    geometry = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(1,), regions=(region,))
    incarnation, named = secrets.token_bytes(16), model | {DOCTORS_FIELD: "1"}
    dialer = Dialer(keys, max_message_bytes=MAX_REPLY_BYTES)
    try:
        connection = dialer.connect(address, port, key=fingerprint, timeout=seconds)
        connection.send(encode(Hello(engine_id="doctor", incarnation=incarnation, geometry=geometry, model=named)))
        messages: list[list[bytes]] = []
        end = time.monotonic() + 2 * seconds
        while not messages and not connection.lost and (left := end - time.monotonic()) > 0:
            select.select([dialer.fd], [], [], min(left, 0.1))
            dialer.progress()
            messages = connection.receive()
        if messages and isinstance(reply := decode_reply(messages[0]), Refused):
            return reply
        raise ProtocolError("an unexpected answer" if messages else connection.reason or "no answer to a Hello")
    finally:
        dialer.close()
