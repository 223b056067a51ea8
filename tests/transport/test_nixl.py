"""NIXL's plane over TCP: what D may take, when slots come back, which lanes are chosen, what P and D may not say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.transport.channels import CPU
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import nixl_agent, ucx_settings
from kvferry.transport.planes.nixl import FREE, MOST_UNSENT, READY, NixlPlane
from kvferry.transport.planes.ucx_settings import choose_lanes
from kvferry.transport.registry import make_plane, plane_spec
from tests.support.fork_server import fork_server
from tests.support.ranks import LANES
from tests.transport.control_ends import KEYS
from tests.transport.plane_pair import SLOT, Pair
from tests.transport.test_planes_hosts import PORTS, listening_addresses

SLOTS = 8
MUTEX = {"UCX_USE_MT_MUTEX": "y"}
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "512k", "UCX_TCP_RX_SEG_SIZE": "512k"}


@pytest.fixture
def pair() -> Iterator[Any]:
    with closing(Pair("nixl", SLOTS, CPU)) as pair:
        yield pair


@pytest.mark.nixl
def test_bytes_of_a_slot_that_p_has_used_again_are_no_message(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P gave D up while D read the slot, and packs another message there."""
    sender, receiver = pair.join()
    ended = nixl_agent.NixlRead.ended

    def p_uses_the_slot_again(read: Any) -> Any:
        found = ended(read)
        if found and not pair.d.fetches[0].checking:
            pair.p.send_pool.uses[0] += 1
        return found

    monkeypatch.setattr(nixl_agent.NixlRead, "ended", p_uses_the_slot_again)
    pair.send(sender, receiver, 1)
    pair.turn(lambda: receiver.error)
    assert "gave the slot of a message to another one" in str(receiver.error) and not receiver.poll()
    receiver.close()
    pair.follow(sender)
    pair.turn(lambda: not pair.slots_out)


@pytest.mark.nixl
def test_a_read_under_way_keeps_its_slot_beyond_its_channel(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = pair.join()
    with monkeypatch.context() as never:
        never.setattr(nixl_agent.NixlRead, "ended", lambda self: None)
        pair.send(sender, receiver, 1)
        pair.turn(lambda: len(pair.d.fetches) == 1)
        pair.p.sockets.drop(sender.sock)
        pair.follow(receiver)
        (fetch,) = pair.d.fetches
        assert not fetch.wanted and pair.d.sources, "its connection must not be closed meanwhile"
    sender.close()
    pair.turn(lambda: not pair.slots_out)
    assert not pair.d.fetches and not pair.d.sources
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 2).release()


@pytest.mark.nixl
def test_a_read_that_fails_breaks_the_connection_and_the_next_one_works(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair.join()
    other_sender, other_receiver = pair.join()
    with monkeypatch.context() as failing:
        failing.setattr(nixl_agent.NixlRead, "ended", lambda self: False)
        pair.send(sender, receiver, 1)
        pair.turn(lambda: receiver.error)
    assert "a READ failed" in str(receiver.error) and other_receiver.error is not None
    assert not pair.d.sources
    for end in (receiver, other_receiver):
        end.close()
    for channel in (sender, other_sender):
        pair.follow(channel)
    pair.turn(lambda: not pair.slots_out)
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 2).release()


@contextmanager
def without_slots(pair: Any) -> Iterator[None]:
    """Messages wait only while D has no slot for them."""
    taken = [pair.d.recv_pool.take() for _ in range(pair.d.recv_pool.free)]
    yield
    for slot in taken:
        pair.d.recv_pool.put(slot)


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (READY.pack(SLOTS, 0, 100, 1), "announces 100 bytes in slot"),
        (READY.pack(0, 0, SLOT + 1, 1), f"announces {SLOT + 1} bytes"),
        (READY.pack(0, 0, 0, 1), "announces 0 bytes"),
        (READY.pack(0, 0, 100, 7) * 5000, "more than 4096 messages"),
        (READY.pack(0, 0, SLOT, 7), f"has {SLOT} bytes, expected 100"),
    ],
    ids=["another slot", "too much", "nothing", "too often", "expected later"],
)
def test_p_may_not_say(pair: Any, words: bytes, why: str) -> None:
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 1).release()
    receiver.source.slots = msgspec.structs.replace(receiver.source.slots, slot_bytes=4 * SLOT)  # larger than D's
    with without_slots(pair):
        if "more than" in why:
            receiver.expect(7, 100)
        sender.words.send(words)
        pair.turn(lambda: receiver.ready or receiver.error)
        if "expected" in why:
            receiver.expect(7, 100)
        elif "more than" in why:
            pair.turn(lambda: receiver.error)
    pair.turn(lambda: receiver.error)
    assert why in str(receiver.error)


