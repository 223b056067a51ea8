"""Memory request, encoder outputs and budget: ours and vLLM's on the same inputs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import SchedulerConfig
from vllm.multimodal import encoder_budget
from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import utils as theirs

from kvferry.connector.binding.encoder_budget import MultiModalBudget
from kvferry.connector.binding.memory_request import request_memory
from kvferry.connector.binding.mm_placeholders import sanity_check_mm_encoder_outputs
from tests.vllm.fake_layers import Compared

pytestmark = pytest.mark.vllm
GIB = 1 << 30


def test_request_memory() -> None:
    seen = Compared()
    for seed in range(3000):
        draw = random.Random(seed)
        total = draw.choice([draw.randint(1, 99), draw.randint(1, 200 * GIB)])
        free = int(total * draw.choice([draw.random(), 1.0]))
        device = MemorySnapshot(free_memory=free, total_memory=total, device="cpu", auto_measure=False)
        cache = SimpleNamespace(gpu_memory_utilization=draw.choice([draw.random() or 1.0, 0.1, 0.9, 0.95, 1.0]))
        external = draw.choice([0, 0, draw.randint(0, total), int(total * 0.1)])
        seen.same(theirs.request_memory, request_memory, device, cache, external)
    seen.at_least(agreed=500, refused=500)


def test_sanity_check_mm_encoder_outputs() -> None:
    seen = Compared()
    for seed in range(1000):
        draw = random.Random(seed)
        count = draw.randint(0, 3)
        axes = [2] * 9 + [1, 3]
        items: Any = [torch.zeros([draw.randint(0, 3) for _ in range(draw.choice(axes))]) for _ in range(count)]
        form = draw.choice(["list", "tuple", "tensor", "dict", "iterator"])
        if form == "tensor":
            items = torch.zeros(max(count, 1), *[2] * draw.choice([1, 2, 2, 3]))
        elif form != "list":
            items = {"tuple": tuple(items), "dict": dict(enumerate(items)), "iterator": iter(items)}[form]
        expected = draw.choice([count, count, 2])
        seen.same(theirs.sanity_check_mm_encoder_outputs, sanity_check_mm_encoder_outputs, items, expected)
    seen.at_least(agreed=150, refused=150)


class Processor:
    """Limits and sizes of modalities, as vLLM's processors give them; dummy items where it knows no sizes."""

    def __init__(self, draw: random.Random) -> None:
        names = draw.sample(["image", "video", "audio", "vision_chunk"], draw.randint(1, 4))
        self.limits = {name: draw.choice([0, 1, 1, 3, 999]) for name in names}
        self.sizes = {name: draw.choice([0, 1, 7, 64, 300, 5000]) for name in names if draw.random() < 0.9}
        self.known = draw.random() < 0.6
        self.asked: list[Any] = []
        self.info = SimpleNamespace(
            supported_mm_limits={name: draw.choice([None, 5]) for name in names},
            allowed_mm_limits=self.limits,
            get_mm_max_tokens_per_item=lambda seq_len, mm_counts: self.most(mm_counts),
            ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=512)),
        )

    def most(self, mm_counts: dict[str, int]) -> dict[str, int] | None:
        self.asked.append({**mm_counts})
        return self.sizes if self.known else None

    def get_dummy_mm_inputs(self, mm_counts: dict[str, int], cache: Any = None) -> dict[str, Any]:
        self.asked.append(({**mm_counts}, cache))
        return {
            "mm_placeholders": {
                name: [
                    PlaceholderRange(0, self.sizes[name] + 2, torch.tensor([False, *[True] * self.sizes[name], False]))
                ]
                for name in mm_counts
                if name in self.sizes
            },
            "mm_kwargs": {name: [f"an item of {name}"] for name in mm_counts},
        }


def test_MultiModalBudget(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "max_model_len", "max_num_reqs", "mm_limits", "encoder_compute_budget", "encoder_cache_size",
        "mm_max_toks_per_item", "mm_max_items_per_prompt", "mm_max_items_per_batch", "cache",
    )  # fmt: skip
    seen = Compared()
    for seed in range(500):
        draw = random.Random(seed)
        mine, other = (Processor(random.Random(seed)) for _ in range(2))
        batched = draw.choice([16, 64, 512, 4096])
        scheduler = SchedulerConfig(
            max_model_len=16, is_encoder_decoder=False, max_num_batched_tokens=batched,
            max_num_seqs=draw.choice([1, 2, 16]), enable_chunked_prefill=draw.random() < 0.6,
            disable_chunked_mm_input=draw.random() < 0.2,
        )  # fmt: skip
        scheduler.encoder_cache_size = draw.choice([batched, 0, 100, 9000])
        scheduler.max_num_encoder_input_tokens = draw.choice([batched, 0, 100, 9000])
        embeds = draw.choice([None, SimpleNamespace(enable_mm_embeds=True), SimpleNamespace(enable_mm_embeds=False)])
        model = SimpleNamespace(max_model_len=draw.choice([16, 512, 9000]), get_multimodal_config=lambda e=embeds: e)
        config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        cache = draw.choice([None, SimpleNamespace(emptied=0)])
        monkeypatch.setattr(encoder_budget, "processor_only_cache_from_config", lambda config, c=cache: c)
        pair = seen.both(
            lambda c, o=other, k=cache: encoder_budget.MultiModalBudget(c, registry(o), enable_cache=k is not None),
            lambda c, m=mine, k=cache: MultiModalBudget(c, registry(m), cache=k),
            config,
        )
        if pair is None:
            continue
        assert [getattr(pair[1], name) for name in names] == [getattr(pair[0], name) for name in names]
        assert pair[1].get_encoder_budget() == pair[0].get_encoder_budget()
        modality = draw.choice([None, *mine.sizes])
        calls = Compared()
        for name, *given in (
            ("get_modality_with_max_tokens",),
            ("get_dummy_encoder_profile_inputs",),
            ("get_dummy_encoder_profile_inputs", modality),
            ("get_dummy_encoder_profile_inputs", modality, 2),
        ):
            if modality in pair[0].mm_max_toks_per_item or modality is None:
                calls.same(getattr(pair[0], name), getattr(pair[1], name), *given)
        assert mine.asked == other.asked
        seen["several"] += max(pair[1].mm_max_items_per_batch.values(), default=0) > 1
    seen.at_least(agreed=230, refused=15, several=60)


def registry(processor: Processor) -> Any:
    return SimpleNamespace(create_processor=lambda model_config: processor)
