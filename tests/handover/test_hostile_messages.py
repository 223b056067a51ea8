"""Peers with the key that send any messages that P decodes: P's memory and its turns stay bounded, and a hand-over of
an honest D beside them arrives."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.token_sharding import ALL_TOKENS
from kvferry.connector.wire import messages
from tests.handover.scenario import PATIENT, THEIRS, TOKENS, RankGroup, another_works
from tests.support.random_messages import decodes, random_request
from tests.support.ranks import grant, wait
from tests.support.turns import MOST_BYTES, MOST_TURN_LINES, TurnLines, resident_bytes

MESSAGES, PEERS = 1000, 3


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32))
def test_any_messages(seed: int) -> None:
    rng = random.Random(seed)
    group = RankGroup()
    try:
        p, d = group.pair(plane="shm", of_d=PATIENT)
        tokens = [grant([p], f"req-{n}", THEIRS, TOKENS) for n in range(3)]
        raws = [group.raw(p, d, attached=False) for _ in range(PEERS)]
        welcomes = [raw.greet() for raw in raws]
        raws[0].attach(welcomes[0])
        known: dict[str, list[Any]] = {
            "geometry": [d.context.caches.geometry], "model": [dict(d.context.model)], "engine_id": ["engine-d"],
            "token": [*tokens, bytes(16), b"u" * 16], "tokens": [tuple(tokens)], "read": list(range(40)),
            "decode_engine": [b"c" * 16, b"d" * 16], "plane": ["shm", "tcp"], "chunk_bytes": [64 << 10, 4 << 20],
            "region": [0], "layer": [0, 1], "num_layers": [1, 2, 4], "head": [0], "num_heads": [1, 4],
            "num_tokens": [1, 16, TOKENS], "Span.token": [0, 16], "shard": [ALL_TOKENS],
        }  # fmt: skip
        drawn = [random_request(rng, known) for _ in range(2 * MESSAGES)]
        requests = [request for request in drawn if decodes(request)]
        kinds = Counter(type(request).__name__ for request in requests)
        assert len(kinds) == len(get_args(messages.Request)), f"{kinds}: the draw must reach every kind"
        assert min(kinds.values()) > 50, kinds
        frames = [messages.encode(request) for request in requests[:MESSAGES]]
        turn, before = TurnLines(p), resident_bytes()
        for number, each in enumerate(frames):
            raw = raws[number % PEERS]
            assert wait(lambda raw=raw, each=each: raw.connection.send(each))
            if number % 100 == 0:
                for raw in raws[1:]:  # the first does not read
                    raw.connection.receive()
        another_works(p, d)
        assert turn.most < MOST_TURN_LINES and resident_bytes() - before < MOST_BYTES
        stats = p.context.stats.take()
        assert stats is None or "unexpected error" not in stats["dropped"], stats
    finally:
        group.close()
