"""Peers that do not fit, and requests that cannot be: each is refused by name, and the others are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.wire import messages
from kvferry.transport.errors import ConfigError, GeometryError, PlaneUnavailableError, TransportError
from tests.handover.gates import halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import sends_of
from tests.support.ranks import SOON, grant, load_plan, peer, reason_of, wait
from tests.transport.control_ends import Dialed


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"model": {"architectures": "Other"}}, "architectures"),
        ({"total_heads": 8}, "total_heads"),
        ({"content": 32}, "content_bytes"),
        ({"layers": 3}, "layers"),
    ],
)
def test_another_model_or_geometry_is_refused_by_name(
    group: RankGroup, theirs: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = group.rank(**theirs), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.link"]
    assert len(lines) == 1
    assert named in lines[0]
    assert "\n" not in lines[0]


def test_another_protocol_version_is_refused_by_name(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p = group.rank()
    connection = Dialed(p.address.port)
    connection.send([messages.MAGIC, (9).to_bytes(2, "big"), b"whatever version 9 says"])
    answers: list[list[bytes]] = []
    assert wait(lambda: bool(answers.extend(connection.receive()) or answers), [p])
    refused = messages.decode_reply(answers[0])
    connection.close()
    assert refused == messages.Refused(field="protocol version", ours=str(messages.PROTOCOL_VERSION), theirs="9")


def test_no_plane_in_common(group: RankGroup) -> None:
    p, d = group.rank(settings=Settings(plane="shm")), group.rank(settings=Settings(plane="tcp"), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    begin(p, d)
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert reason_of(d) == "plane"
    assert wait(lambda: p.sent == {"req-p"}, [p, d], SOON)


@pytest.mark.parametrize("plane", ["cuda_ipc", "ucx"])
def test_a_plane_that_a_rank_cannot_have(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    def missing(*_: object) -> None:
        raise PlaneUnavailableError("ucxx is not installed")

    monkeypatch.setattr("kvferry.transport.planes.ucx.UcxPlane.__init__", missing)
    with pytest.raises(ConfigError, match=rf"^plane: '{plane}' cannot be used: [^\n]*; expected one of auto, ") as e:
        group.rank(settings=Settings(plane=plane))
    assert "host memory" in str(e.value) or "ucxx is not installed" in str(e.value)


def test_a_plane_that_p_has_no_room_on_is_passed_over(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)

    def full(payload: bytes) -> None:
        raise TransportError("staging memory is used up")

    for name in ("cma", "shm"):
        monkeypatch.setattr(p.context.plane(name), "accept", full)
    another_works(p, d)
    assert d.plane not in ("cma", "shm")


@pytest.mark.parametrize(
    "frames",
    [
        [b"GET", b" / ", b"HTTP/1.1"],
        [messages.MAGIC, b"\0\1", b"\x80\x04\x95pickle"],
        [messages.MAGIC, b"\0\1", b"\xdf\xff\xff\xff\xff"],
        messages.encode(messages.Commit(read=1, token=bytes(16))),
        messages.encode(messages.Release(token=bytes(16), consumer=bytes(16), consumer_rank=0, expected=(0,))),
        messages.encode(messages.Renew(tokens=(bytes(16),) * 1000)),
    ],
    ids=["http", "pickle", "huge claim", "before hello", "unknown release", "unknown renew"],
)
def test_garbage_is_counted_and_p_serves_on(group: RankGroup, frames: list[bytes]) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    connection = Dialed(p.address.port)
    for _ in range(50):
        connection.send(frames)
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    connection.close()


def test_blocks_out_of_range_fail_the_one_request(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), [999] * 7, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d], SOON)
    another_works(p, d)


@pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_a_token_that_no_message_holds(group: RankGroup, plane: str) -> None:
    """D finds out after it has asked: it says what to do, and neither side keeps anything of the read."""
    settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=1 << 20)
    p, d = (group.rank(engine_id=name, settings=settings, content=8192) for name in ("engine-p", "engine-d"))
    p.fill(THEIRS, TOKENS)
    begin(p, d)
    assert wait(lambda: d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d], SOON)
    assert reason_of(d) == "incompatible"
    assert wait(lambda: not halves(d)[1].reads.by_number and not sends_of(p).turns, [p, d], SOON)


@pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_a_read_that_d_cannot_cut(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """By then it has been asked for, and P sends: what comes is dropped, and nothing is waited for."""
    settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=1 << 20)
    p, d = (group.rank(engine_id=name, settings=settings, content=128) for name in ("engine-p", "engine-d"))
    p.fill(THEIRS, TOKENS)
    cut = RankCaches.cut

    def cut_once(caches: RankCaches, *args: Any, **kwargs: Any) -> Iterator[PageBox]:
        parts = cut(caches, *args, **kwargs)
        if d.worker.rank_context is not None and caches is d.context.caches:
            yield next(parts)
            raise GeometryError("it is cut no further")
        yield from parts

    with monkeypatch.context() as patch:
        patch.setattr(RankCaches, "cut", cut_once)
        begin(p, d)
        assert wait(lambda: d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d], SOON)
        assert wait(lambda: not halves(d)[1].reads.by_number and not sends_of(p).turns, [p, d], SOON)
    assert reason_of(d) == "incompatible"
    another_works(p, d)


def test_a_read_beyond_the_prompt_is_denied(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, 50)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert all((d.caches[name] == -1).all() for name in d.layers)
    another_works(p, d)


def test_an_error_of_the_copy_is_one_requests_failure(group: RankGroup) -> None:
    settings = Settings(plane="shm")
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    for rank, kind, name in ((d, "internal", "unpack"), (p, "data", "pack")):
        caches, real = rank.context.caches, getattr(RankCaches, name)
        token = grant([p], f"{kind}-p", THEIRS, TOKENS)

        def planted(self: RankCaches, *args: Any, caches: Any = caches, real: Any = real, **more: Any) -> Any:
            return fail() if self is caches else real(self, *args, **more)

        with mock.patch.object(RankCaches, name, planted):
            d.worker.post(load_plan(f"{kind}-d", token, peer([p]), OURS, 0, TOKENS))
            assert wait(lambda kind=kind: f"{kind}-d" in d.failed and f"{kind}-p" in p.sent, [p, d], SOON)
        assert reason_of(d) == kind
    another_works(p, d)
