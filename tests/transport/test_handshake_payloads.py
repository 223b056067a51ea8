"""What planes put into the handshake, where ranks that share a process decode the first of it at the same time."""

from __future__ import annotations

from tests.support.fork_server import fork_server

SCRIPT = """
import sys, threading
from typing import Annotated
import msgspec
from msgspec import Meta
from kvferry.transport.plane import decode_payload

sys.setswitchinterval(1e-6)
wrong = []


def decode(kind, barrier, payload):
    barrier.wait()
    if decode_payload(payload, kind, "payload").port != 7:
        wrong.append(kind)


for number in range(1000):
    class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        port: Annotated[int, Meta(ge=0, le=number + 7)]
        host: Annotated[str, Meta(max_length=number + 9)] = ""
        key: Annotated[bytes, Meta(max_length=number + 11)] = b""
        ids: Annotated[tuple[Annotated[int, Meta(ge=number)], ...], Meta(max_length=number + 3)] = ()

    barrier = threading.Barrier(4)
    arguments = Payload, barrier, msgspec.msgpack.encode({"port": 7})
    threads = [threading.Thread(target=decode, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.exit(bool(wrong))
"""


def test_several_threads_decode_a_kind_for_the_first_time() -> None:
    """In a process of its own: without a lock msgspec takes it along."""
    ended = fork_server().run("-c", SCRIPT, timeout=800)
    assert ended.returncode == 0, ended.stderr[-2000:]
