"""Hand-overs: pushed and pulled, packed, between dtypes; D has P's bytes."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.engine_types import CacheDtype
from kvferry.connector.geometry.read_plan import plan_reads
from kvferry.connector.geometry.spans import Span, check_span, check_spans
from kvferry.connector.worker.aggregator import ConnectorOutput, KVOutputAggregator
from kvferry.transport import wake
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from kvferry.transport.planes import cma
from kvferry.transport.planes.tcp_flows import Cipher
from tests.handover.scenario import (
    OURS,
    PATIENT,
    PLANES,
    SMALL,
    THEIRS,
    TOKENS,
    Gate,
    Pair,
    RankGroup,
    another_works,
    begin,
    ended,
    has_all,
    is_wiped,
)
from tests.support.inside import clock_of, plans_of, relaxed
from tests.support.ranks import Rank, grant, let_time_pass, load_plan, peer, standing, wait
from tests.support.turns import TurnLines


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("tokens", [1, 16, 77, 200])
def test_all_bytes_arrive_and_the_lease_ends(group: RankGroup, plane: str, tokens: int) -> None:
    p, d = (group.rank(plane=plane, engine_id=f"engine-{name}", **SMALL) for name in "pd")
    blocks, ours = (random.Random(tokens + n).sample(range(32), -(-tokens // 16)) for n in range(2))
    p.fill(blocks, tokens)
    begin(p, d, tokens=tokens, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and torch.equal(d.read(ours, tokens), d.wanted(tokens))
    untouched = sorted(set(range(32)) - set(ours))
    assert all((d.caches[name][untouched] == -1).all() for name in d.layers)
    assert d.plane == plane


def test_the_comparison_fails_on_planted_corruption(p: Rank, d: Rank) -> None:
    p.caches[p.layers[2]][THEIRS[1], 1, 3, 5] ^= 1 << 7
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert (d.read(OURS, 100) != d.wanted(100)).nonzero().tolist() == [[2, 1, 19, 5]]


@pytest.mark.parametrize("content", [16, 64], ids=["slots", "pieces"])
def test_encrypted(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: int
) -> None:
    caplog.set_level("INFO", "vllm.kvferry")
    opened, real = [], Cipher.open

    def seen(self: Cipher, *args: object) -> bool:
        opened.append(self)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Cipher, "open", seen)
    p, d = group.pair(plane="tcp", content=content, **SMALL, **PATIENT, of_d={"encrypt": True})
    another_works(p, d)
    assert opened
    assert f"KV bytes from engine-p pp0 tp0 at 127.0.0.1:{p.address.port} are encrypted" in caplog.text


def test_encrypted_kv_bytes_in_full_slots(group: RankGroup) -> None:
    """CURVE makes each frame longer, and libzmq compares the longer frame with the largest one that D takes."""
    p, d = group.pair(plane="zmq", slot_bytes=128 << 10, layers=2, content=8192, blocks=18)
    begin(p, d)
    assert ended(p, d) and d.plane == "zmq"


def test_an_idle_transfer_thread_sleeps(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes a few times in a second, for little work, and does not take its sleep for being held up."""
    monkeypatch.setattr(wake, "HELD_UP_SECONDS", 0.0)
    p, d = group.pair()
    another_works(p, d)
    for rank in (p, d):
        turns, begun, clock = TurnLines(rank), time.monotonic(), clock_of(rank)
        now = clock.now
        assert wait(lambda clock=clock, now=now: clock.now > now + 0.5), "its clock goes on while it sleeps"
        assert turns.count < 20 + 4 * (time.monotonic() - begun) and turns.most < 1000


