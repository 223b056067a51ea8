"""Checksums between real ranks, over every plane on which P sends: each fault on the wire fails its load, and only that
load; no load fails without a fault; neither side can be talked out of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import link, load_state
from kvferry.connector.geometry.engine_types import CacheDtype
from kvferry.connector.pages.checksums import NO_CHECKSUM
from kvferry.connector.wire import messages
from kvferry.kernels.checksum import TRAILER_BYTES
from kvferry.transport.errors import ConfigError
from tests.handover.gates import PATIENT
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.handover.spoiler import Fault, Spoiler
from tests.handover.test_odd_peers import RawD
from tests.support.inside import sessions_of
from tests.support.ranks import Rank, grant, load_plan, peer, reason_of, wait
from tests.transport.plane_list import PUSH, host_planes

PLANES = host_planes(PUSH)
FORMS: dict[str, dict[str, Any]] = {
    "slots": {},
    "pieces": {"content": 64},  # blocks of 4 KiB, which tcp sends and receives in place
    "chunks": {"content": 64, "layers": 8},  # several chunks of equal size
}


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No attempt follows one that failed, so that a fault shows."""
    if "retried" not in request.node.name:
        monkeypatch.setattr(load_state, "ATTEMPTS_PER_PEER", 1)


def ranks(group: RankGroup, plane: str, form: str = "slots", **of_d: Any) -> tuple[Rank, Rank]:
    common: dict[str, Any] = {"plane": plane, "slot_bytes": (64 << 10) + (48 << 10) * (form == "chunks"), **PATIENT}
    p = group.rank(settings=Settings(checksum=True, **common), **FORMS[form])
    d = group.rank(engine_id="engine-d", settings=Settings(**common, **of_d), **FORMS[form])
    p.fill(THEIRS, TOKENS)
    return p, d


def load(p: Rank, d: Rank, name: str) -> bool:
    """One hand-over; whether it was loaded. Its bytes are then right, and its lease ends either way."""
    begin(p, d, name)
    assert wait(lambda: f"{name}-d" in d.received and f"{name}-p" in p.sent, [p, d])
    loaded = f"{name}-d" not in d.failed
    if loaded:
        assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    return loaded


def flipped(at: int, bit: int = 0) -> Fault:
    """One wrong bit in the first message."""

    def fault(number: int, message: bytearray) -> None:
        if number == 0:
            message[at] ^= 1 << bit

    return fault


def exchanged(first: int, second: int, nbytes: int) -> Fault:
    """Two blocks of each message change places."""

    def fault(number: int, message: bytearray) -> None:
        one, other = message[first : first + nbytes], message[second : second + nbytes]
        message[first : first + nbytes], message[second : second + nbytes] = other, one

    return fault


def ends_in_zeros(kept: float) -> Fault:
    """Only a part of the first message was written before it went, and the checksum."""

    def fault(number: int, message: bytearray) -> None:
        end = len(message) - TRAILER_BYTES
        start = int(kept * end)
        if number == 0:
            message[start:end] = bytes(end - start)

    return fault


