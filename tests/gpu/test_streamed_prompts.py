"""Prompts that leave while P's GPU computes them: a layer leaves once the GPU has computed it, and not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import PATIENT, RankGroup
from tests.support.ranks import Timed, wait

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, STEP, LONG = 100, 40, 1_000_000_000
THEIRS, OURS = [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]


@pytest.fixture
def group() -> Iterator[RankGroup]:
    group = RankGroup()
    yield group
    group.close()


def test_each_step_leaves_once_the_gpu_has_computed_it(group: RankGroup) -> None:
    settings = Timed(plane="tcp", slot_bytes=1 << 20, staging_bytes=8 << 20, **PATIENT)
    p, d = (group.rank(settings=settings, engine_id=f"engine-{side}", device="cuda:0") for side in "pd")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.plan(start, stop)
        torch.cuda._sleep(LONG)  # the GPU is behind its thread
        engine.write(start, stop)
        engine.hook(range(len(p.layers)))
        engine.end()
        assert wait(lambda stop=stop: torch.equal(d.read(OURS, stop), d.wanted(stop)), [p, d])
    engine.grant()
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d]) and not d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