@pytest.mark.nixl
def test_a_channel_that_has_failed_gets_no_source(pair: Any) -> None:
    """P's reply comes after D's connection has broken."""
    receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
    _, answer = pair.p.accept(payload)
    receiver.fail("cut")
    with pytest.raises(PlaneUnavailableError, match="cut"):
        pair.d.finish(receiver, answer)
    assert not pair.d.sources


@pytest.mark.nixl
def test_another_p_may_not_take_the_name_of_an_agent(pair: Any) -> None:
    pair.join()
    receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
    reply = msgspec.msgpack.decode(pair.p.accept(payload)[1])
    reply["slots"]["address"] += 4096
    with pytest.raises(PlaneUnavailableError, match="another prefill engine has the agent name"):
        pair.d.finish(receiver, msgspec.msgpack.encode(reply))


@pytest.mark.nixl
def test_connections_that_do_not_come(pair: Any) -> None:
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 2).release()
    receiver.deadline, receiver.incomplete = 0.0, 1
    pair.turn(lambda: receiver.error)
    assert "is a firewall between?" in str(receiver.error)
    _, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
    attach = msgspec.msgpack.decode(payload) | {"channel": bytes(16)}
    late, _ = pair.p.accept(msgspec.msgpack.encode(attach))
    late.deadline = 0.0
    pair.turn(lambda: late.error is not None)
    assert late.sock is None, "a connection that comes now is joined to no channel"


@pytest.mark.nixl
def test_a_peer_that_does_not_read(pair: Any) -> None:
    _, receiver = pair.join()
    pair.turn(lambda: hasattr(receiver, "words"))
    receiver.words.to_send = bytes(MOST_UNSENT + 1)
    receiver.words.send(FREE.pack(0))
    assert "does not read" in str(receiver.error)


@pytest.mark.nixl
def test_d_may_not_give_back_what_it_does_not_have(pair: Any) -> None:
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 1).release()
    receiver.words.send(FREE.pack(0))
    pair.turn(lambda: sender.error is not None)
    assert "gave back slot 0" in str(sender.error)


@pytest.mark.nixl
def test_another_release_other_lanes_and_damaged_metadata_are_refused(pair: Any) -> None:
    offer = msgspec.msgpack.decode(pair.p.offer())
    for field, value in (("release", "0.9.0"), ("lanes", "rdma")):
        with pytest.raises(PlaneUnavailableError, match=rf"{value}"):
            pair.d.connect(msgspec.msgpack.encode(offer | {field: value}), "127.0.0.1")
    receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
    _, answer = pair.p.accept(payload)
    reply = msgspec.msgpack.decode(answer)
    reply["metadata"][0] = reply["metadata"][0][:-1] + b"\x00\x01"
    with pytest.raises(ProtocolError, match="metadata is damaged"):
        pair.d.finish(receiver, msgspec.msgpack.encode(reply))


@pytest.mark.nixl
def test_both_directions_together_register_no_more_than_the_staging_memory(pair: Any) -> None:
    pair.join()
    pair.p.prepare_to_read()
    assert pair.p.staging_bytes == SLOTS * SLOT


@pytest.mark.nixl
def test_nixl_listens_from_the_first_hand_over_on_and_on_one_device() -> None:
    script = f"import os; os.environ['UCX_TLS'] = {LANES!r}\n{PORTS}"
    with fork_server().start("-c", script, "nixl", "127.0.0.1", KEYS.secret) as process:
        for said in (b"offered\n", b"attached\n"):
            assert process.stdout.readline() == said
            assert listening_addresses(process.pid) == {"0100007F"}
            process.stdin.write(b"\n")
            process.stdin.flush()


@pytest.mark.nixl
def test_a_lost_channel_closes_the_connection_also_after_a_channel_that_ended_well(pair: Any) -> None:
    """P ends one channel in good order, and dies before the other one ends."""
    (first, first_end), (second, second_end) = pair.join(), pair.join()
    pair.carry(first, first_end, 1).release()
    first.close()
    pair.follow(first_end)
    assert pair.d.sources
    pair.p.sockets.drop(second.sock)
    pair.follow(second_end)
    assert not pair.d.sources


@pytest.mark.nixl
def test_a_read_that_waits_holds_up_no_other_p(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """D looks at no READ behind one that is under way, of the same P."""
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 1).release()
    looked: list[object] = []

    def under_way(read: object) -> None:
        looked.append(read)

    with monkeypatch.context() as waits:
        waits.setattr(nixl_agent.NixlRead, "ended", under_way)
        for tag in (2, 3):
            pair.send(sender, receiver, tag)
        pair.turn(lambda: len(pair.d.fetches) == 2)
        first, second = pair.d.fetches
        for source, wanted in ((first.source, [first.read]), (object(), [first.read, second.read])):
            second.source = source  # its own, and another P's
            looked.clear()
            pair.d.look()
            assert looked == wanted
        second.source = first.source
    pair.turn(lambda: not pair.d.fetches)
    for message in receiver.poll():
        message.release()


