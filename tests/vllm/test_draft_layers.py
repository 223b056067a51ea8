"""Draft layers: cleared, or taken with the same draft model, and never another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvferry.connector.vllm import from_vllm
from tests.support.cases import each_once
from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.labelled import BLOCK, CONTENT, HEADS, LAYERS, prompt
from tests.vllm.stepped import RUNNERS, Engine, EngineGroup, Forward, Lines, Turn, Worker, hand_over, settle

HEAD = f"model.layers.{LAYERS}.self_attn.attn"
DRAFTS = 3
WINDOW = 32


def kv_of_head(ids: Sequence[int], start: int, origin: int) -> torch.Tensor:
    """[T] int32: what the head keeps of the tokens ``ids`` from position ``start`` on; never 0."""
    tokens = torch.tensor(list(ids), dtype=torch.int64) * 4096 + torch.arange(start, start + len(ids))
    return ((tokens + 1) * 2 + origin).to(torch.int32)


class DraftingForward(Forward):
    """The head runs when the forward of the model has ended."""

    def finish(self) -> None:
        super().finish()
        engine, worker = self.engine, self.worker
        assert isinstance(engine, DraftingEngine) and isinstance(worker, DraftingModelRunner)
        for request_id, turn in self.turns.items():
            table = torch.tensor(self.tables[request_id][-1 if engine.own_table else 0])
            if request_id not in engine.first:
                engine.first[request_id] = turn, worker.of_head(table, 0, turn.start).clone()
            cache, places = worker.caches[HEAD].view(torch.int32), torch.arange(turn.start, len(turn.ids))
            values = kv_of_head(turn.ids[turn.start :], turn.start, engine.origin)
            cache[table[places // engine.block], :, places % engine.block] = values[:, None, None]


class DraftingModelRunner(Worker):
    """By name and methods one of vLLM's model runners, as the connector finds it among its callers."""

    def __init__(self, engine: Engine, rank: int) -> None:
        assert isinstance(engine, DraftingEngine)
        names = {HEAD} if engine.config.speculative_config else set()
        if engine.runner.startswith("v2"):
            self.speculator = SimpleNamespace(draft_attn_layer_names=names)
        else:
            self.drafter = SimpleNamespace(_draft_attn_layer_names=names)
        super().__init__(engine, rank)

    def execute_model(self, scheduler_output: Any) -> None:
        """The steps of these tests are run by ``run``."""

    def make_caches(self) -> dict[str, torch.Tensor]:
        caches = super().make_caches()
        like = caches[self.engine.layers[0]]
        return caches | {HEAD: torch.full_like(like, -1.0)}

    def of_head(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """[T,H,C] int32: the head's KV of tokens [start, stop)."""
        places = torch.arange(start, stop)
        return self.caches[HEAD].view(torch.int32)[table[places // self.engine.block], :, places % self.engine.block]


class DraftingEngine(Engine):
    """``head``: the folder of its head. ``own_table``: the head attends to a window, and has a block table of its own.
    ``first``: of each request the tokens of its first forward, and the head's KV below these, as rank 0 has it."""

    worker_class = DraftingModelRunner
    forward_class = DraftingForward

    def __init__(self, model: ModelConfig, origin: int, *, head: Path, own_table: bool = False, **kwargs: Any) -> None:
        self.head, self.own_table = head, own_table
        self.first: dict[str, tuple[Turn, torch.Tensor]] = {}
        super().__init__(model, origin, drafts=DRAFTS, **kwargs)

    def speculative(self, model: ModelConfig, drafts: int) -> SpeculativeConfig:
        return SpeculativeConfig(
            method="eagle",
            model=str(self.head),
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=ParallelConfig(tensor_parallel_size=self.tp),
        )

    def start(self, config: VllmConfig, scheduled: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        groups = scheduled.kv_cache_groups
        spec = groups[0].kv_cache_spec
        assert isinstance(spec, FullAttentionSpec)
        if self.own_table:
            windowed = SlidingWindowSpec(
                block_size=spec.block_size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype,
                sliding_window=WINDOW,
            )  # fmt: skip
            groups.append(KVCacheGroupSpec([HEAD], windowed))
        else:
            groups[0].layer_names.append(HEAD)
        super().start(config, scheduled, *args, **kwargs)


pytestmark = pytest.mark.vllm
Make = Callable[..., DraftingEngine]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two heads of one form."""
    folder = tmp_path_factory.mktemp("heads")
    specs = [
        ModelSpec(layers=1, hidden=32, heads=HEADS, kv_heads=HEADS, head_dim=CONTENT // 2, intermediate=size,
                  vocabulary=300, max_tokens=1024)
        for size in (32, 64)
    ]  # fmt: skip
    return [build_model(folder / str(number), spec, weights=False) for number, spec in enumerate(specs)]


@pytest.fixture
def make(group: EngineGroup, tiny: Any, heads: list[Path]) -> Make:
    """Makes engines that draft: ``make(origin, number of its head)``."""

    def made(origin: int, head: int = 0, **kwargs: Any) -> DraftingEngine:
        engine = DraftingEngine(tiny, origin, head=heads[head], **kwargs)
        group.engines.append(engine)
        return engine

    return made


def of_first(d: DraftingEngine, name: str, tokens: int) -> torch.Tensor:
    """[T,H,C] int32: the head's KV of all but the last of so many tokens, when D first computed with it."""
    turn, found = d.first[name]
    assert turn.start == len(found) == tokens - 1
    return found


LENGTHS = [2, BLOCK, 4 * BLOCK + 1, 250]


@each_once("runner ahead own_table", (*RUNNERS, *RUNNERS), (0, 1), (False, True))
def test_a_head_on_both_sides(make: Make, runner: str, ahead: int, own_table: bool) -> None:
    p, d = (make(n, ahead=ahead, runner=runner, own_table=own_table) for n in range(2))
    for tokens in LENGTHS:
        ids = prompt(tokens, tokens)
        found = of_first(d, hand_over(p, d, ids, max_tokens=20), tokens)
        first = max(0, tokens - WINDOW) if own_table else 0
        wanted = kv_of_head(ids[first:-1], first, origin=0)[:, None, None]
        assert torch.equal(found[first:], wanted.expand_as(found[first:])), f"{tokens} tokens"
    settle(p, d)


@each_once("tp own_table another", (1, 2, 1, 2), (False, True), (False, True))
def test_a_p_without_the_head(
    group: EngineGroup, make: Make, lines: Lines, own_table: bool, tp: int, another: bool
) -> None:
    """D has the model's KV, and none of another head's or of what its blocks held before."""
    p: Engine = make(0, 1) if another else group.engine(0)
    d = make(1, own_table=own_table, tp=tp)
    for tokens in LENGTHS:
        found = of_first(d, hand_over(p, d, prompt(tokens, tokens), max_tokens=20), tokens)
        held = found[max(0, tokens - WINDOW) :] if own_table else found
        assert not held.any(), f"{tokens} tokens"
    settle(p, d)
    assert not d.failed
    assert len(lines("lacks 1 layers of the model that drafts here")) == tp


def test_what_d_has_computed_itself_keeps_its_kv(group: EngineGroup, make: Make) -> None:
    """The first blocks of a prompt are in D's prefix cache."""
    p, d, ids = group.engine(0), make(1), prompt(8 * BLOCK)
    d.finish(d.add(ids[: 5 * BLOCK]))
    name = d.add(ids, p.prefill(ids), max_tokens=5)
    d.finish(name, beside=[p])
    found, ours = of_first(d, name, len(ids)), d.origins[name].ours
    assert ours >= 3 * BLOCK
    wanted = kv_of_head(ids[:ours], 0, origin=1)[:, None, None]
    assert torch.equal(found[:ours], wanted.expand_as(found[:ours]))
    assert not found[ours:].any()
    settle(p, d)


def test_a_d_without_the_head(group: EngineGroup, make: Make, lines: Lines) -> None:
    p, d = make(0), group.engine(1)
    for tokens in LENGTHS:
        hand_over(p, d, prompt(tokens, tokens), max_tokens=20)
    settle(p, d)
    assert not lines("the model that drafts")


def test_a_d_without_a_head_that_attends_to_a_window(group: EngineGroup, make: Make, lines: Lines) -> None:
    """D cannot tell the head's table from one of the model of which P has freed blocks: it prefills longer prompts."""
    p, d = make(0, own_table=True), group.engine(1)
    hand_over(p, d, prompt(BLOCK, 1), max_tokens=20)
    name = d.add(prompt(250), p.prefill(prompt(250)), max_tokens=20)
    d.finish(name, beside=[p])
    assert d.origins[name].theirs == 0 and lines("kept the window")
    settle(p, d)


@pytest.mark.parametrize("inside", [False, True], ids=["beside-the-steps", "inside-the-step"])
def test_the_step_after_a_load_has_the_form_of_a_decode_step(make: Make, inside: bool) -> None:
    """As many tokens as a step with drafts: so a batch of D that decodes stays uniform, and has its full CUDA graph."""
    p, d = make(0, ahead=1), make(1, ahead=1, extra={} if inside else {"step_hold_seconds": 0.0})
    for number in range(3):  # how long loads take is known after the first
        decoding = d.add(prompt(30, 90 + number), max_tokens=100)
        d.step()
        name = hand_over(p, d, prompt(100, number), max_tokens=5)
        turn, _ = d.first[name]
        assert len(turn.ids) - turn.start == 1 + DRAFTS
        assert turn.drafts == [0] * DRAFTS, "placeholders: D has drafted nothing yet"
        d.finish(decoding)
    assert bool(d.step_loads) == inside
    settle(p, d)


# --- which layers draft ---------------------------------------------------------------------------------------------
def test_what_is_kept_for_clients_drafts_nothing(make: Make) -> None:
    d = make(0)
    config = d.config
    assert from_vllm.draft_layers(config, d.workers[0]).keys() == {HEAD}
    assert from_vllm.draft_layers(config, SimpleNamespace(drafter=object())) == {}
    kept = SimpleNamespace(speculative_config=SimpleNamespace(method="extract_hidden_states"))
    runner = SimpleNamespace(speculator=SimpleNamespace(draft_attn_layer_names={HEAD}))
    assert from_vllm.draft_layers(kept, runner) == {}


def test_a_p_that_lacks_a_layer_which_no_runner_names_is_refused(
    group: EngineGroup, make: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one of the model itself."""
    monkeypatch.setattr(from_vllm, "draft_layers", lambda config, runner: {})
    p, d = group.engine(0), make(1)
    name = d.add(prompt(40), p.prefill(prompt(40)), max_tokens=5)
    d.finish(name, beside=[p])
    assert d.origins[name].theirs == 0
    assert lines("layers differs", HEAD)
    settle(p, d)