def test_the_interval_is_short_for_what_is_posted_while_the_thread_relaxes(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has looked for work, and leaves the interpreter's switch interval to the engine, just before."""
    p = group.rank()
    thread = p.thread

    class Posted(deque[Any]):
        def append(self, plan: Any) -> None:
            thread.wake()
            assert wait(lambda: relaxed(thread))
            super().append(plan)

    monkeypatch.setattr(plans_of(thread), "posted", Posted())
    grant([p], "req-p", [3], 10)
    assert not relaxed(thread) and sys.getswitchinterval() < 1e-4


BLOCKS, EACH = 7, 2
"""Blocks of a prompt, and prompts that are under way at once in each direction."""


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp"])
def test_two_engines_change_places_under_load(group: RankGroup, plane: str) -> None:
    """A to B, B to A, and both at once, with every byte compared; whoever was P is D two hand-overs later."""
    draw = random.Random(plane)
    a, b = (group.rank(engine_id=f"engine-{name}", plane=plane, content=64, blocks=64, **PATIENT) for name in "ab")
    of_a, of_b = (draw.sample(range(1, 64), 4 * EACH * BLOCKS) for _ in range(2))
    half = 2 * EACH * BLOCKS
    ways = {"a": (a, b, of_a[:half], of_b[:half]), "b": (b, a, of_b[half:], of_a[half:])}
    for life in range(8):
        begun = []
        for way in ("a", "b", "ab")[life // 2 % 3]:
            p, d, *blocks = ways[way]
            for n in range(EACH):
                theirs, ours = (own[n * BLOCKS : (n + 1) * BLOCKS] for own in blocks)
                for cache in d.caches.values():
                    cache[ours] = -7
                p.fill(theirs, TOKENS)
                begin(p, d, f"{way}{life}-{n}", TOKENS, theirs, ours)
                begun.append((p, d, f"{way}{life}-{n}", ours))
        for p, d, name, _ in begun:
            assert wait(lambda p=p, d=d, name=name: f"{name}-d" in d.received and f"{name}-p" in p.sent, [a, b])
        assert not a.failed and not b.failed and all(has_all(d, ours) for _, d, _, ours in begun)


SHORT = [3, 1, 4]


@pytest.mark.parametrize("granted", [True, False])
def test_a_load_ends_when_its_last_rank_reports_and_fails_if_any_rank_failed(group: RankGroup, granted: bool) -> None:
    """Without a lease on P's second rank, D's second rank fails late: once P no longer waits for the lease."""
    ps = [group.rank(tp_rank=r, tp_size=2, ask_hold_seconds=0.5) for r in range(2)]
    ds = [group.rank(tp_rank=r, tp_size=2, engine_id="engine-d") for r in range(2)]
    for p in ps:
        p.fill(SHORT, 40)
    token = grant(ps if granted else ps[:1], "req-p", SHORT, 40)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer(ps), SHORT, 0, 40))
    aggregator, reported, ends = KVOutputAggregator(2), set[int](), time.monotonic() + 60
    while True:
        results = [d.worker.take_results() for d in ds]
        reported |= {rank for rank, each in enumerate(results) if each.received}
        output = aggregator.aggregate([SimpleNamespace(kv_connector_output=each) for each in results])
        assert output is not None
        report: ConnectorOutput = output.kv_connector_output
        assert (report.finished_recving == {"req-d"}) == (reported == {0, 1})
        if report.finished_recving:
            break
        assert aggregator.pending() == ({"req-d": tuple(reported)} if reported else {})
        assert time.monotonic() < ends, f"ranks that reported: {reported}"
        time.sleep(0.001)
    assert report.failed_recving == (set() if granted else {"req-d"})


TURN_BYTES = 4096
"""A hand-over takes some 25 turns."""


