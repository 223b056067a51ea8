"""What the budget refuses, and the items to measure with; ``tests/vllm`` compares all numbers with vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.binding.encoder_budget import MultiModalBudget
from kvferry.transport.errors import ConfigError


class Processor:
    """Modalities with fixed limits and sizes."""

    def __init__(self, limits: dict[str, int], tokens: dict[str, int]) -> None:
        self.asked: list[tuple[dict[str, int], Any]] = []
        self.info = SimpleNamespace(
            supported_mm_limits=limits, allowed_mm_limits=limits, get_mm_max_tokens_per_item=lambda *_, **__: tokens
        )

    def get_dummy_mm_inputs(self, mm_counts: dict[str, int], cache: Any = None) -> dict[str, Any]:
        self.asked.append((dict(mm_counts), cache))
        return {"mm_kwargs": {name: [None if cache == "full" else f"item of {name}"] for name in mm_counts}}


def config(**scheduler: Any) -> SimpleNamespace:
    settings = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_num_encoder_input_tokens": 32, "encoder_cache_size": 32,
        "enable_chunked_prefill": True, "disable_chunked_mm_input": False, **scheduler,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=40, get_multimodal_config=lambda: None),
        scheduler_config=SimpleNamespace(**settings),
    )


def budget(settings: Any, processor: Processor, **more: Any) -> MultiModalBudget:
    return MultiModalBudget(settings, SimpleNamespace(create_processor=lambda model: processor), **more)


def test_items_to_measure_with() -> None:
    processor = Processor({"image": 1, "video": 1}, {"image": 4, "video": 8})
    made = budget(config(), processor, cache="cache")
    assert made.get_dummy_encoder_profile_inputs() == [("video", "item of video")] * 4
    assert made.get_dummy_encoder_profile_inputs("image", 3) == [("image", "item of image")] * 3
    assert made.get_dummy_encoder_profile_inputs("image", 0) == []
    assert processor.asked == [({"video": 1}, "cache"), ({"image": 1}, "cache"), ({"image": 1}, "cache")]
    assert budget(config(), Processor({"image": 0}, {"image": 4})).get_dummy_encoder_profile_inputs() == []
    assert budget(config(), Processor({"image": 1}, {"image": 0})).get_encoder_budget() == 32
    nothing = budget(config(max_num_encoder_input_tokens=0), Processor({"image": 1}, {"image": 0}))
    assert nothing.get_dummy_encoder_profile_inputs() == nothing.get_dummy_encoder_profile_inputs("image", 2) == []
    with pytest.raises(
        ConfigError, match=r"'imag' does not pass .* \(did you mean 'image'\?\), expected one of image, v"
    ):
        made.get_dummy_encoder_profile_inputs("imag")
    with pytest.raises(ConfigError, match="the dummy item of modality 'video' is in the cache already"):
        budget(config(), processor, cache="full").get_dummy_encoder_profile_inputs()


def test_the_cache_is_emptied() -> None:
    emptied: list[int] = []
    cache = SimpleNamespace(clear_cache=lambda: emptied.append(1))
    budget(config(), Processor({"image": 1}, {"image": 4}), cache=cache).reset_cache()
    budget(config(), Processor({"image": 1}, {"image": 4})).reset_cache()
    assert emptied == [1]


def test_items_that_no_step_takes() -> None:
    settings = config(disable_chunked_mm_input=True, max_num_batched_tokens=7)
    with pytest.raises(ConfigError, match=r"an item may have 8 tokens .* a step takes 7; raise max_num_batched_tokens"):
        budget(settings, Processor({"image": 1}, {"image": 8}))
    assert budget(settings, Processor({"image": 1}, {"image": 7})).mm_max_items_per_batch == {"image": 4}
    with pytest.raises(ConfigError, match="modality 'image' has items of -1 tokens"):
        budget(config(), Processor({"image": 1}, {"image": -1}))