def ports(root: Path, *states: str) -> Path:
    for number, state in enumerate(states):
        port = root / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"4: {state}\n")
    return root


def test_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RDMA where a port is up, TCP only where UCX_TLS lists it."""
    monkeypatch.setattr(ucx_settings, "GPU_DEVICE", tmp_path / "no GPU")
    monkeypatch.setattr(ucx_settings, "DEVICES", ports(tmp_path / "down", "DOWN", "INIT"))
    for environ in ({}, {"UCX_TLS": "all"}, {"UCX_TLS": "^cma"}):
        with pytest.raises(PlaneUnavailableError, match="no RDMA port is up"):
            choose_lanes("127.0.0.1", environ)
    monkeypatch.setattr(ucx_settings, "DEVICES", ports(tmp_path / "up", "DOWN", "ACTIVE"))
    for environ in ({}, {"UCX_TLS": "all"}, {"UCX_TLS": "^cma"}):
        lanes = choose_lanes("127.0.0.1", environ)
        assert (lanes.kind, lanes.settings, lanes.rdma) == ("rdma", MUTEX | {"UCX_TLS": "rc"}, True)
        assert lanes.shown == "RDMA on mlx5_1:1"
    with pytest.raises(PlaneUnavailableError, match="excludes RDMA"):
        choose_lanes("127.0.0.1", {"UCX_TLS": "^rc,shm"})
    assert choose_lanes("127.0.0.1", {"UCX_TLS": "dc_x"}).rdma
    lanes = choose_lanes("127.0.0.1", {"UCX_TLS": "tcp"})
    assert (lanes.settings, lanes.shown, lanes.rdma) == (
        MUTEX | SEGMENTS | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        "UCX_TLS=tcp",
        False,
    )
    of_the_user = {"UCX_TLS": "tcp", "UCX_USE_MT_MUTEX": "n", "UCX_TCP_RX_SEG_SIZE": "8k"}
    assert not {"UCX_USE_MT_MUTEX", "UCX_TCP_RX_SEG_SIZE"} & choose_lanes("127.0.0.1", of_the_user).settings.keys()
    assert choose_lanes("127.0.0.1", {"UCX_TLS": "rc,cuda"}).rdma
    with pytest.raises(PlaneUnavailableError, match=r"no network device is known by its address 192\.0\.2\.77"):
        choose_lanes("192.0.2.77", {"UCX_TLS": "tcp"})


def test_a_missing_nixl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(ucx_settings, "PACKAGES", ("nixl_cu0",))
    with pytest.raises(PlaneUnavailableError, match=r"pip install 'kvferry\[rdma\]'"):
        make_plane("nixl", PlaneContext("127.0.0.1", SLOT, SLOTS * SLOT))
    assert plane_spec("nixl").extra == "kvferry[rdma]"


@pytest.mark.nixl
def test_without_rdma_auto_takes_another_plane(pair: Any) -> None:
    assert isinstance(pair.d, NixlPlane)
    assert f"UCX_TLS={LANES}" in pair.d.slower_because(pair.p.offer(), reached=True)
    assert pair.d.lanes_to("127.0.0.1") == f"UCX_TLS={LANES}"


def test_a_process_has_ucx_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them end the process when a peer dies."""
    monkeypatch.setattr(ucx_settings, "nixl_release", lambda: ("nixl_cu13", "1.5.1"))
    monkeypatch.setattr(ucx_settings, "DEVICES", ports(tmp_path / "down", "DOWN"))
    ucx_settings.refuse_ucx("127.0.0.1", {}, ("nixl", "tcp"))
    with pytest.raises(PlaneUnavailableError, match="no RDMA port is up"):
        ucx_settings.refuse_nixl("127.0.0.1", {}, ("ucx",))
    ucx_settings.refuse_nixl("127.0.0.1", {}, ("shm",))
    monkeypatch.setattr(ucx_settings, "DEVICES", ports(tmp_path / "up", "ACTIVE"))
    with pytest.raises(PlaneUnavailableError, match="nixl's has RDMA"):
        ucx_settings.refuse_ucx("127.0.0.1", {}, ("nixl", "tcp"))
    ucx_settings.refuse_ucx("127.0.0.1", {}, ("tcp",))  # the user has named the plane
    system = {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}
    ucx_settings.refuse_ucx("127.0.0.1", system, ("nixl",))
    with pytest.raises(PlaneUnavailableError, match="has that of the plane ucx"):
        ucx_settings.refuse_nixl("127.0.0.1", system, ("ucx",))
    for name, other in (("ucx", "nixl"), ("nixl", "ucx")):
        with pytest.raises(PlaneUnavailableError, match="a process can have one UCX"):
            make_plane(name, PlaneContext("127.0.0.1", SLOT, SLOTS * SLOT, others=frozenset({other})))
