"""Peers that do not fit, and requests that cannot be: each is refused by name, and the others are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import no_figures
from kvferry.connector.wire.step_plan import PeerEngine
from kvferry.transport.errors import ConfigError, GeometryError, PlaneUnavailableError, TransportError
from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import (
    OURS,
    SMALL,
    THEIRS,
    TOKENS,
    RankGroup,
    another_works,
    begin,
    ended,
    is_wiped,
    load_from,
)
from tests.support.inside import early_votes, sends_of
from tests.support.ranks import Rank, grant, load_plan, peer, reason_of, wait
from tests.transport.control_ends import Dialed

PUSHES = pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])


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
    group: RankGroup, theirs: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = group.pair(of_p=theirs)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.link"]
    assert "peer refused: " in line and named in line and "\n" not in line


def test_a_d_that_does_not_fit_releases_a_prompt_that_p_computes(group: RankGroup) -> None:
    """It is no garbage, and P does not hold the blocks for it."""
    p, d = group.pair(of_p={"model": {"architectures": "Other"}})
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin()
    engine.load(d, OURS)
    assert wait(lambda: d.failed == {"req-d"} and early_votes(p).cost > 0, [p, d]) and reason_of(d) == "incompatible"
    engine.finish()
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert (p.context.stats.take() or no_figures())["dropped"] == {}


def test_another_protocol_version_is_refused_by_name(group: RankGroup) -> None:
    p = group.rank()
    connection = Dialed(p.address.port)
    connection.send([messages.MAGIC, (9).to_bytes(2, "big"), b"whatever version 9 says"])
    answers: list[list[bytes]] = []
    assert wait(lambda: bool(answers.extend(connection.receive()) or answers), [p])
    connection.close()
    refused = messages.Refused(field="protocol version", ours=str(messages.PROTOCOL_VERSION), theirs="9")
    assert messages.decode_reply(answers[0]) == refused


@pytest.mark.parametrize("plane", ["cuda_ipc", "ucx"])
def test_a_plane_that_a_rank_cannot_have(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    def missing(*_: object) -> None:
        raise PlaneUnavailableError("ucxx is not installed")

    monkeypatch.setattr("kvferry.transport.planes.ucx.UcxPlane.__init__", missing)
    with pytest.raises(ConfigError, match=rf"^plane: '{plane}' cannot be used: [^\n]*; expected one of auto, ") as e:
        group.rank(plane=plane)
    assert "host memory" in str(e.value) or "ucxx is not installed" in str(e.value)


def test_a_plane_that_p_has_no_room_on_is_passed_over(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(payload: bytes) -> None:
        raise TransportError("staging memory is used up")

    for name in ("cma", "shm"):
        monkeypatch.setattr(p.context.plane(name), "accept", full)
    another_works(p, d)
    assert d.plane not in ("cma", "shm")


def test_blocks_out_of_range_fail_the_one_request(p: Rank, d: Rank) -> None:
    begin(p, d, ours=[999] * 7)
    assert not ended(p, d)
    another_works(p, d)


def none_left(p: Rank, d: Rank) -> bool:
    return wait(lambda: not d.consumer.reads.by_number and not sends_of(p).turns, [p, d])


@PUSHES
def test_a_token_that_no_message_holds(group: RankGroup, plane: str) -> None:
    """D finds out after it has asked: it says what to do, and neither side keeps anything of the read."""
    p, d = group.pair(plane=plane, content=8192, **SMALL)
    begin(p, d)
    assert not ended(p, d) and reason_of(d) == "incompatible"
    assert none_left(p, d)


@PUSHES
def test_a_read_that_d_cannot_cut(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """By then it has been asked for, and P sends: what comes is dropped, and nothing is waited for."""
    p, d = group.pair(plane=plane, content=128, **SMALL)
    cut = RankCaches.cut

    def cut_once(caches: RankCaches, *args: Any, **kwargs: Any) -> Iterator[PageBox]:
        parts = cut(caches, *args, **kwargs)
        if caches is d.context.caches:
            yield next(parts)
            raise GeometryError("it is cut no further")
        yield from parts

    with monkeypatch.context() as patch:
        patch.setattr(RankCaches, "cut", cut_once)
        begin(p, d)
        assert not ended(p, d) and none_left(p, d)
    assert reason_of(d) == "incompatible"
    another_works(p, d)


def test_a_read_beyond_the_prompt_is_denied(p: Rank, d: Rank) -> None:
    token = grant([p], "req-p", THEIRS, 50)
    load_from(p, d, token)
    assert not ended(p, d)
    assert is_wiped(d, -1)
    another_works(p, d)


@pytest.mark.parametrize(("side", "kind", "name"), [("d", "internal", "unpack"), ("p", "data", "pack")])
def test_an_error_of_the_copy_is_one_requests_failure(group: RankGroup, side: str, kind: str, name: str) -> None:
    p, d = group.pair(plane="shm")
    caches, real = (d if side == "d" else p).context.caches, getattr(RankCaches, name)

    def planted(self: RankCaches, *args: Any, **more: Any) -> Any:
        if self is caches:
            raise RuntimeError("planted")
        return real(self, *args, **more)

    with mock.patch.object(RankCaches, name, planted):
        begin(p, d)
        assert not ended(p, d) and reason_of(d) == kind
    another_works(p, d)


TWO = TokenSharding(2, 16)


def loads(name: str, d: Rank, p: list[Rank], engine: PeerEngine) -> bool:
    """Whether a load succeeds."""
    token = grant(p, f"{name}-p", THEIRS, TOKENS)
    d.worker.post(load_plan(name, token, engine, OURS, 0, TOKENS))
    assert wait(lambda: name in d.received, [d, *p])
    return name not in d.failed


def test_p_said_that_ranks_share_tokens_out_which_hold_other_heads(group: RankGroup) -> None:
    """A rank of D whose tokens then nobody has must not take that for nothing to load."""
    p = [group.rank(tp_rank=n, tp_size=2, total_heads=2) for n in range(2)]
    d = group.rank(engine_id="engine-d", tp_rank=1, tp_size=4, total_heads=2, sharding=TWO)
    assert loads("told-right", d, p, peer(p))
    assert not loads("told-wrong", d, p, replace(peer(p), shardings=(TWO,)))