@pytest.fixture
def pair(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(cma, "TURN_BYTES", TURN_BYTES)
    return group.pair(plane="cma", **PATIENT | {"handover_timeout_seconds": 86400.0})


def plane_of(rank: Rank) -> Any:
    (plane,) = rank.context.planes
    return plane


def test_a_step_waits_for_the_end_of_the_copy(p: Rank, d: Rank) -> None:
    """Its device cannot: the copy is none of the device's."""
    another_works(p, d)
    gate = Gate(plane_of(d), "progress", lambda: False)
    begin(p, d, now=True)
    step = threading.Thread(target=d.worker.begin_step)
    step.start()
    assert wait(lambda: bool(plane_of(d).copies))
    step.join(0.3)
    assert step.is_alive(), "the engine would compute with blocks that are not there yet"
    gate.open()
    step.join(60)
    assert standing(d) == {"req-d"} and has_all(d)


def test_a_copy_that_goes_on_may_take_longer_than_the_time_out(p: Rank, d: Rank) -> None:
    plane, progress, turns, allowed = plane_of(d), plane_of(d).progress, 0, 0

    def seldom() -> bool:
        nonlocal turns
        if turns == allowed:
            return False
        turns += bool(plane.copies)
        return bool(progress())

    plane.progress = seldom
    begin(p, d)
    assert wait(lambda: bool(plane.copies), [p, d])
    loads, seen = d.consumer.loads.running, set[int]()
    while "req-d" not in d.received:
        allowed += 1
        assert wait(lambda: turns == allowed or "req-d" in d.received, [p, d])  # noqa: B023 (it is called here)
        seen.update(load.nbytes for load in list(loads))
        let_time_pass(d, 250 * allowed)
    assert len(seen) > 10, "what is in place is counted turn by turn"
    assert d.figures()["finished"]["cma"]["nbytes"] == [d.wanted(TOKENS).nbytes]
    assert 250 * allowed > 2 * PATIENT["transfer_timeout_seconds"] and not d.failed and has_all(d)


def test_memory_that_cannot_be_read_is_a_broken_plane(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    another_works(p, d)
    d.figures()
    real, calls = cma.read_memory, []

    def breaks_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        real(*args)

    monkeypatch.setattr(cma, "read_memory", breaks_once)
    begin(p, d)
    assert ended(p, d) and d.counts("num_retries") == {"peer_lost": 1} and len(calls) > 3
    monkeypatch.undo()
    another_works(p, d, "then")


PACKED = "transposed"
DIVISION = 8
"""Tokens in a tile of keys, below."""


def divided(tokens: int, content: int) -> np.ndarray:
    """[2, N, D]: keys in tiles of some tokens, the tokens of a tile innermost; values in halves, each of all tokens.

    Those of the larger blocks are long enough to be sent from where they lie.
    """
    channels = content // 2
    keys = np.arange(tokens * channels).reshape(-1, channels, DIVISION).swapaxes(1, 2).reshape(tokens, channels)
    halves = np.arange(tokens * channels).reshape(2, tokens, channels // 2)
    values = tokens * channels + halves.swapaxes(0, 1).reshape(tokens, channels)
    return np.stack([keys, values])


def places(rank: Rank, order: str) -> torch.Tensor:
    """[N, C]: where each element of a token lies in its (block, head). As ``divided``, or as vLLM's CPU attention keeps
    keys: [C, N]."""
    if order == "divided":
        return torch.cat([torch.from_numpy(part) for part in divided(rank.block_size, rank.content)], dim=1)
    return torch.arange(rank.block_size * rank.content).view(rank.content, rank.block_size).T


def fill_packed(rank: Rank, blocks: list[int], tokens: int, order: str = PACKED) -> None:
    """The labels of a prompt; the rest of the last tile stays -1."""
    wanted, where, token = rank.wanted(tokens), places(rank, order), torch.arange(tokens)
    block, slots = torch.tensor(blocks)[token // rank.block_size], where[token % rank.block_size]
    for number, name in enumerate(rank.layers):
        flat = rank.caches[name].view(len(rank.caches[name]), len(rank.heads), -1)
        flat[block[:, None], :, slots] = wanted[number].permute(1, 2, 0)  # [T, C, H]


def read_packed(rank: Rank, blocks: list[int], tokens: int, order: str = PACKED) -> torch.Tensor:
    """[L, H, T, C] of a prompt."""
    stacked = torch.stack([rank.caches[name] for name in rank.layers])[:, torch.tensor(blocks)]
    found = stacked.flatten(-2)[..., places(rank, order)]  # [L, n, H, N, C]
    flat = found.permute(0, 2, 1, 3, 4).reshape(len(rank.layers), len(rank.heads), -1, rank.content)
    return flat[:, :, :tokens]


@pytest.mark.parametrize("slot_bytes", [64 << 10, 4 << 20])
@pytest.mark.parametrize("tokens", [1, 15, 16, 20, 77])
def test_all_tokens_arrive_whatever_the_order_inside_a_block(group: RankGroup, tokens: int, slot_bytes: int) -> None:
    form: dict[str, Any] = {"packing": PACKED, "content": 64, "slot_bytes": slot_bytes, "staging_bytes": 16 << 20}
    p, d = group.rank(**form), group.rank(engine_id="engine-d", **form)
    blocks, ours = ([3, 9, 1, 30, 7][: -(-tokens // 16)], [2, 4, 31, 0, 5][: -(-tokens // 16)])
    fill_packed(p, blocks, tokens)
    begin(p, d, tokens=tokens, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d]) and not d.failed
    assert torch.equal(read_packed(d, ours, tokens), d.wanted(tokens))


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp", "zmq"])
@pytest.mark.parametrize(("sizes", "heads"), [((16, 32), 2), ((32, 16), 1), ((32, 48), 2), ((16, 16), 2)], ids=str)
def test_blocks_of_other_sizes_take_divided_ones(
    group: RankGroup, sizes: tuple[int, int], heads: int, plane: str
) -> None:
    """From one rank to each of two, so that heads are sliced too; P's last block is partial, and D's another."""
    p, *ds = (
        group.rank(
            packing=PACKED, content=64, plane=plane, block_size=size, places=lambda layer, size=size: divided(size, 64),
            tp_rank=rank, tp_size=of, **SMALL,
        )
        for size, rank, of in ((sizes[0], 0, 1), *((sizes[1], rank, heads) for rank in range(heads)))
    )  # fmt: skip
    assert [region.part for region in p.context.caches.geometry.regions] == ["", "k", "v"]
    tokens = 77
    blocks, ours = [3, 9, 1, 30, 7][: -(-tokens // sizes[0])], [2, 4, 31, 0, 5][: -(-tokens // sizes[1])]
    fill_packed(p, blocks, tokens, "divided")
    token = grant([p], "req-p", blocks, tokens)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer([p]), ours, 0, tokens))
    assert wait(lambda: all(d.received == {"req-d"} for d in ds) and p.sent == {"req-p"}, [p, *ds])
    for d in ds:
        assert not d.failed and torch.equal(read_packed(d, ours, tokens, "divided"), d.wanted(tokens))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"block_size": 32}, "tile_tokens"),
        ({"packing": "pairs"}, "packing"),
        ({"packing": ""}, "packing"),
        ({"places": lambda layer: divided(16, 16)}, "packing"),
    ],
)
def test_ranks_that_pack_otherwise_refuse_each_other(group: RankGroup, form: dict[str, Any], field: str) -> None:
    p, d = group.rank(packing=PACKED), group.rank(**({"packing": PACKED, "engine_id": "engine-d"} | form))
    begin(p, d, tokens=20, theirs=[1, 2], ours=[1, 2])
    assert wait(lambda: d.failed == {"req-d"}, [p, d]) and is_wiped(d, -1)
    ours, theirs = (rank.context.caches.geometry for rank in (d, p))
    with pytest.raises(IncompatiblePeerError, match=f"{field} of layer"):
        compatible(ours, theirs)


def test_spans_of_packed_groups_are_whole_tiles(group: RankGroup) -> None:
    geometry = group.rank(packing=PACKED).context.caches.geometry
    (planned,) = plan_reads(geometry, geometry, [(17, 37)])
    assert (planned.span.token, planned.span.num_tokens) == (16, 32)
    check_spans([planned.span], geometry, 37)
    whole = Span(0, 0, 4, 0, 4, 0, 48)
    check_spans([whole], geometry, 37)
    for token, count, words in ((0, 37, "cuts through"), (5, 16, "cuts through"), (0, 64, "outside")):
        with pytest.raises(GeometryError, match=words):
            check_span(msgspec.structs.replace(whole, token=token, num_tokens=count), geometry, 37)
    with pytest.raises(GeometryError, match="elements"):
        check_spans([whole, whole], geometry, 37)


OFF, CONVERTS = {"convert_dtype": False}, {"convert_dtype": True}
LAYERS = [f"model.layers.{n}.attn" for n in range(4)]
Lines = pytest.LogCaptureFixture


def fp8(dtype: str = "fp8", **scales: tuple[float, float]) -> dict[str, Any]:
    """Caches of vLLM's: bytes, 64 to a head and token, the first 40 of them K."""
    of_layers = {layer: scales.get(f"layer_{n}", (0.5, 0.125)) for n, layer in enumerate(LAYERS)}
    return {"cache_dtype": CacheDtype(dtype, 40, of_layers)}


TILES = {"packing": "tiles"}


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (
            {"cache_dtype": CacheDtype("float16")}, {"cache_dtype": CacheDtype("bfloat16")},
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is bfloat16, the peer's is "
            "float16",
        ),
        (
            fp8(), fp8("fp8_e5m2"),
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is float8_e5m2, the peer's is "
            "float8_e4m3fn",
        ),
        (
            fp8(layer_2=(0.75, 0.125)), fp8(),
            "scales of K and V of layer 'model.layers.2.attn' (convert_dtype is off) differs, ours is 0.5 and 0.125, "
            "the peer's is 0.75 and 0.125",
        ),
        (
            fp8() | TILES, fp8("fp8_e5m2") | TILES | CONVERTS,
            "dtype of layer 'model.layers.0.attn' (blocks whose tokens are packed are not converted) differs",
        ),
    ],
    ids=["dtype", "fp8 dtype", "scales", "packed"],
)  # fmt: skip
def test_numbers_that_differ_are_refused_by_name(
    group: RankGroup, theirs: dict[str, Any], ours: dict[str, Any], named: str, caplog: Lines
) -> None:
    p, d = group.pair(of_p=theirs, of_d=ours)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    of_d, of_p = (
        [record.getMessage() for record in caplog.records if record.name == f"vllm.kvferry.{name}"]
        for name in ("link", "session")
    )
    assert len(of_d) == len(of_p) == 1 and "\n" not in of_d[0] + of_p[0]
    assert named in of_d[0]
    assert named.split(" differs", maxsplit=1)[0] in of_p[0], "P's operator reads it, too"