@pytest.mark.parametrize("form", ["slots", "pieces"])
@pytest.mark.parametrize("plane", PLANES)
def test_each_wrong_byte_fails_its_load_and_no_other(group: RankGroup, plane: str, form: str) -> None:
    p, d = ranks(group, plane, form)
    assert load(p, d, "first")
    spoiler = Spoiler(p)
    assert load(p, d, "relayed")
    length = spoiler.lengths[0]
    data_end = length - TRAILER_BYTES
    places = [*range(8), data_end // 2 + 1, data_end - 1, data_end, length - 1]
    for number, at in enumerate(places):
        spoiler.fault = flipped(at, number % 8)
        spoiler.lengths.clear()
        assert not load(p, d, f"flip-{number}"), f"byte {at} of {length}"
        assert reason_of(d) == "checksum"
    spoiler.fault = None
    assert load(p, d, "last")


def test_a_load_with_a_wrong_byte_is_retried(group: RankGroup) -> None:
    p, d = ranks(group, "tcp")
    assert load(p, d, "first")
    Spoiler(p).fault = flipped(9)
    assert load(p, d, "spoiled"), "the second attempt brings the right bytes"
    assert d.worker.rank_context is not None
    assert d.figures()["retried"] == {"checksum": 1}


@pytest.mark.parametrize("form", ["slots", "pieces"])
@pytest.mark.parametrize("plane", PLANES)
def test_a_lost_end_and_blocks_that_changed_places(group: RankGroup, plane: str, form: str) -> None:
    p, d = ranks(group, plane, form)
    assert load(p, d, "first")
    spoiler = Spoiler(p)
    faults = {
        "half": ends_in_zeros(0.5),
        "most": ends_in_zeros(0.999),
        "neighbours": exchanged(0, 1024, 1024),
        "words": exchanged(8, 4096, 8),
    }
    for name, fault in faults.items():
        spoiler.fault = fault
        spoiler.lengths.clear()
        assert not load(p, d, name), name
        assert reason_of(d) == "checksum"
    spoiler.fault = None
    assert load(p, d, "last")


@pytest.mark.parametrize("plane", PLANES)
def test_two_chunks_that_changed_places(group: RankGroup, plane: str) -> None:
    """Each is whole and carries a checksum of its own bytes, but under the tag of the other."""
    p, d = ranks(group, plane, "chunks")
    assert load(p, d, "first")
    spoiler = Spoiler(p)
    assert load(p, d, "relayed")
    assert len(spoiler.lengths) >= 2 and spoiler.lengths[0] == spoiler.lengths[1]
    spoiler.retag = lambda tag: tag ^ 1 if tag & 0xFFFFFFFF < 2 else tag
    assert not load(p, d, "exchanged") and reason_of(d) == "checksum"
    spoiler.retag = lambda tag: tag
    assert load(p, d, "last")


def test_wrong_bytes_are_not_written_where_they_are_checked_before(group: RankGroup) -> None:
    p, d = ranks(group, "shm")
    token = grant([p], "first-p", THEIRS, TOKENS)
    d.worker.post(load_plan("first-d", token, peer([p]), [20, 21, 22, 23, 24, 25, 26], 0, TOKENS))
    assert wait(lambda: d.received == {"first-d"}, [p, d]) and not d.failed
    Spoiler(p).fault = flipped(5)
    before = d.read(OURS, TOKENS).clone()
    assert not load(p, d, "spoilt")
    pages = d.read(OURS, TOKENS)
    assert torch.equal(pages[0], before[0]), "the first chunk is not copied"


@pytest.mark.parametrize("form", ["slots", "pieces"])
@pytest.mark.parametrize("plane", PLANES)
def test_the_function_of_gpu_ranks_between_host_ranks(
    group: RankGroup, plane: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A D on a GPU has ``sum64`` only, so P computes it in host memory."""
    monkeypatch.setattr(link, "checksums_on", lambda device: ("sum64",))
    p, d = ranks(group, plane, form)
    assert load(p, d, "first")
    (session,) = sessions_of(p).values()
    assert session.checksum == "sum64"
    spoiler = Spoiler(p)
    for number, at in enumerate((0, 777, -TRAILER_BYTES - 1, -1)):
        spoiler.fault = flipped(at, number)
        spoiler.lengths.clear()
        assert not load(p, d, f"flip-{number}"), at
        assert reason_of(d) == "checksum"
    spoiler.fault = None
    assert load(p, d, "last")


def test_bytes_that_d_converts_are_checked_too(group: RankGroup) -> None:
    common: dict[str, Any] = {"plane": "tcp", **PATIENT}
    p = group.rank(content=16, cache_dtype=CacheDtype("float16"), settings=Settings(**common))
    d = group.rank(
        engine_id="engine-d", content=16, cache_dtype=CacheDtype("bfloat16"),
        settings=Settings(checksum=True, convert_dtype=True, **common),
    )  # fmt: skip
    p.fill(THEIRS, TOKENS)
    begin(p, d, "first")
    assert wait(lambda: "first-d" in d.received, [p, d]) and not d.failed
    spoiler = Spoiler(p)
    spoiler.fault = flipped(100)
    begin(p, d, "spoilt")
    assert wait(lambda: "spoilt-d" in d.received, [p, d]) and d.failed == {"spoilt-d"}
    assert reason_of(d) == "checksum"


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_no_false_alarm_in_240_concurrent_handovers(group: RankGroup, plane: str) -> None:
    count, tokens = 240, 32
    settings = Settings(plane=plane, checksum=True, **PATIENT)
    form: dict[str, Any] = {"blocks": 2 * count, "content": 64, "settings": settings}
    p, d = group.rank(**form), group.rank(engine_id="engine-d", **form)
    theirs = torch.randperm(2 * count, generator=torch.Generator().manual_seed(1)).view(count, 2).tolist()
    ours = torch.randperm(2 * count, generator=torch.Generator().manual_seed(2)).view(count, 2).tolist()
    for blocks in theirs:
        p.fill(blocks, tokens)
    tokens_of = [grant([p], f"{number}-p", theirs[number], tokens) for number in range(count)]
    for number, token in enumerate(tokens_of):
        d.worker.post(load_plan(f"{number}-d", token, peer([p]), ours[number], 0, tokens))
    assert wait(lambda: len(d.received) == len(p.sent) == count, [p, d]) and not d.failed
    wanted = d.wanted(tokens)
    assert all(torch.equal(d.read(blocks, tokens), wanted) for blocks in ours)


# --- who decides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demands", [(True, False), (False, True), (False, False)], ids=["P", "D", "nobody"])
def test_either_side_demands_checksums(
    group: RankGroup, demands: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = (
        group.rank(engine_id=name, settings=Settings(checksum=on, **PATIENT))
        for name, on in zip(("engine-p", "engine-d"), demands, strict=True)
    )
    p.fill(THEIRS, TOKENS)
    with caplog.at_level("INFO", "vllm.kvferry"):
        another_works(p, d)
    (line,) = [line for line in caplog.messages if "data plane to" in line]
    if any(demands):
        assert "is shm with checksums (xxh3) (cma: " in line and "without messages" in line
    else:
        assert line.endswith("is cma")


def test_a_d_without_checksums_is_not_served_by_a_p_that_demands_them(group: RankGroup) -> None:
    p, d = group.rank(settings=Settings(checksum=True)), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    raw = RawD(p, d)
    welcome = raw.start_handshake()
    assert welcome.checksum and welcome.checksums == ("xxh3", "sum64")
    raw.attach(welcome)
    assert "P demands them" in raw.answer(messages.AttachRefused).reason
    raw.close()
    another_works(p, d)


def test_a_plane_without_messages_is_refused_with_checksums(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    raw = RawD(p, d)
    raw.start_handshake()
    raw.send(messages.Attach(plane="cma", payload=b"", checksum="xxh3"))
    assert "cma has no checksums" in raw.answer(messages.AttachRefused).reason
    raw.close()


def test_a_d_that_names_a_plane_without_messages_says_why_it_fails(
    group: RankGroup, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = (
        group.rank(settings=Settings(checksum=True)),
        group.rank(engine_id="engine-d", settings=Settings(plane="cma")),
    )
    p.fill(THEIRS, TOKENS)
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and d.failed == {"req-d"}
    assert "no data plane in common: cma: " in caplog.text


def test_settings_that_contradict_each_other_fail_the_start(group: RankGroup) -> None:
    with pytest.raises(ConfigError, match=f"plane: 'cma' cannot be used: {NO_CHECKSUM}"):
        group.rank(settings=Settings(plane="cma", checksum=True))


def test_a_p_that_leaves_the_checksum_out_is_noticed(group: RankGroup) -> None:
    """D demands it, and P's messages have another length then."""
    p, d = (
        group.rank(engine_id=name, settings=Settings(plane="shm", checksum=name == "engine-d", **PATIENT))
        for name in ("engine-p", "engine-d")
    )
    p.fill(THEIRS, TOKENS)
    assert load(p, d, "first")
    (session,) = sessions_of(p).values()
    session.checksum = None
    begin(p, d, "bare")
    assert wait(lambda: "bare-d" in d.received, [p, d]) and d.failed == {"bare-d"}