@pytest.mark.parametrize("settings", [OFF, CONVERTS], ids=["off", "on"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_the_same_numbers_by_any_name_are_copied(group: RankGroup, name: str, settings: dict[str, Any]) -> None:
    p, d = group.pair(of_p=fp8(), of_d={**fp8(name), **settings, "layout": "NHD"})
    another_works(p, d)
    assert d.plane == "cma"


def test_other_scales_of_the_same_dtype_are_converted(group: RankGroup, caplog: Lines) -> None:
    """Layer 1 has other scales on D; those of the others agree, and so do their numbers."""
    p, d = group.pair(of_p=fp8(), of_d=fp8(layer_1=(1.0, 0.5)) | CONVERTS)
    finite = (torch.arange(1 << 8, dtype=torch.int32) % 127).to(torch.uint8)  # 0x7f would be NaN
    for n, name in enumerate(p.layers):
        stored = p.caches[name].view(torch.uint8)
        stored.copy_(finite[(torch.arange(stored.numel()) * 7 + n) % 256].view(stored.shape))
    with caplog.at_level("INFO", "vllm.kvferry"):
        begin(p, d)
        assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert not d.failed and d.plane == "shm"
    assert [line for line in caplog.messages if "is converted, float8_e4m3fn to float8_e4m3fn" in line]
    assert [line for line in caplog.messages if "data plane to" in line and "cma: it copies bytes, and dtypes" in line]
    theirs, ours = (rank.read(ids, TOKENS).view(torch.uint8) for rank, ids in ((p, THEIRS), (d, OURS)))
    assert torch.equal(ours[[0, 2, 3]], theirs[[0, 2, 3]])
    numbers = theirs[1].view(torch.float8_e4m3fn).float()
    numbers[..., :40] *= 0.5
    numbers[..., 40:] *= 0.125 / 0.5
    assert torch.equal(ours[1], numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_plane_that_copies_bytes_is_not_had_by_asking_for_it(group: RankGroup, caplog: Lines) -> None:
    p, d = group.pair(of_p=fp8(), of_d={**fp8("fp8_e5m2"), **CONVERTS, "plane": "cma"})
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    assert wait(lambda: "no data plane in common: cma: it copies bytes, and dtypes differ" in caplog.text)
